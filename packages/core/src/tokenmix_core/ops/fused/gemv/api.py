"""The public function: shapes, checks and the choice of an implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Checked
from tokenmix_core.ops.checks import bind_shapes, check_dtype, check_same_dtype
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.fused.gemv.reference import fused_linears_reference
from tokenmix_core.ops.fused.gemv.sizes import DTYPES, MOST_ROWS, MOST_WEIGHTS
from tokenmix_core.ops.types import Impl


@torch.no_grad()
def fused_linears(
    x: Float[Tensor, "B D"], weights: Sequence[Float[Tensor, "_N D"]], *, impl: Impl | None = None
) -> tuple[Float[Tensor, "B _N"], ...]:
    r"""x Wᵀ of one to six weights, as of q, k, v and gates of one token, in one launch. Not differentiable.

    With few rows a product takes the time of reading its weight, and less than a launch where that is small.

    Args:
        x: `[B, D]`, one token of B sequences, bfloat16 or float16 (the reference also float32 and float64).
        weights: `[N, D]` each, as of `torch.nn.Linear`, in x's dtype; N may differ.
        impl: "triton" (up to 64 rows), "reference" (any device), or None: Triton for up to 64 rows of CUDA tensors of
            16 bits, else the reference.

    Returns:
        `[B, N]` of each weight, in x's dtype; sums are in float32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or an `impl` that cannot do what is asked.
    """
    if _check(impl, x, *weights) == "reference":
        return fused_linears_reference(x, weights)
    from tokenmix_core.ops.fused.gemv.autograd import fused_linears_triton

    return tuple(fused_linears_triton(x, *weights, *[None] * (MOST_WEIGHTS - len(weights))))


@Checked
def _check(impl: str | None, x: Tensor, *weights: Tensor) -> str:
    op = "fused_linears"
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"{op}: expected one to {MOST_WEIGHTS} weights, got {len(weights)}")
    dims = bind_shapes(op, {}, x=(x, "B D"))
    for i, weight in enumerate(weights):
        bind_shapes(op, {"D": dims["D"]}, x=(x, "B D"), **{f"weights[{i}]": (weight, "N D")})
    found = resolve_impl(op, impl, x)
    if found != "reference" and dims["B"] > MOST_ROWS:
        if impl is not None:
            raise ValueError(
                f"{op}: impl={impl!r} takes up to {MOST_ROWS} rows, got {dims['B']}; pass impl='reference', or None "
                "for what runs here"
            )
        found = "reference"
    if not x.numel() or (impl is None and x.dtype not in DTYPES):
        found = "reference"
    check_dtype(op, (*DTYPES, torch.float32, torch.float64) if found == "reference" else DTYPES, x=x)
    check_same_dtype(op, x=x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)})
    return found or "triton"
