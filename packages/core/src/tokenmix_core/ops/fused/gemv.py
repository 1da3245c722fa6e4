"""Apply several linear layers to one input in one launch: GEMVs for one row, GEMMs for few rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Checked, on_gpu
from tokenmix_core.ops.checks import bind_shapes, check_dtype, check_same_dtype
from tokenmix_core.ops.dispatch import resolve_impl
from tokenmix_core.ops.fused import MAX_WEIGHTS
from tokenmix_core.ops.types import Impl

# maximum number of rows of x: a program holds a tile with all rows
MAX_ROWS = 64
# maximum average size of a weight in bytes, if x has several rows: cuBLAS is faster for larger weights, and as fast for
# a single weight
MAX_BYTES = 16 << 20
# row counts for which cuBLAS is slower than for one row more: in float32, three rows times a weight of 1,024 x 3,072
# take 30.4 us, four take 15.3, and three with a copied row 17.0 (one H200, CUDA 13.0)
_SLOW_ROWS = {torch.float32: (3,)}
# dtypes of x and the weights that the kernels support
DTYPES = (torch.bfloat16, torch.float16)


def fused_linears_reference(x: Float[Tensor, "B D"], weights: Sequence[Float[Tensor, "_N D"]]) -> tuple[Tensor, ...]:
    """Return x Wᵀ `[B, N]` for each weight W, in eager PyTorch."""
    if not has_slow_rows(x):
        return tuple(F.linear(x, weight) for weight in weights)
    # multiply with one more row, a copy of the first, and drop its results
    more = x.repeat(2, 1)[: len(x) + 1]
    return tuple(F.linear(more, weight)[:-1] for weight in weights)


def has_slow_rows(x: Tensor) -> bool:
    """True if cuBLAS would multiply x `[*, D]` by a weight in less time if x had one more row."""
    slow = () if torch.compiler.is_compiling() or not on_gpu(x) else _SLOW_ROWS.get(x.dtype, ())
    return bool(slow) and x.numel() // x.shape[-1] in slow


@torch.no_grad()
def fused_linears(
    x: Float[Tensor, "B D"], weights: Sequence[Float[Tensor, "_N D"]], *, impl: Impl | None = None
) -> tuple[Float[Tensor, "B _N"], ...]:
    r"""Return x Wᵀ for one to six weights W, such as those of q, k, v and gates, in one launch. Not differentiable.

    With few rows a matmul takes as long as reading its weight; for a small weight this is shorter than a launch, so one
    launch for all weights saves time.

    Args:
        x: `[B, D]`, one token of B sequences; bfloat16 or float16 (the reference also float32 and float64).
        weights: `[N, D]` each, laid out as in `torch.nn.Linear`, in x's dtype; N may differ.
        impl: "triton" (up to 64 rows), "reference" (any device), or None: Triton for up to 64 rows of 16-bit CUDA
            tensors, else the reference.

    Returns:
        `[B, N]` for each weight, in x's dtype, accumulated in float32.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `impl` does not support the call.
    """
    if _check(impl, x, *weights) == "reference":
        return fused_linears_reference(x, weights)
    from tokenmix_core.ops.fused.gemv_kernel import fused_linears_triton

    return tuple(fused_linears_triton(x, *weights, *[None] * (MAX_WEIGHTS - len(weights))))


@Checked
def _check(impl: str | None, x: Tensor, *weights: Tensor) -> str:
    op = "fused_linears"
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"{op}: expected one to {MAX_WEIGHTS} weights, got {len(weights)}")
    dims = bind_shapes(op, {}, x=(x, "B D"))
    for i, weight in enumerate(weights):
        bind_shapes(op, {"D": dims["D"]}, x=(x, "B D"), **{f"weights[{i}]": (weight, "N D")})
    found = resolve_impl(op, impl, x)
    if found != "reference" and dims["B"] > MAX_ROWS:
        if impl is not None:
            raise ValueError(
                f"{op}: impl={impl!r} takes up to {MAX_ROWS} rows, got {dims['B']}; pass impl='reference', or None "
                "for the fastest here"
            )
        found = "reference"
    if not x.numel() or (impl is None and x.dtype not in DTYPES):
        found = "reference"
    check_dtype(op, (*DTYPES, torch.float32, torch.float64) if found == "reference" else DTYPES, x=x)
    check_same_dtype(op, x=x, **{f"weights[{i}]": weight for i, weight in enumerate(weights)})
    return found or "triton"
