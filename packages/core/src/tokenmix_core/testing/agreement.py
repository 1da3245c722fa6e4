"""An operation's kernels against its eager reference: values, and gradients of every tensor argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix_core.testing.closeness import assert_within

Inputs = Mapping[str, Tensor]


def upstream_like(outputs: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Random gradients for the outputs, each in its output's dtype."""
    generator = torch.Generator(next(iter(outputs.values())).device).manual_seed(seed)
    return {
        name: torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)
        for name, x in outputs.items()
    }


def values_and_gradients(
    function: Callable,
    inputs: Inputs,
    upstream: Mapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs by name with the gradients of all inputs as `d<name>`, and the upstream gradients used.

    `function` takes the inputs by name and returns a named tuple; `dtype` converts inputs and upstream gradients first.
    """
    leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves)._asdict()
    upstream = dict(upstream or upstream_like(outputs))
    # a result may be a constant, and an input that plays no part has a gradient of zeros
    used = {name: x for name, x in outputs.items() if x.requires_grad}
    into = [upstream[name].to(x.dtype) for name, x in used.items()]
    grads = torch.autograd.grad(list(used.values()), list(leaves.values()), into, materialize_grads=True)
    return outputs | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}, upstream


def gradients_through(function: Callable, inputs: Inputs, output: str) -> dict[str, Tensor]:
    """Gradients of the inputs by name where one output alone is used, as the sum of its squares."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    loss = getattr(function(**leaves), output).square().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def granted(eps: float) -> float:
    """Return the relative error that `assert_agrees` always permits for a dtype of this eps."""
    # half a dtype's spacing is one rounding; in float32, where kernels multiply in three tf32 parts and sum gates in
    # another order than the reference, errors up to 7.5e-7 were seen, 2.3 times the reference's
    return 8 * eps if eps < 1e-5 else eps / 2


def granted_to_sums(*names: str, times: int = 2) -> Callable[[str, float], float]:
    """A `floor` of `assert_agrees` that grants `times` as much in float32 to gradients that are sums over tokens.

    What they sum cancels: 1.5e-6 was seen on an H200 of a number a head, 2.3 times what single operations had in the
    same four values; and 1.8e-6 of decays, by the emulator on a processor (AVX2 alone) where the reference's own err
    by .5e-6.
    """
    return lambda name, eps: granted(eps) * (times if name in names and eps < 1e-5 else 1)


def assert_agrees(
    function: Callable,
    reference: Callable,
    inputs: Inputs,
    *,
    baseline: Callable | None = None,
    factor: float = 2.0,
    floor: Callable[[str, float], float] | None = None,
) -> None:
    """Assert that `function` errs, in every value and gradient, at most `factor` times as much as the eager reference.

    Errors are against `reference` in float64; `baseline` (default: `reference`) is run in the inputs' own dtype.
    Results kept in float32 are held to the rounding of the inputs' dtype, with which they are computed, or to what
    `floor` makes of a result's name and that dtype's eps.
    """
    got, upstream = values_and_gradients(function, inputs)
    exact, _ = values_and_gradients(reference, inputs, upstream, dtype=torch.float64)
    eager, _ = values_and_gradients(baseline or reference, inputs, upstream)
    coarsest = max(torch.finfo(x.dtype).eps for x in inputs.values())
    for name, x in got.items():
        at_least = granted(coarsest) if floor is None else floor(name, coarsest)
        assert_within(name, x, exact[name], eager[name], factor=factor, floor=at_least)


def watched(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], list[str]]:
    """Run `run()`: its results, and the operations of torch that a mode around it is shown."""
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        return run(), seen


class RoundedProducts(TorchDispatchMode):
    """Round the operands and results of matmuls and triangular solves to `dtype`, as matmuls of that dtype do.

    An eager reference run under this mode, backward included, is the reference run in `dtype`: sums inside a matmul,
    and all that is computed element by element, keep the precision they have.
    """

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.linalg_solve_triangular.default)

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self.PRODUCTS:
            return func(*args, **(kwargs or {}))
        return self._rounded(func(*(self._rounded(x) for x in args), **(kwargs or {})))

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(x.dtype)


def with_scanned_sums(function: Callable) -> Callable:
    """The function with its cumulative sums along the last axis taken by doubling, as scans in parallel take them.

    Differences of such sums cancel less than those of sums in order: the last token's factor exp(b_last - b_t) errs by
    the rounding of both.
    """

    def scanned(**inputs):
        with _ScannedSums():
            return function(**inputs)

    return scanned


class _ScannedSums(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.cumsum.default or args[1] not in (-1, args[0].dim() - 1):
            return func(*args, **(kwargs or {}))
        x, step = args[0], 1
        while step < x.shape[-1]:
            x = x + torch.nn.functional.pad(x[..., :-step], (step, 0))
            step *= 2
        return x
