"""Kernels of Gated DeltaNet's gates and of their gradients, and a differentiable function for eager mode."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import tuning
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.kernels.launch.cache.row_calls import RowCall
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.ops.autograd import eager_function
from tokenmix_core.ops.buffers import contiguous, rows_of


@triton.jit
def softplus(b_x):
    """Return log(1 + e^x); for x > 20, where the two are equal in float32, return x, so that e^x cannot overflow."""
    return tl.where(b_x > 20.0, b_x, tl.log(1.0 + tl.exp(tl.minimum(b_x, 20.0))))


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def delta_gates_kernel(
    a, b, A_log, dt_bias, g, beta, stride_a, stride_b, rows, max_beta,
    HV: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute g and β (see `delta_gates`) of a block of BM tokens."""
    gdc_launch_and_wait(PDL)
    o_t = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    o_h = tl.arange(0, BD)
    m_h = o_h < HV
    mask = (o_t < rows)[:, None] & m_h[None, :]
    b_rate = tl.exp(tl.load(A_log + o_h, mask=m_h, other=0.0).to(tl.float32))
    b_bias = tl.load(dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_a = tl.load(a + (o_t * stride_a)[:, None] + o_h[None, :], mask=mask, other=0.0).to(tl.float32)
    b_b = tl.load(b + (o_t * stride_b)[:, None] + o_h[None, :], mask=mask, other=0.0).to(tl.float32)
    flat = (o_t * HV)[:, None] + o_h[None, :]
    tl.store(g + flat, -b_rate[None, :] * softplus(b_a + b_bias[None, :]), mask=mask)
    tl.store(beta + flat, max_beta * sigmoid(b_b), mask=mask)


@cached_launch
@triton.jit(do_not_specialize=["rows"])
def delta_gates_backward_kernel(
    a, b, A_log, dt_bias, dg, dbeta, da, db, dsums, stride_a, stride_b, rows, max_beta,
    HV: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute da and db of every num_programs-th block of tokens; store this program's sums for dA_log and ddt_bias."""
    i_p = tl.program_id(0)
    o_h = tl.arange(0, BD)
    m_h = o_h < HV
    b_rate = tl.exp(tl.load(A_log + o_h, mask=m_h, other=0.0).to(tl.float32))[None, :]
    b_bias = tl.load(dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
    b_dA = tl.zeros([BM, BD], tl.float32)
    b_dbias = tl.zeros([BM, BD], tl.float32)
    for i_block in range(i_p, tl.cdiv(rows, BM), tl.num_programs(0)):
        o_t = (i_block * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (o_t < rows)[:, None] & m_h[None, :]
        flat = (o_t * HV)[:, None] + o_h[None, :]
        b_u = tl.load(a + (o_t * stride_a)[:, None] + o_h[None, :], mask=mask, other=0.0).to(tl.float32) + b_bias
        b_scaled = b_rate * tl.load(dg + flat, mask=mask, other=0.0)
        b_da = -b_scaled * sigmoid(b_u)
        b_dA -= b_scaled * softplus(b_u)
        b_dbias += b_da
        tl.store(da + flat, b_da.to(da.dtype.element_ty), mask=mask)
        b_s = sigmoid(tl.load(b + (o_t * stride_b)[:, None] + o_h[None, :], mask=mask, other=0.0).to(tl.float32))
        b_db = tl.load(dbeta + flat, mask=mask, other=0.0) * max_beta * b_s * (1.0 - b_s)
        tl.store(db + flat, b_db.to(db.dtype.element_ty), mask=mask)
    p_sums = dsums + i_p * 2 * HV + o_h
    tl.store(p_sums, tl.sum(b_dA, 0), mask=m_h)
    tl.store(p_sums + HV, tl.sum(b_dbias, 0), mask=m_h)


def _forward(a, b, A_log, dt_bias, max_beta: float) -> tuple[Tensor, Tensor]:
    """Return g and β, float32."""
    (x, rows, HV, stride_a), y = rows_of(a), rows_of(b)
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    tile = tuning.row_tile(HV)
    delta_gates_kernel[(cdiv(rows, tile.BM),)](
        a=x, b=y.x, A_log=contiguous(A_log), dt_bias=contiguous(dt_bias), g=g, beta=beta, stride_a=stride_a,
        stride_b=y.stride, rows=rows, max_beta=max_beta, HV=HV, BM=tile.BM, BD=tile.BD, num_warps=tile.num_warps,
    )  # fmt: skip
    return g, beta


def _backward(a, b, A_log, dt_bias, dg, dbeta, max_beta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of a, b, A_log and dt_bias."""
    (x, rows, HV, stride_a), y = rows_of(a), rows_of(b)
    da, db = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (a, b))
    tile = tuning.row_tile(HV)
    programs = tuning.row_programs(cdiv(rows, tile.BM))
    dsums = torch.empty((programs, 2, HV), dtype=torch.float32, device=a.device)
    delta_gates_backward_kernel[(programs,)](
        a=x, b=y.x, A_log=contiguous(A_log), dt_bias=contiguous(dt_bias), dg=contiguous(dg), dbeta=contiguous(dbeta),
        da=da, db=db, dsums=dsums, stride_a=stride_a, stride_b=y.stride, rows=rows, max_beta=max_beta, HV=HV,
        BM=tile.BM, BD=tile.BD, num_warps=tile.num_warps,
    )  # fmt: skip
    sums = dsums.sum(0)
    return da, db, sums[0].to(A_log.dtype), sums[1].to(dt_bias.dtype)


_cached_backward = Replayed(_backward)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.max_beta = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dg, dbeta):
    a, b, *parameters = ctx.saved_tensors
    dg, dbeta = (torch.zeros_like(a, dtype=torch.float32) if x is None else x for x in (dg, dbeta))
    return *_cached_backward(a, b, *parameters, dg, dbeta, ctx.max_beta), None


gates = eager_function("delta_gates", _forward, _save, _gradients, RowCall())
