"""Public functions of the norms: shapes, checks and the choice of an implementation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.checks import bind_shapes, check_dtype, check_same_device, check_tensors
from tokenmix_core.ops.dispatch import row_impl
from tokenmix_core.ops.fused.rms_norm.reference import GatePlace, gated_rms_norm_reference, rms_norm_reference
from tokenmix_core.ops.types import Impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class NormOutput(NamedTuple):
    """The result of `rms_norm`.

    Attributes:
        y: the normalised rows, in the shape of x.
        total: what was normalised: x, or x + branch.
    """

    y: Tensor
    total: Tensor


def rms_norm(
    x: Float[Tensor, "*tokens D"],
    weight: Float[Tensor, "D"],
    branch: Float[Tensor, "*tokens D"] | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    impl: Impl | None = None,
) -> NormOutput:
    r"""The norm of a residual stream, after a branch was added to it; sums are taken in float32.

    .. math:: s = x + \text{branch}, \qquad y = \frac{s}{\sqrt{\text{mean}(s^2) + \text{eps}}} \odot \text{weight}

    Differentiable in x, weight and branch, through both results. The gradient keeps s alone.

    Args:
        x: `[*, D]`, bfloat16, float16 or float32 (the reference also float64).
        weight: `[D]`, of any of these dtypes.
        branch: as x, in a dtype of its own, or None; s has the wider one.
        eps: added to the mean square.
        dtype: of y; None for that of s.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, the reference for
            others, and where torch.compile traces, which fuses it with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    op = "rms_norm"
    _check_same(op, x, branch=branch)
    _check_weight(op, x, weight, x.shape[-1])
    wide = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    dtype = wide if dtype is None else dtype
    if row_impl(op, impl, x) == "reference" or not x.numel():
        return NormOutput(*rms_norm_reference(x, weight, branch, eps, dtype))
    from tokenmix_core.ops.fused.rms_norm.autograd import norm

    y, *total = norm(x, branch, weight, eps, dtype)
    return NormOutput(y, *(total or (x,)))


def gated_rms_norm(
    x: Float[Tensor, "*tokens D"],
    z: Float[Tensor, "*tokens D"] | None,
    weight: Float[Tensor, "size"],
    *,
    size: int | None = None,
    eps: float = 1e-6,
    gate: GatePlace = "after",
    dtype: torch.dtype | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "*tokens D"]:
    """norm(x) · weight · silu(z), or norm(x · silu(z)) · weight, of rows of `size` elements side by side.

    Differentiable in x, z and weight; the gradient keeps nothing else.

    Args:
        x: `[*, D]`, as for `rms_norm`; slices of a wider tensor are read where they lie.
        z: as x; None for a gate of one.
        weight: `[size]`, which all rows share, or `[D]`.
        size: of a row, a divisor of D; None for D.
        eps: added to the mean square.
        gate: whether the gate acts "before" or "after" the normalisation.
        dtype: of the result; None for that of x.
        impl: as for `rms_norm`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or an unknown place of the gate.
    """
    op = "gated_rms_norm"
    if gate not in ("before", "after"):
        raise ValueError(f"{op}: gate must be 'before' or 'after', got {gate!r}")
    _check_same(op, x, z=z)
    size = x.shape[-1] if size is None else size
    if size < 1 or x.shape[-1] % size:
        raise ValueError(f"{op}: size must divide D = {x.shape[-1]}, got {size}")
    _check_weight(op, x, weight, size)
    dtype = x.dtype if dtype is None else dtype
    if row_impl(op, impl, x) == "reference" or not x.numel():
        return gated_rms_norm_reference(x=x, z=z, weight=weight, eps=eps, gate=gate, size=size, dtype=dtype)
    from tokenmix_core.ops.fused.rms_norm.autograd import gated

    return gated(x, z, weight, eps, gate == "before", size, dtype)


def _check_same(op: str, x: Tensor, **other: Tensor | None) -> None:
    check_tensors(op, x=x, **{name: y for name, y in other.items() if y is not None})
    check_dtype(op, _FLOATS, x=x, **other)
    check_same_device(op, x=x, **other)
    for name, y in other.items():
        if y is not None and y.shape != x.shape:
            raise ValueError(f"{op}: {name} must have x's shape and device, got {list(y.shape)} for {list(x.shape)}")


def _check_weight(op: str, x: Tensor, weight: Tensor, size: int) -> None:
    bind_shapes(op, {}, weight=(weight, "size"))
    check_dtype(op, _FLOATS, weight=weight)
    check_same_device(op, x=x, weight=weight)
    if weight.shape[0] not in (size, x.shape[-1]):
        raise ValueError(
            f"{op}: weight must have shape [{size}]{f' or [{x.shape[-1]}]' if x.shape[-1] != size else ''} on "
            f"{x.device}, got {list(weight.shape)}"
        )
