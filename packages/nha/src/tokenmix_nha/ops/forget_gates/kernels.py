"""Elementwise kernels of the log-gates and of the gradient of f, and a differentiable function for eager mode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, Replayed, RowCall, cached_launch, gdc_launch_and_wait
from tokenmix_core.ops import BD, BM, eager_function, rows_of, tile_of


@triton.jit
def log_sigmoid(b_f):
    """Return log σ(f) = min(f, 0) − log(1 + exp(−|f|)), which never overflows."""
    b_x = tl.exp2(-tl.abs(b_f) * LOG2_E)
    # for small x = exp(−|f|) use the series of log(1 + x), because 1 + x would round x
    b_series = b_x * (1.0 - b_x * (0.5 - b_x * (0.33333333 - b_x * 0.25)))
    return tl.minimum(b_f, 0.0) - tl.where(b_x < 0.01, b_series, tl.log(1.0 + b_x))


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def forget_gates_kernel(
    f, y, stride_f, rows, D, inverse, BM: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr = False
):
    """Store log σ(f) / τ of a tile; `inverse` is 1 / τ."""
    gdc_launch_and_wait(PDL)
    o_r, o_d, mask = tile_of(rows, D, BM, BD)
    b_f = tl.load(f + o_r * stride_f + o_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + o_r * D + o_d, log_sigmoid(b_f) * inverse, mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def forget_gates_backward_kernel(f, dy, df, stride_f, stride_dy, rows, D, inverse, BM: tl.constexpr, BD: tl.constexpr):
    """Store df = dy σ(−f) / τ of a tile; `inverse` is 1 / τ."""
    o_r, o_d, mask = tile_of(rows, D, BM, BD)
    b_f = tl.load(f + o_r * stride_f + o_d, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + o_r * stride_dy + o_d, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.exp2(-tl.abs(b_f) * LOG2_E)
    b_sigma = tl.where(b_f > 0, b_x, 1.0) / (1.0 + b_x)
    tl.store(df + o_r * D + o_d, (b_dy * b_sigma * inverse).to(df.dtype.element_ty), mask=mask)


def _run(f: Tensor, normalizer: float) -> Tensor:
    """Return log α in float32."""
    x, rows, D, stride = rows_of(f)
    y = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    forget_gates_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        f=x, y=y, stride_f=stride, rows=rows, D=D, inverse=1 / normalizer, BM=BM, BD=BD, num_warps=4
    )
    return y


def _save(ctx, inputs, output) -> None:
    f, ctx.normalizer = inputs
    ctx.save_for_backward(f)


def _backward(f: Tensor, dy: Tensor, normalizer: float) -> Tensor:
    """Return df in f's dtype."""
    (x, rows, D, stride), dy = rows_of(f), rows_of(dy)
    df = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    forget_gates_backward_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        f=x, dy=dy.x, df=df, stride_f=stride, stride_dy=dy.stride, rows=rows, D=D, inverse=1 / normalizer, BM=BM,
        BD=BD, num_warps=4,
    )  # fmt: skip
    return df


_replayed = Replayed(_backward)


def _gradients(ctx, dy):
    return _replayed(*ctx.saved_tensors, dy, ctx.normalizer), None


gates = eager_function("log_forget_gates", _run, _save, _gradients, RowCall())
