"""Elementwise kernels that compute the log-gates and the gradient of f."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import LOG2_E, cached_launch, gdc_launch_and_wait
from tokenmix_core.ops import BD, BM, tile_of


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


def forget_gates_forward(f: Tensor, normalizer: float) -> Tensor:
    """Return log α `[rows, D]` in float32; rows of f have a uniform stride."""
    rows, D = f.shape
    y = torch.empty((rows, D), dtype=torch.float32, device=f.device)
    forget_gates_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        f=f, y=y, stride_f=f.stride(0), rows=rows, D=D, inverse=1 / normalizer, BM=BM, BD=BD, num_warps=4
    )
    return y


def forget_gates_backward(f: Tensor, dy: Tensor, normalizer: float) -> Tensor:
    """Return df `[rows, D]` in f's dtype; rows of f and of dy have uniform strides."""
    rows, D = f.shape
    df = torch.empty((rows, D), dtype=f.dtype, device=f.device)
    forget_gates_backward_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        f=f, dy=dy, df=df, stride_f=f.stride(0), stride_dy=dy.stride(0), rows=rows, D=D, inverse=1 / normalizer, BM=BM,
        BD=BD, num_warps=4,
    )  # fmt: skip
    return df
