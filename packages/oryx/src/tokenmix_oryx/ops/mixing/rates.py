"""Decay g, step Δ and write strength β of each token and head, computed from their projections, and the gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import cached_launch
from tokenmix_oryx.ops.mixing.queries import rows_before_padding

# number of tokens per program
BT = 64


@triton.jit
def softplus(b_x):
    """Return log(1 + e^x), precise even if e^x is small."""
    # log(1 + e) with e = exp(−|x|), plus a correction for the rounding of 1 + e
    b_e = tl.exp(-tl.abs(b_x))
    b_u = 1.0 + b_e
    b_log = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.maximum(b_x, 0.0) + b_log


@cached_launch
@triton.jit
def _rates_forward(x, A_log, bias, g, dt, beta, stride_x, N, H, BT: tl.constexpr, BH: tl.constexpr):
    o_t, o_h = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BH)
    m_x = (o_t < N)[:, None] & (o_h < H)[None, :]
    p_x = x + o_t[:, None] * stride_x + o_h[None, :]
    o_g = o_t[:, None] * H + o_h[None, :]
    b_A = tl.exp(tl.load(A_log + o_h, mask=o_h < H, other=0.0).to(tl.float32))
    b_bias = tl.load(bias + o_h, mask=o_h < H, other=0.0).to(tl.float32)
    b_dt = softplus(tl.load(p_x, mask=m_x, other=0.0).to(tl.float32) + b_bias[None, :])
    tl.store(dt + o_g, b_dt, mask=m_x)
    tl.store(g + o_g, -b_A[None, :] * b_dt, mask=m_x)
    if beta is not None:
        tl.store(beta + o_g, tl.sigmoid(tl.load(p_x + H, mask=m_x, other=0.0).to(tl.float32)), mask=m_x)


@cached_launch
@triton.jit
def _rates_backward(
    x, A_log, bias, dg, ddt, dbeta, dx, dsums, last, stride_x, stride_dx, N, H, R, BT: tl.constexpr, BH: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    o_t, o_h = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BH)
    m_t = (o_t < N)[:, None]
    m_x = m_t & (o_h < H)[None, :]
    p_x = x + o_t[:, None] * stride_x + o_h[None, :]
    p_dx = dx + o_t[:, None] * stride_dx + o_h[None, :]
    m_g = m_x
    if last is not None:
        m_g &= (o_t < rows_before_padding(last, N))[:, None]
    o_g = o_t[:, None] * H + o_h[None, :]
    b_A = tl.exp(tl.load(A_log + o_h, mask=o_h < H, other=0.0).to(tl.float32))[None, :]
    b_bias = tl.load(bias + o_h, mask=o_h < H, other=0.0).to(tl.float32)[None, :]
    b_x = tl.load(p_x, mask=m_g, other=0.0).to(tl.float32) + b_bias
    b_ddt = -b_A * tl.load(dg + o_g, mask=m_g, other=0.0).to(tl.float32)
    b_dA = b_ddt * softplus(b_x)
    if ddt is not None:
        b_ddt += tl.load(ddt + o_g, mask=m_g, other=0.0).to(tl.float32)
    b_dx = b_ddt * tl.sigmoid(b_x)
    tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m_x)
    used = H
    if dbeta is not None:
        used += H
        b_beta = tl.sigmoid(tl.load(p_x + H, mask=m_g, other=0.0).to(tl.float32))
        b_dbeta = tl.load(dbeta + o_g, mask=m_g, other=0.0).to(tl.float32) * b_beta * (1.0 - b_beta)
        tl.store(p_dx + H, b_dbeta.to(dx.dtype.element_ty), mask=m_x)
    # the shared projection's padding columns get a gradient of 0
    o_r = tl.arange(0, BR)
    p_rest = dx + o_t[:, None] * stride_dx + o_r[None, :]
    tl.store(p_rest, tl.zeros([BT, BR], dx.dtype.element_ty), mask=m_t & ((o_r >= used) & (o_r < R))[None, :])
    p_sums = dsums + tl.program_id(0).to(tl.int64) * 2 * H + o_h
    tl.store(p_sums, tl.sum(b_dA, 0), mask=o_h < H)
    tl.store(p_sums + H, tl.sum(b_dx, 0), mask=o_h < H)


def rates_forward(x: Tensor, A_log: Tensor, bias: Tensor, with_beta: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return float32 g = −exp(A_log) Δ, Δ = softplus(x + bias) and β, the sigmoid of x's next H columns.

    β is None unless `with_beta`.
    """
    (B, T, _), H = x.shape, len(A_log)
    g, dt = (x.new_empty(B, T, H, dtype=torch.float32) for _ in range(2))
    beta = torch.empty_like(g) if with_beta else None
    _rates_forward[(cdiv(B * T, BT),)](
        x=x, A_log=A_log, bias=bias, g=g, dt=dt, beta=beta, stride_x=x.stride(1), N=B * T, H=H, BT=BT,
        BH=next_power_of_2(H), num_warps=4,
    )  # fmt: skip
    return g, dt, beta


def rates_backward(x: Tensor, A_log: Tensor, bias: Tensor, dg, ddt, dbeta, dx: Tensor, last) -> tuple[Tensor, Tensor]:
    """Return the gradients of A_log and bias; write the gradient of x to `dx`, which is 0 in padding columns."""
    (B, T, R), H = x.shape, len(A_log)
    programs = cdiv(B * T, BT)
    dsums = x.new_empty(programs, 2, H, dtype=torch.float32)
    _rates_backward[(programs,)](
        x=x, A_log=A_log, bias=bias, dg=dg, ddt=ddt, dbeta=dbeta, dx=dx, dsums=dsums, last=last,
        stride_x=x.stride(1),
        stride_dx=dx.stride(1), N=B * T, H=H, R=R, BT=BT, BH=next_power_of_2(H), BR=next_power_of_2(R), num_warps=4,
    )  # fmt: skip
    return dsums[:, 0].sum(0).to(A_log.dtype), dsums[:, 1].sum(0).to(bias.dtype)
