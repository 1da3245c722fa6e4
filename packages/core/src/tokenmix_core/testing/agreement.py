"""Compare an operation's kernels with its eager reference: values, and gradients of all tensor arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix_core.testing.closeness import assert_within

Inputs = Mapping[str, Tensor]


def upstream_like(outputs: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return a random upstream gradient for each output, in the dtype of the output."""
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
    """Return a dict of outputs by name and of the inputs' gradients as `d<name>`, and the upstream gradients used.

    `function` takes the inputs by name and returns a named tuple or `Results`. If `dtype` is given, inputs and upstream
    gradients are first converted to it.
    """
    leaves = {name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in inputs.items()}
    outputs = function(**leaves)._asdict()
    upstream = dict(upstream or upstream_like(outputs))
    # leave out outputs that require no gradient; inputs that no output uses get zero gradients
    used = {name: x for name, x in outputs.items() if x.requires_grad}
    into = [upstream[name].to(x.dtype) for name, x in used.items()]
    grads = torch.autograd.grad(list(used.values()), list(leaves.values()), into, materialize_grads=True)
    return outputs | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}, upstream


def gradients_through(function: Callable, inputs: Inputs, output: str) -> dict[str, Tensor]:
    """Return the gradients of the sum of squares of the result named `output`, by the names of the inputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    loss = getattr(function(**leaves), output).square().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def granted(eps: float) -> float:
    """Return the relative error that `assert_agrees` always allows, for a dtype of precision `eps`."""
    # eps / 2 is the error of one rounding. float32 gets 8 eps: kernels multiply in three tf32 parts and sum gates in
    # another order than the reference; the largest error measured was 7.5e-7, 2.3 times the reference's error
    return 8 * eps if eps < 1e-5 else eps / 2


def granted_to_sums(*names: str, times: int = 2) -> Callable[[str, float], float]:
    """Return a `floor` function for `assert_agrees`: `granted`, but in float32 `times` as much for the results `names`.

    `names` are gradients, such as "dA_log", that are sums over tokens whose terms cancel. Measured errors: 1.5e-6 on an
    H200 for a parameter with one value per head, 2.3 times the error of an implementation with one operation per step;
    1.8e-6 for decays in the emulator on a CPU with AVX2, where the reference has 0.5e-6.
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
    """Assert that in every value and gradient `function` errs at most `factor` times as much as the eager reference.

    Errors are taken relative to `reference` in float64. The eager reference is `baseline`, or `reference` if None,
    called with inputs in their own dtypes. `floor` maps a result's name and the largest eps of the inputs' dtypes to
    the error that is always allowed; by default `granted` of this eps, even for float32 results.
    """
    got, upstream = values_and_gradients(function, inputs)
    exact, _ = values_and_gradients(reference, inputs, upstream, dtype=torch.float64)
    eager, _ = values_and_gradients(baseline or reference, inputs, upstream)
    coarsest = max(torch.finfo(x.dtype).eps for x in inputs.values())
    for name, x in got.items():
        at_least = granted(coarsest) if floor is None else floor(name, coarsest)
        assert_within(name, x, exact[name], eager[name], factor=factor, floor=at_least)


def watched(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], list[str]]:
    """Return the results of `run()`, and the names of the torch operations that a dispatch mode saw in it."""
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        return run(), seen


class RoundedProducts(TorchDispatchMode):
    """Rounds the operands and results of matmuls and triangular solves to `dtype`, as matmuls of that dtype do.

    Under this mode the matmuls of a float32 reference, and of its backward pass, have the rounding errors of `dtype`.
    Sums inside matmuls, and elementwise operations, keep the precision of their inputs.
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
    """Return `function`, with cumulative sums along the last axis computed in the order of parallel scans.

    Differences of such sums have larger rounding errors than differences of sequential sums, in which more errors
    cancel. Decays such as exp(b_C − b_t), b the cumulative log-decays in a chunk of C tokens, then have larger errors,
    as in kernels.
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
