"""RMS norm of rows, fused with the preceding residual sum or with a SiLU gate.

Liger-Kernel, an optional extra, has RMS norms too; ours need no extra, include gated norms, and their launches go
through the launch cache and may overlap by PDL. The speeds of the two have not been compared.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.checks import bind_shapes, check_dtype, check_same_device, check_tensors
from tokenmix_core.ops.dispatch import row_impl
from tokenmix_core.ops.types import Impl

GatePosition = Literal["before", "after"]
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class NormOutput(NamedTuple):
    """The result of `rms_norm`.

    Attributes:
        y: the normalised rows, in the shape of x.
        total: the sum before normalisation: x, or x + branch.
    """

    y: Tensor
    total: Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, branch: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y and the sum before normalisation, in eager PyTorch, for any device and dtype."""
    total = x if branch is None else x + branch
    return F.rms_norm(total, weight.shape, weight.to(total.dtype), eps).to(dtype), total


def gated_rms_norm_reference(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, gate: GatePosition, size: int, dtype: torch.dtype
) -> Tensor:
    """Return `gated_rms_norm` over rows of `size` elements, computed in eager PyTorch, for any device and dtype."""
    shape, factor = x.shape, None if z is None else F.silu(z)
    if factor is not None and gate == "before":
        x = x * factor
    weight, rows = weight.to(x.dtype), x.unflatten(-1, (-1, size))
    if len(weight) == size:
        y = F.rms_norm(rows, weight.shape, weight, eps).view(shape)
    else:
        y = F.rms_norm(rows, (size,), None, eps).view(shape) * weight
    if factor is not None and gate == "after":
        y = y * factor
    return y.to(dtype)


def rms_norm(
    x: Float[Tensor, "*tokens D"],
    weight: Float[Tensor, "D"],
    branch: Float[Tensor, "*tokens D"] | None = None,
    *,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
    impl: Impl | None = None,
) -> NormOutput:
    r"""Add a branch to a residual stream and normalise the sum, in float32.

    .. math:: s = x + \text{branch}, \qquad y = \frac{s}{\sqrt{\text{mean}(s^2) + \text{eps}}} \odot \text{weight}

    Differentiable in x, weight and branch, through both results; only s and weight are saved for the gradient.

    Args:
        x: `[*, D]`, bfloat16, float16 or float32 (the reference also float64).
        weight: `[D]` in any of these dtypes.
        branch: in the shape of x, in any of these dtypes, or None; s has the wider dtype.
        eps: added to the mean square.
        dtype: dtype of y; None for that of s.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, else the reference,
            which torch.compile fuses with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    op = "rms_norm"
    _check_same(op, x, branch=branch)
    _check_weight(op, x, weight, x.shape[-1])
    wide = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    dtype = wide if dtype is None else dtype
    if row_impl(op, impl, x) == "reference" or not x.numel():
        return NormOutput(*rms_norm_reference(x, weight, branch, eps, dtype))
    from tokenmix_core.ops.fused.rms_norm_kernels import rms_norm_triton

    y, *total = rms_norm_triton(x, branch, None, weight, eps, x.shape[-1], False, dtype)
    return NormOutput(y, *(total or (x,)))


def gated_rms_norm(
    x: Float[Tensor, "*tokens D"],
    z: Float[Tensor, "*tokens D"] | None,
    weight: Float[Tensor, "size"],
    *,
    size: int | None = None,
    eps: float = 1e-6,
    gate: GatePosition = "after",
    dtype: torch.dtype | None = None,
    impl: Impl | None = None,
) -> Float[Tensor, "*tokens D"]:
    """Return norm(x) · weight · silu(z), or norm(x · silu(z)) · weight, over consecutive rows of `size` elements.

    Differentiable in x, z and weight; only these are saved for the gradient.

    Args:
        x: `[*, D]`, as for `rms_norm`; slices of a wider tensor are not copied.
        z: the gate, in the shape of x; None for no gate.
        weight: `[size]`, shared by all rows, or `[D]`.
        size: elements of a row, a divisor of D; None for D.
        eps: added to the mean square of a row.
        gate: whether the gate acts "before" or "after" the normalisation.
        dtype: dtype of the result; None for that of x.
        impl: as for `rms_norm`.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `gate` is unknown.
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
    from tokenmix_core.ops.fused.rms_norm_kernels import gated_rms_norm_triton

    return gated_rms_norm_triton(x, None, z, weight, eps, size, gate == "before", dtype)[0]


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
