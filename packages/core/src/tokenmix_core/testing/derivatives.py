"""Tests of an operation's second derivatives and of `torch.func` transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.testing.closeness import relative_error


class DerivativeTests:
    """Part of `OpContract`, which documents all other attributes.

    Attributes:
        straight_through: arguments that have a straight-through gradient, which differs from the results' derivative.
    """

    straight_through: ClassVar[tuple[str, ...]] = ()

    def test_function_transforms_give_what_autograd_gives(self, form, impl, device):
        here: Any = self
        dtype = torch.float64 if impl == "reference" else here.kernel_dtype()
        sizes = here.neighbours or here.valid
        calls = [here.make(dtype, "cpu" if impl == "reference" else device, seed, **sizes) for seed in range(2)]
        function = self._summed(form, calls[0].options, impl)
        stacked = {name: torch.stack([tensors[name] for tensors, _ in calls]) for name in calls[0].tensors}
        if here.mutated and impl == "triton":
            with pytest.raises(RuntimeError, match=r"\w+: .*writes to a state"):
                torch.vmap(function)(stacked)
            return
        found = torch.vmap(function)(stacked)
        wanted = torch.stack([function(tensors) for tensors, _ in calls])
        tolerance = 10 * torch.finfo(dtype).eps ** (1 if dtype == torch.float32 else 0.75)
        assert relative_error(found, wanted) < tolerance
        if not here.differentiable:
            return
        transformed = torch.func.grad(lambda x, rest: function(x | rest))
        per_example = torch.vmap(transformed)(*_split(stacked))
        for i, (tensors, _) in enumerate(calls):
            leaves, rest = _split(tensors)
            leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
            wanted = torch.autograd.grad(function(leaves | rest), [*leaves.values()], materialize_grads=True)
            for (name, x), exact in zip(transformed(*_split(tensors)).items(), wanted, strict=True):
                assert relative_error(x, exact) < tolerance, name
                assert relative_error(per_example[name][i], exact) < tolerance, name

    def test_only_the_reference_has_second_derivatives(self, form, impl, device):
        here: Any = self
        if not here.differentiable:
            pytest.skip("the operation has no gradients")
        if impl == "reference":
            tensors, options = here.make(**here.valid)
            leaves, rest = _split(tensors)
            names = [name for name in leaves if name not in self.straight_through]
            rest |= {name: x for name, x in leaves.items() if name not in names}

            def run(*given: Tensor) -> tuple[Tensor, ...]:
                found = here._function(form, options, impl)(**dict(zip(names, given, strict=True)), **rest)
                return tuple(y for y in found.values() if y.requires_grad)

            given = [leaves[name].clone().requires_grad_() for name in names]
            assert torch.autograd.gradgradcheck(run, given, fast_mode=True)
            return
        tensors, options = here.make(here.kernel_dtype(), device, **(here.neighbours or here.valid))
        leaves, rest = _split(tensors)
        function = self._summed(form, options, impl)
        given = {name: x.clone().requires_grad_() for name, x in leaves.items()}
        with pytest.raises(RuntimeError, match=r"\w+: gradients of gradients are .* impl='reference' have them"):
            torch.autograd.grad(function(given | rest), [*given.values()], create_graph=True, allow_unused=True)
        inner = torch.func.grad(lambda x: function(x | rest))
        with pytest.raises(RuntimeError, match=r"\w+: gradients of gradients are .* impl='reference' have them"):
            torch.func.grad(lambda x: sum(y.square().sum() for y in inner(x).values()))(leaves)

    def _summed(self, form: str, options: Mapping[str, Any], impl: str) -> Callable[[dict[str, Tensor]], Tensor]:
        """Return a function from tensors by name to the sum of the squares of all results of `forms[form]`."""
        here: Any = self

        def run(tensors: dict[str, Tensor]) -> Tensor:
            found = here._function(form, options, impl)(**tensors).values()
            return torch.stack([(x if x.dtype == torch.float64 else x.float()).square().sum() for x in found]).sum()

        return run


def _split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split tensors, by name, into those that can have gradients and all others."""
    floats = {name: x for name, x in tensors.items() if x.is_floating_point()}
    return floats, {name: x for name, x in tensors.items() if name not in floats}
