"""The product and its gradients, element by element."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.ops.causal_conv1d.forward import sigmoid

# rows and elements of a tile
BM, BD = 8, 256


@triton.jit
def tile_of(rows, D, BM: tl.constexpr, BD: tl.constexpr):
    """Rows, elements and mask of this program's tile."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    return o_r[:, None], o_d[None, :], (o_r < rows)[:, None] & (o_d < D)[None, :]


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(a, b, h, stride_a, stride_b, rows, D, BM: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr = False):
    """h of a tile."""
    gdc_launch_and_wait(PDL)
    o_r, o_d, mask = tile_of(rows, D, BM, BD)
    b_a = tl.load(a + o_r * stride_a + o_d, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(b + o_r * stride_b + o_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(h + o_r * D + o_d, (b_a * sigmoid(b_a) * b_b).to(h.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    a, b, dh, da, db, stride_a, stride_b, stride_dh, rows, D, AGAIN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):
    """da and db of a tile; with AGAIN h takes the place of dh."""
    o_r, o_d, mask = tile_of(rows, D, BM, BD)
    flat = o_r * D + o_d
    b_a = tl.load(a + o_r * stride_a + o_d, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(b + o_r * stride_b + o_d, mask=mask, other=0.0).to(tl.float32)
    p_dh = dh + o_r * stride_dh + o_d
    b_dh = tl.load(p_dh, mask=mask, other=0.0).to(tl.float32)
    b_sigmoid = sigmoid(b_a)
    b_silu = b_a * b_sigmoid
    tl.store(da + flat, (b_dh * b_b * b_sigmoid * (1.0 + b_a * (1.0 - b_sigmoid))).to(da.dtype.element_ty), mask=mask)
    tl.store(db + flat, (b_dh * b_silu).to(db.dtype.element_ty), mask=mask)
    if AGAIN:
        tl.store(p_dh, (b_silu * b_b).to(dh.dtype.element_ty), mask=mask)


def swiglu_forward(a: Tensor, b: Tensor) -> Tensor:
    """h of a and b `[rows, D]`, rows of one stride each."""
    rows, D = a.shape
    h = torch.empty((rows, D), dtype=a.dtype, device=a.device)
    swiglu_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        a=a, b=b, h=h, stride_a=a.stride(0), stride_b=b.stride(0), rows=rows, D=D, BM=BM, BD=BD, num_warps=4,
    )  # fmt: skip
    return h


def swiglu_backward(a: Tensor, b: Tensor, dh: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    """da and db; asked for `again`, h is written over dh: one tensor less at the peak of memory."""
    rows, D = a.shape
    da, db = (torch.empty((rows, D), dtype=a.dtype, device=a.device) for _ in range(2))
    swiglu_backward_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        a=a, b=b, dh=dh, da=da, db=db, stride_a=a.stride(0), stride_b=b.stride(0), stride_dh=dh.stride(0),
        rows=rows, D=D, AGAIN=again, BM=BM, BD=BD, num_warps=4,
    )  # fmt: skip
    return da, db
