"""The public function of the rotation: shapes, checks and the choice of an implementation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.ops.common import Impl, bind_shapes, check_dtype, check_tensors, row_impl
from tokenmix_core.ops.rotary.reference import rotate_reference

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rotate(
    x: Float[Tensor, "B T H K"],
    cos: Float[Tensor, "B_or_1 T K_over_2"],
    sin: Float[Tensor, "B_or_1 T K_over_2"],
    weight: Float[Tensor, "K"] | None = None,
    *,
    eps: float = 1e-6,
    impl: Impl | None = None,
) -> Float[Tensor, "B T H K"]:
    """Channels i and i + K/2 of every head turned by its token's angles, after an RMS norm of the head with `weight`.

    Computed in float32, returned in x's dtype; differentiable in x and weight.

    Args:
        x: `[B, T, H, K]`, K even.
        cos, sin: of the angles, float32 `[B or 1, T, K / 2]`.
        weight: the norm's; None for no norm.
        eps: the norm's.
        impl: "triton", "reference" (any device), or None: Triton for CUDA tensors in eager mode, the reference for
            others, and where torch.compile traces, which fuses it with its neighbours.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    op = "rotate"
    dims = bind_shapes(op, {}, x=(x, "B T H K"), weight=(weight, "K?"))
    check_dtype(op, _FLOATS, x=x, weight=weight)
    check_tensors(op, cos=cos, sin=sin)
    rows, half = len(cos), dims["K"] // 2
    if dims["K"] % 2 or rows not in (1, dims["B"]):
        raise ValueError(f"{op}: x must have an even K and cos B or 1 rows, got {list(x.shape)} and {list(cos.shape)}")
    dims |= {"R": rows, "half": half}
    bind_shapes(op, dims, x=(x, "B T H K"), cos=(cos, "R T half"), sin=(sin, "R T half"))
    if row_impl(op, impl, x) == "reference" or not x.numel():
        return rotate_reference(x, cos, sin, weight, eps)
    from tokenmix_core.ops.rotary.autograd import rotate

    return rotate(x, weight, cos, sin, eps)
