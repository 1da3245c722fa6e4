"""Elementwise kernels of SwiGLU and of its gradients, and differentiable functions for eager mode."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.cache.row_calls import RowCall
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import as_rows, rows_of
from tokenmix_core.ops.fused.gemv import DTYPES as GEMV_DTYPES
from tokenmix_core.ops.fused.gemv import fused_linears_reference, has_slow_rows
from tokenmix_core.ops.fused.gemv_kernel import fused_linears_forward

# rows and columns of a tile
BM, BD = 8, 256


@triton.jit
def tile_of(rows, D, BM: tl.constexpr, BD: tl.constexpr):
    """Return row indices, column indices and mask of this program's tile."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    return o_r[:, None], o_d[None, :], (o_r < rows)[:, None] & (o_d < D)[None, :]


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def swiglu_kernel(a, b, h, stride_a, stride_b, rows, D, BM: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr = False):
    """Compute a tile of h = silu(a) · b."""
    gdc_launch_and_wait(PDL)
    o_r, o_d, mask = tile_of(rows, D, BM, BD)
    b_a = tl.load(a + o_r * stride_a + o_d, mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(b + o_r * stride_b + o_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(h + o_r * D + o_d, (b_a * sigmoid(b_a) * b_b).to(h.dtype.element_ty), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def swiglu_backward_kernel(
    a, b, dh, da, db, stride_a, stride_b, stride_dh, rows, D, RECOMPUTE: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Compute a tile of da and db; with RECOMPUTE, also overwrite dh with h = silu(a) · b."""
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
    if RECOMPUTE:
        tl.store(p_dh, (b_silu * b_b).to(dh.dtype.element_ty), mask=mask)


def swiglu_forward(a: Tensor, b: Tensor) -> Tensor:
    """Return h = silu(a) · b."""
    h = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    (a, rows, D, stride_a), b = rows_of(a), rows_of(b)
    swiglu_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        a=a, b=b.x, h=h, stride_a=stride_a, stride_b=b.stride, rows=rows, D=D, BM=BM, BD=BD, num_warps=4,
    )  # fmt: skip
    return h


def swiglu_backward(a: Tensor, b: Tensor, dh: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    """Return da and db; with `recompute`, overwrite the rows dh with h, so that h takes no memory at the peak."""
    da, db = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for _ in range(2))
    (a, rows, D, stride_a), b, dh = rows_of(a), rows_of(b), rows_of(dh)
    swiglu_backward_kernel[(cdiv(rows, BM), cdiv(D, BD))](
        a=a, b=b.x, dh=dh.x, da=da, db=db, stride_a=stride_a, stride_b=b.stride, stride_dh=dh.stride,
        rows=rows, D=D, RECOMPUTE=recompute, BM=BM, BD=BD, num_warps=4,
    )  # fmt: skip
    return da, db


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_replayed = Replayed(swiglu_backward)
_replayed_forward = Replayed(swiglu_forward, RowCall())


@Replayed
def _run_linear_of_token(a, b, weight, residual) -> Tensor:
    """Multiply silu(a) · b of one token by the weight and add the residual, in one GEMV kernel."""
    added = None if residual is None else as_rows(residual)
    return fused_linears_forward(as_rows(b), [weight], gate=as_rows(a), residual=added)[0]


def _run_linear(a, b, weight, residual) -> Tensor:
    D, shape = a.shape[-1], (*a.shape[:-1], len(weight))
    if a.numel() == D and a.dtype in GEMV_DTYPES:
        return _run_linear_of_token(a, b, weight, residual).view(shape)
    h = _replayed_forward(a, b).view(-1, D)
    y = (fused_linears_reference(h, [weight])[0] if has_slow_rows(h) else torch.mm(h, weight.t())).view(shape)
    return y if residual is None else residual + y


def _save_linear(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])


def _backward_linear(a, b, weight, dy):
    rows = as_rows(dy)
    dh = torch.mm(rows, weight)
    da, db = swiglu_backward(a, b, dh, True)
    # `swiglu_backward` has overwritten dh with h
    return da, db, torch.mm(rows.t(), dh)


_replayed_linear = Replayed(_backward_linear)

swiglu_triton = eager_function(
    "swiglu", swiglu_forward, _save, lambda ctx, dh: _replayed(*ctx.saved_tensors, dh, False), RowCall()
)


def _gradients_linear(ctx, dy):
    needed = any(ctx.needs_input_grad[:3])
    gradients = _replayed_linear(*ctx.saved_tensors, dy) if needed else (None, None, None)
    return *gradients, dy if ctx.needs_input_grad[3] else None


swiglu_linear_triton = eager_function("swiglu_linear", _run_linear, _save_linear, _gradients_linear, cached=False)
