"""All gradients but the state's and the values', parallel over chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, chunk_slots, dot_precision, sequences
from tokenmix_core.tile.decay import LOG2_E, LOWEST, causal_decay, causal_decay_transposed
from tokenmix_core.tile.memory import load_rows, load_vector, store_vector
from tokenmix_core.tile.sequences import locate_chunk


@triton.jit
def unnormalise(b_dx, b_x, r_x):
    """The gradient of x, as `[K, BT]`, from that of x̂ = r x with r = (Σ x² + ε)^−½: r dx̂ − r³ x (x · dx̂)."""
    return (b_dx - b_x * (r_x * r_x * tl.sum(b_dx * b_x, 0))[None, :]) * r_x[None, :]


@triton.jit
def backward_chunk_kernel(
    q, k, g, beta, b, rstd, cu_seqlens, do, dv, residual, states, dstates, dq, dk, dg, dbeta,
    scale, T, N, H, group, tokens,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, OUTPUT: tl.constexpr, L2NORM: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dQ and dK, summed over the value heads of a key head, and those heads' dg and dβ.

    Products are arranged as transposes, `[K, BT]`, so that every computed operand stands on the right.
    """
    i_slot, i_h = tl.program_id(0), tl.program_id(1)
    _, begin, length, start = locate_chunk(i_slot, T, BT, N, cu_seqlens, PACKED)
    if start >= length:
        return
    first, rows = begin + start, length - start
    HV = H * group
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, K), tl.arange(0, BV)
    o_qk = (first * H + i_h) * K
    b_q, b_k = load_rows(q + o_qk, H * K, rows, BT, K), load_rows(k + o_qk, H * K, rows, BT, K)
    r_q, r_k = tl.zeros([BT], tl.float32) + 1.0, tl.zeros([BT], tl.float32) + 1.0
    if L2NORM:
        b_square = b_q.to(tl.float32)
        r_q = tl.rsqrt(tl.sum(b_square * b_square, 1) + 1e-6)
        r_k = load_vector(rstd + i_h.to(tl.int64) * tokens + first, 1, rows, BT)
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * r_q[:, None] * r_k[None, :]
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=DOT) * r_k[:, None] * r_k[None, :]
    m_t = o_t < rows
    m_strict = o_t[:, None] > o_t[None, :]

    b_dq, b_dk = tl.zeros([K, BT], tl.float32), tl.zeros([K, BT], tl.float32)
    for i_g in range(group):
        i_hv = i_h * group + i_g
        p_b = b + i_hv.to(tl.int64) * tokens + first
        b_last = tl.load(p_b + tl.minimum(rows, BT) - 1)
        b_b = tl.load(p_b + o_t, mask=m_t, other=0.0)
        b_b = tl.where(m_t, b_b, b_last)
        b_beta = load_vector(beta + first * HV + i_hv, HV, rows, BT)
        b_g, b_w = tl.exp2(b_b), tl.exp2(b_last - b_b)

        # products with values: E = dO Rᵀ, F = dY Rᵀ and their transposes, and the rows that meet the states
        b_e, b_et = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        b_f, b_ft = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        b_db, b_dw = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
        b_ss = tl.zeros([K], tl.float32)
        for i_v in range(V // BV):
            o_vo = (first * HV + i_hv) * V + i_v * BV
            p_tile = (i_slot.to(tl.int64) * HV + i_hv) * K * V + o_k[:, None] * V + i_v * BV + o_v[None, :]
            b_r = load_rows(residual + o_vo, HV * V, rows, BT, BV)
            b_dy = load_rows(dv + o_vo, HV * V, rows, BT, BV)
            b_s, b_ds = tl.load(states + p_tile), tl.load(dstates + p_tile)
            b_ss += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            if OUTPUT:
                b_do = load_rows(do + o_vo, HV * V, rows, BT, BV)
                b_e = tl.dot(b_do, tl.trans(b_r), b_e, input_precision=DOT)
                b_et = tl.dot(b_r, tl.trans(b_do), b_et, input_precision=DOT)
                b_x = tl.dot(b_s, tl.trans(b_do), input_precision=DOT) * (scale * b_g)[None, :]
                b_dq += b_x
                b_db += tl.sum(b_x * tl.trans(b_q).to(tl.float32), 0) * r_q
            b_f = tl.dot(b_dy, tl.trans(b_r), b_f, input_precision=DOT)
            b_ft = tl.dot(b_r, tl.trans(b_dy), b_ft, input_precision=DOT)
            b_x = tl.dot(b_s, tl.trans(b_dy), input_precision=DOT) * b_g[None, :]
            b_dk -= b_x
            b_db -= tl.sum(b_x * tl.trans(b_k).to(tl.float32), 0) * r_k
            b_x = tl.dot(b_ds, tl.trans(b_r), input_precision=DOT) * b_w[None, :]
            b_dk += b_x * b_beta[None, :]
            b_dw += tl.sum(b_x * tl.trans(b_k).to(tl.float32), 0) * r_k

        b_e *= scale * causal_decay(b_b, b_b, o_t, o_t)
        b_et *= scale * causal_decay_transposed(b_b, b_b, o_t, o_t)
        b_f *= tl.where(m_strict, -causal_decay(b_b, b_b, o_t, o_t), 0.0)
        b_ft *= tl.where(tl.trans(m_strict), -causal_decay_transposed(b_b, b_b, o_t, o_t), 0.0)
        b_m = b_e * b_qk + b_f * b_kk
        b_dbeta = b_dw + tl.sum(b_m, 0)
        b_db += tl.sum(b_m * b_beta[None, :], 1) - b_beta * b_dbeta
        b_end = tl.sum(b_ss, 0) * tl.exp2(b_last) + tl.sum(b_dw * b_beta, 0)
        b_dg = tl.cumsum(tl.where(m_t, b_db, 0.0), 0, reverse=True) + b_end
        b_raw = load_vector(g + first * HV + i_hv, HV, rows, BT)
        b_dg = tl.where(b_raw * LOG2_E < LOWEST, 0.0, b_dg)
        store_vector(dg + first * HV + i_hv, b_dg, HV, rows, BT)
        store_vector(dbeta + first * HV + i_hv, b_dbeta, HV, rows, BT)

        # dQᵀ += K̂ᵀ Eᵀ, dKᵀ += Q̂ᵀ E + K̂ᵀ (F + Fᵀ): the norms go with the computed operand
        b_f = (b_f * b_beta[None, :] + b_ft * b_beta[:, None]) * r_k[:, None]
        b_dk = tl.dot(tl.trans(b_k), b_f.to(k.dtype.element_ty), b_dk, input_precision=DOT)
        if OUTPUT:
            b_et = (b_et * (b_beta * r_k)[:, None]).to(k.dtype.element_ty)
            b_dq = tl.dot(tl.trans(b_k), b_et, b_dq, input_precision=DOT)
            b_e = (b_e * r_q[:, None] * b_beta[None, :]).to(k.dtype.element_ty)
            b_dk = tl.dot(tl.trans(b_q), b_e, b_dk, input_precision=DOT)

    if L2NORM:
        b_dq = unnormalise(b_dq, tl.trans(b_q).to(tl.float32), r_q)
        b_dk = unnormalise(b_dk, tl.trans(b_k).to(tl.float32), r_k)
    p_transposed = o_t[None, :] * (H * K) + o_k[:, None]
    tl.store(dq + o_qk + p_transposed, b_dq.to(k.dtype.element_ty), mask=m_t[None, :])
    tl.store(dk + o_qk + p_transposed, b_dk.to(k.dtype.element_ty), mask=m_t[None, :])


def backward_chunk(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    b: Tensor,
    rstd: Tensor,
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
    dq, dk, dg, dbeta = (torch.empty_like(x) for x in (q, k, g, beta))
    launch = tuning.gated_delta_rule("backward_chunk", K, V, q.element_size(), B * HV)
    backward_chunk_kernel[(chunk_slots(q, cu_seqlens), H)](
        q, k, g, beta, b, rstd, cu_seqlens, dv if do is None else do, dv, residual, states, dstates, dq, dk, dg, dbeta,
        scale, T, sequences(q, cu_seqlens), H, HV // H, B * T,
        K, V, CHUNK, launch.BV, do is not None, qk_l2norm, cu_seqlens is not None, dot_precision(q),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return dq, dk, dg, dbeta
