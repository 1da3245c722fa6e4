"""Public functions of SwiGLU's product: shapes, checks and the choice of an implementation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.checks import check_dtype, check_same_device, check_same_dtype, check_tensors
from tokenmix_core.ops.dispatch import row_impl
from tokenmix_core.ops.fused.swiglu.reference import swiglu_reference
from tokenmix_core.ops.types import Impl

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def swiglu(a: Float[Tensor, "*tokens F"], b: Float[Tensor, "*tokens F"], *, impl: Impl | None = None) -> Tensor:
    """silu(a) · b, computed in float32; the gradient keeps a and b.

    Args:
        a, b: `[*, F]` of one dtype; the halves of a wider tensor are read where they lie.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, the reference for
            others, and where torch.compile traces, which fuses it with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check("swiglu", a, b)
    if row_impl("swiglu", impl, a) == "reference" or not a.numel():
        return swiglu_reference(a, b)
    from tokenmix_core.ops.fused.swiglu.autograd import product

    return product(a, b)


def swiglu_linear(
    a: Float[Tensor, "*tokens F"],
    b: Float[Tensor, "*tokens F"],
    weight: Float[Tensor, "D F"],
    residual: Float[Tensor, "*tokens D"] | None = None,
    *,
    impl: Impl | None = None,
) -> Float[Tensor, "*tokens D"]:
    """(silu(a) · b) weightᵀ, and the residual stream; the gradient keeps a and b and makes their product once more.

    Args:
        a, b, impl: as for `swiglu`.
        weight: `[D, F]` in the dtype of a and b.
        residual: what is added to the rounded result, in the same dtype; for one token no launch of its own.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
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
    from tokenmix_core.ops.fused.swiglu.autograd import linear

    return linear(a, b, weight, residual)


def _check(op: str, a: Tensor, b: Tensor) -> None:
    check_tensors(op, a=a, b=b)
    check_dtype(op, _FLOATS, a=a)
    check_same_dtype(op, a=a, b=b)
    check_same_device(op, a=a, b=b)
    if a.shape != b.shape:
        raise ValueError(f"{op}: a and b must have one shape and device, got {list(a.shape)} and {list(b.shape)}")
