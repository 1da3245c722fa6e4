"""SwiGLU: silu(a) · b, alone or followed by a linear layer.

Liger-Kernel, an optional extra, has a SwiGLU too; ours needs no extra, and its launches go through the launch cache and
may overlap by PDL. The speeds of the two have not been compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.checks import check_dtype, check_same_device, check_same_dtype, check_tensors
from tokenmix_core.ops.dispatch import row_impl
from tokenmix_core.ops.types import Impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def swiglu_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) · b in eager PyTorch, for any device and dtype."""
    return F.silu(a) * b


def swiglu(a: Float[Tensor, "*tokens F"], b: Float[Tensor, "*tokens F"], *, impl: Impl | None = None) -> Tensor:
    """Return silu(a) · b; a and b are saved for the gradient. The kernel computes in float32.

    Args:
        a, b: `[*, F]` of one dtype; halves of a wider tensor are not copied.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, else the reference,
            which torch.compile fuses with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    _check("swiglu", a, b)
    if row_impl("swiglu", impl, a) == "reference" or not a.numel():
        return swiglu_reference(a, b)
    from tokenmix_core.ops.fused.swiglu_kernels import swiglu_triton

    return swiglu_triton(a, b)


def swiglu_linear(
    a: Float[Tensor, "*tokens F"],
    b: Float[Tensor, "*tokens F"],
    weight: Float[Tensor, "D F"],
    residual: Float[Tensor, "*tokens D"] | None = None,
    *,
    impl: Impl | None = None,
) -> Float[Tensor, "*tokens D"]:
    """Return (silu(a) · b) weightᵀ + residual; the kernels' gradient saves a, b and weight and recomputes silu(a) · b.

    Args:
        a, b, impl: as for `swiglu`.
        weight: `[D, F]` in the dtype of a and b.
        residual: added to the rounded result, in the dtype of a and b; for a single 16-bit token the GEMV adds it.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    op = "swiglu_linear"
    _check(op, a, b)
    check_tensors(op, weight=weight)
    check_same_dtype(op, a=a, weight=weight)
    check_same_device(op, a=a, weight=weight)
    if weight.dim() != 2 or weight.shape[1] != a.shape[-1]:
        raise ValueError(f"{op}: weight must have shape [D, {a.shape[-1]}], got {list(weight.shape)}")
    if residual is not None:
        check_tensors(op, residual=residual)
        check_same_dtype(op, a=a, residual=residual)
        check_same_device(op, a=a, residual=residual)
        shape = (*a.shape[:-1], len(weight))
        if residual.shape != shape:
            raise ValueError(f"{op}: residual must have shape {list(shape)}, got {list(residual.shape)}")
    if row_impl(op, impl, a) == "reference" or not a.numel():
        y = F.linear(swiglu_reference(a, b), weight)
        return y if residual is None else residual + y
    from tokenmix_core.ops.fused.swiglu_kernels import swiglu_linear_triton

    return swiglu_linear_triton(a, b, weight, residual)


def _check(op: str, a: Tensor, b: Tensor) -> None:
    check_tensors(op, a=a, b=b)
    check_dtype(op, _FLOATS, a=a)
    check_same_dtype(op, a=a, b=b)
    check_same_device(op, a=a, b=b)
    if a.shape != b.shape:
        raise ValueError(f"{op}: a and b must have one shape and device, got {list(a.shape)} and {list(b.shape)}")
