"""All gradients but the state's and the values', parallel over chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, chunk_slots, dot_precision, sequences
from tokenmix_core.tile.decay import LOG2_E, LOWEST, causal_decay, causal_decay_transposed
from tokenmix_core.tile.memory import (
    column,
    inverse_norm,
    last_of,
    load_rows,
    load_vector,
    store_rows,
    store_vector,
)
from tokenmix_core.tile.sequences import locate_chunk


@triton.jit
def unnormalise(b_dx, b_x, r_x, b_dot):
    """The gradient of x from that of x̂ = r x with r = (Σ x² + ε)^−½: r (dx̂ − x̂ (x̂ · dx̂))."""
    return (b_dx - b_x.to(tl.float32) * (r_x * b_dot)[:, None]) * r_x[:, None]


@triton.jit
def backward_chunk_kernel(
    q, k, g, gates, cu_seqlens, do, dv, residual, states, dstates, dq, dk, dg, dbeta,
    scale, T, N, H, group, tokens,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, OUTPUT: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dQ, dK, dg and dβ of one chunk and value head.

    Products come in pairs, of a matrix and of its transpose: transposing a result to use it as an operand would cost a
    trip through shared memory, and is compiled wrongly for Hopper by some versions of Triton.
    """
    i_slot, i_hv = tl.program_id(0), tl.program_id(1)
    _, begin, length, start = locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED)
    if start >= length:
        return
    first, rows = begin + start, length - start
    HV, i_h = H * group, i_hv // group
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    m_t = o_t < rows
    p_q, p_k = q + (first * H + i_h) * K, k + (first * H + i_h) * K
    o_vo = (first * HV + i_hv) * V
    p_tile = (i_slot.to(tl.int64) * HV + i_hv) * K * V + o_k[:, None] * V + o_v[None, :]

    p_gates = gates + (i_hv.to(tl.int64) * tokens + first) * 4
    b_gates = load_rows(p_gates, 4, rows, BT, 4)
    b_b = column(b_gates, 0)
    b_last = last_of(b_b, rows, BT)
    b_b = tl.where(m_t, b_b, b_last)
    b_w, r_k, b_beta = column(b_gates, 1), column(b_gates, 2), column(b_gates, 3)
    b_k = load_rows(p_k, H * K, rows, BT, K)
    r_q = tl.zeros([BT], tl.float32) + 1.0

    b_dot, b_dbeta = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    b_dq = tl.zeros([BT, K], tl.float32)
    if OUTPUT:
        b_q = load_rows(p_q, H * K, rows, BT, K)
        if L2NORM:
            r_q = inverse_norm(b_q, DOT)
        # E = scale dO Rᵀ ⊙ Γ and its transpose; dQ = scale γ dO Sᵀ + (E β) K̂
        b_e, b_et = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        for i_v in range(V // BV):
            b_do = load_rows(do + o_vo + i_v * BV, HV * V, rows, BT, BV)
            b_r = load_rows(residual + o_vo + i_v * BV, HV * V, rows, BT, BV)
            b_s = tl.load(states + p_tile + i_v * BV)
            b_e = tl.dot(b_do, tl.trans(b_r), b_e, input_precision=DOT)
            b_et = tl.dot(b_r, tl.trans(b_do), b_et, input_precision=DOT)
            b_dq = tl.dot(b_do, tl.trans(b_s), b_dq, input_precision=DOT)
        b_dq *= (tl.exp2(b_b) * scale)[:, None]
        b_dot = tl.sum(b_dq * b_q.to(tl.float32), 1) * r_q
        b_e *= causal_decay(b_b, b_b, o_t, o_t) * scale
        b_x = (b_e * b_w[None, :]).to(k.dtype.element_ty)
        b_dq = tl.dot(b_x, b_k, b_dq, input_precision=DOT)
        b_e *= tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * r_q[:, None] * r_k[None, :]
        b_dbeta += tl.sum(b_e, 0)
        b_dot += tl.sum(b_e * b_beta[None, :], 1)
        b_et *= causal_decay_transposed(b_b, b_b, o_t, o_t) * b_beta[:, None] * (r_q * scale)[None, :]
        b_et = b_et.to(k.dtype.element_ty)
        if L2NORM:
            b_dq = unnormalise(b_dq, b_q, r_q, b_dot)
    store_rows(dq + (first * HV + i_hv) * K, b_dq, HV * K, rows, BT, K)
    b_db = b_dot

    # F = −dY Rᵀ ⊙ Γ strictly below the diagonal, and its transpose;
    # dK = −γ dY Sᵀ + (F β + β Fᵀ) K̂ + (β Eᵀ) Q̂ + β w R dSᵀ
    b_f, b_ft = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_dk = tl.zeros([BT, K], tl.float32)
    for i_v in range(V // BV):
        b_dy = load_rows(dv + o_vo + i_v * BV, HV * V, rows, BT, BV)
        b_r = load_rows(residual + o_vo + i_v * BV, HV * V, rows, BT, BV)
        b_s = tl.load(states + p_tile + i_v * BV)
        b_f = tl.dot(b_dy, tl.trans(b_r), b_f, input_precision=DOT)
        b_ft = tl.dot(b_r, tl.trans(b_dy), b_ft, input_precision=DOT)
        b_dk = tl.dot(b_dy, tl.trans(b_s), b_dk, input_precision=DOT)
    b_dk *= -tl.exp2(b_b)[:, None]
    b_dot = tl.sum(b_dk * b_k.to(tl.float32), 1) * r_k
    b_f *= -causal_decay(b_b, b_b, o_t, o_t + 1)
    b_ft *= -causal_decay_transposed(b_b, b_b, o_t + 1, o_t)
    b_x = (b_f * b_w[None, :] + b_ft * b_beta[:, None] * r_k[None, :]).to(k.dtype.element_ty)
    b_dk = tl.dot(b_x, b_k, b_dk, input_precision=DOT)
    if OUTPUT:
        b_dk = tl.dot(b_et, b_q, b_dk, input_precision=DOT)
    b_f *= tl.dot(b_k, tl.trans(b_k), input_precision=DOT) * r_k[:, None] * r_k[None, :]
    b_dbeta += tl.sum(b_f, 0)
    b_dot += tl.sum(b_f * b_beta[None, :], 1)

    # what the state that leaves the chunk holds of it, and of the state that entered
    b_dw, b_end = tl.zeros([BT, K], tl.float32), tl.zeros([K], tl.float32)
    for i_v in range(V // BV):
        b_r = load_rows(residual + o_vo + i_v * BV, HV * V, rows, BT, BV)
        b_ds = tl.load(dstates + p_tile + i_v * BV)
        b_dw = tl.dot(b_r, tl.trans(b_ds), b_dw, input_precision=DOT)
        b_end += tl.sum(tl.load(states + p_tile + i_v * BV).to(tl.float32) * b_ds.to(tl.float32), 1)
    b_dw *= tl.exp2(b_last - b_b)[:, None]
    b_out = tl.sum(b_dw * b_k.to(tl.float32), 1) * r_k
    b_dk += b_dw * b_beta[:, None]
    b_dbeta += b_out
    if L2NORM:
        b_dk = unnormalise(b_dk, b_k, r_k, b_dot + b_beta * b_dbeta)
    store_rows(dk + (first * HV + i_hv) * K, b_dk, HV * K, rows, BT, K)
    store_vector(dbeta + first * HV + i_hv, b_dbeta, HV, rows, BT)

    # dg gathers all later decays of the chunk; a decay that was cut off has none
    b_db = tl.where(m_t, b_db + b_dot - b_beta * b_dbeta, 0.0)
    b_dg = tl.cumsum(b_db, 0, reverse=True) + tl.sum(b_end, 0) * tl.exp2(b_last) + tl.sum(b_out * b_beta, 0)
    b_g = load_vector(g + first * HV + i_hv, HV, rows, BT)
    store_vector(dg + first * HV + i_hv, tl.where(b_g * LOG2_E < LOWEST, 0.0, b_dg), HV, rows, BT)


def backward_chunk(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    gates: Tensor,
    do: Tensor | None,
    dv: Tensor,
    residual: Tensor,
    states: Tensor,
    dstates: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dg, dβ, each in the dtype of what it is the gradient of."""
    B, T, H, K = q.shape
    HV, V = dv.shape[2:]
    group = HV // H
    dq, dk = (torch.empty(B, T, HV, K, dtype=x.dtype, device=x.device) for x in (q, k))
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    launch = tuning.gated_delta_rule("backward_chunk", K, V, q.element_size(), B * HV)
    backward_chunk_kernel[(chunk_slots(q, cu_seqlens), HV)](
        q, k, g, gates, cu_seqlens, dv if do is None else do, dv, residual, states, dstates, dq, dk, dg, dbeta,
        scale, T, sequences(q, cu_seqlens), H, group, B * T,
        K, V, CHUNK, launch.BV, do is not None, qk_l2norm, cu_seqlens is not None, dot_precision(q),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if group > 1:
        # a sum of its own keeps the result the same from run to run, which atomic additions would not
        dq, dk = (x.view(B, T, H, group, K).sum(3) for x in (dq, dk))
    return dq, dk, dg, dbeta
