"""Compare an operation's kernels with its eager reference: values, and gradients of every tensor argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix_core.testing.closeness import assert_within

Inputs = Mapping[str, Tensor]


def upstream_like(outputs: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return random upstream gradients for the outputs, each in the dtype of its output."""
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
    """Return outputs by name and gradients of all inputs as `d<name>` in one dict, and the upstream gradients used.

    `function` takes the inputs by name and returns a named tuple; `dtype` converts inputs and upstream gradients first.
    """
    leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves)._asdict()
    upstream = dict(upstream or upstream_like(outputs))
    # some results may not require gradients; unused inputs get zero gradients
    used = {name: x for name, x in outputs.items() if x.requires_grad}
    into = [upstream[name].to(x.dtype) for name, x in used.items()]
    grads = torch.autograd.grad(list(used.values()), list(leaves.values()), into, materialize_grads=True)
    return outputs | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}, upstream


def gradients_through(function: Callable, inputs: Inputs, output: str) -> dict[str, Tensor]:
    """Return the gradients of the sum of squares of one output, by the inputs' names."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    loss = getattr(function(**leaves), output).square().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def granted(eps: float) -> float:
    """Return the relative error that `assert_agrees` always permits for a dtype of this eps."""
    # eps / 2 is one rounding. float32 gets 8 eps: kernels multiply in three tf32 parts and sum gates in another order
    # than the reference; measured errors reached 7.5e-7, 2.3 times the reference's
    return 8 * eps if eps < 1e-5 else eps / 2


def granted_to_sums(*names: str, times: int = 2) -> Callable[[str, float], float]:
    """Return a `floor` for `assert_agrees`: in float32, `granted` × `times` for gradients `names` that sum tokens.

    The terms of these sums cancel. Measured errors: 1.5e-6 on an H200 for a parameter with one value per head, 2.3
    times the error of an implementation by single operations; 1.8e-6 for decays in the emulator on a CPU with AVX2,
    against 0.5e-6 for the reference.
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

    Errors are relative to `reference` in float64. The eager reference is `baseline` (default: `reference`), run in the
    inputs' own dtype. `floor` maps a result's name and the coarsest eps of the input dtypes to the error that is always
    allowed; the default is `granted` of that eps, for float32 results, too.
    """
    got, upstream = values_and_gradients(function, inputs)
    exact, _ = values_and_gradients(reference, inputs, upstream, dtype=torch.float64)
    eager, _ = values_and_gradients(baseline or reference, inputs, upstream)
    coarsest = max(torch.finfo(x.dtype).eps for x in inputs.values())
    for name, x in got.items():
        at_least = granted(coarsest) if floor is None else floor(name, coarsest)
        assert_within(name, x, exact[name], eager[name], factor=factor, floor=at_least)


def watched(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], list[str]]:
    """Return the results of `run()`, and the names of the torch operations that a dispatch mode sees meanwhile."""
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        return run(), seen


class RoundedProducts(TorchDispatchMode):
    """Round the operands and results of matmuls and triangular solves to `dtype`, as matmuls of that dtype do.

    Under this mode a float32 reference, backward included, has the matmul rounding of `dtype`. Sums inside matmuls and
    elementwise operations keep the precision of their inputs.
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
    """Return the function with its cumulative sums along the last axis computed by doubling, as in parallel scans.

    The rounding errors of two such sums cancel less in a difference than those of sequential sums, so factors such as
    exp(b_last - b_t) have larger errors.
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
