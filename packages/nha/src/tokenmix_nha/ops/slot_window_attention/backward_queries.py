"""Gradients of a chunk's queries, and what the slots' gradients need of its softmax."""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
    LN_2,
    LOG2_E,
    enter_weight,
    first_entry,
    gate_factors,
    level_pairs,
    load_rows,
    load_tile,
    locate_chunk,
    store_rows,
)


@triton.jit
def slot_window_backward_queries_kernel(
    q, k, v, f, q_slots, k_slots, g, states_k, states_v, start, cu_seqlens, o, lse, do, dq, dq_slots, p, dz, x, delta,
    scale, T, N, H, before, window, chunks, entries, extra, lead,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dq (and dq_slots) of a chunk; by slot the probability p, the scaled logit gradient dz and x = ⟨dS, S⟩ of the query."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), T, N, chunks, extra, cu_seqlens, BT, PACKED)
    i_h, HQ = tl.program_id(1) // GROUP, H * GROUP
    i_t -= lead
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    begin_q = begin * HQ + tl.program_id(1)
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + tl.maximum(i_t, 0)) * H + i_h
    begin_k = begin_k * H + i_h
    p_g = g + entry * BT * M

    o_r = tl.arange(0, BT)
    first = i_t * BT
    o_q = first + window - before + o_r
    m_q = (o_q >= 0) & (o_q < length)
    if first + window - before >= length:
        return
    oldest = 0
    if HAS_START:
        oldest = tl.load(start + i_n)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)

    b_do = load_rows(do + begin_q * V, o_q, m_q, HQ * V, V)
    b_o = load_rows(o + begin_q * V, o_q, m_q, HQ * V, V)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    p_row = begin_q + o_q.to(tl.int64) * HQ
    tl.store(delta + p_row, b_delta, mask=m_q)
    # rows without a query get probability 0
    b_lse = tl.load(lse + p_row, mask=m_q, other=float("inf"))

    b_q = load_rows(q + begin_q * K, o_q, m_q, HQ * K, K)
    b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
    b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision=DOT)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=DOT)
    b_qs, b_ks, b_as = b_q, b_k, b_a
    if OWN_SLOT_KEYS:
        b_qs = load_rows(q_slots + begin_q * K, o_q, m_q, HQ * K, K)
        b_ks = load_rows(k_slots + begin_k * K, o_j, m_j, H * K, K)
        b_as = tl.dot(b_qs, tl.trans(b_ks), input_precision=DOT)

    entering = i_t >= 0
    b_g = load_tile(p_g, entering, BT, M)
    b_i = enter_weight(load_rows(f + begin_k * M, o_j, m_j & entering, H * M, M).to(tl.float32))
    b_sk = load_tile(states_k + entry * K * M, True, K, M)
    b_sv = load_tile(states_v + entry * V * M, True, V, M)
    b_z = tl.dot(b_qs, b_sk, input_precision=DOT) * tl.exp2(b_g)
    b_dz = tl.dot(b_do, b_sv, input_precision=DOT) * tl.exp2(b_g)
    for level in tl.static_range(LEVELS + 1):
        b_row, b_col = gate_factors(p_g, b_g, entering, level, LEVELS, BT, M)
        b_col = (b_col * b_i).to(FACTOR)
        m_l = level_pairs(o_r[:, None], o_r[None, :], level, LEVELS, BT)
        b_z += b_row * tl.dot(tl.where(m_l, b_as, 0.0).to(FACTOR), b_col, input_precision=DOT)
        b_dz += b_row * tl.dot(tl.where(m_l, b_dp, 0.0).to(FACTOR), b_col, input_precision=DOT)

    b_z *= scale
    b_p = tl.exp2(b_z * LOG2_E - b_lse[:, None])
    b_x = b_p * b_dz
    b_dz = b_p * (b_dz - b_delta[:, None])
    b_x += b_dz * b_z
    b_dz *= scale
    store_rows(p + begin_q * M, b_p, o_q, m_q, HQ * M, M)
    store_rows(dz + begin_q * M, b_dz, o_q, m_q, HQ * M, M)
    store_rows(x + begin_q * M, b_x, o_q, m_q, HQ * M, M)

    scale_2 = scale * LOG2_E
    m_w = (o_r[None, :] > o_r[:, None]) & (o_r[None, :] <= o_r[:, None] + window) & m_j[None, :]
    b_w = tl.where(m_w, tl.exp2(b_a * scale_2 - b_lse[:, None]) * (b_dp - b_delta[:, None]), 0.0) * scale
    b_b = tl.zeros([BT, BT], dtype=tl.float32)
    for level in tl.static_range(LEVELS + 1):
        b_row, b_col = gate_factors(p_g, b_g, entering, level, LEVELS, BT, M)
        b_bl = tl.dot((b_dz * b_row).to(FACTOR), tl.trans((b_col * b_i).to(FACTOR)), input_precision=DOT)
        b_b += tl.where(level_pairs(o_r[:, None], o_r[None, :], level, LEVELS, BT), b_bl, 0.0)

    b_dqs = tl.dot((b_dz * tl.exp2(b_g)).to(b_q.dtype), tl.trans(b_sk), input_precision=DOT)
    if OWN_SLOT_KEYS:
        b_dqs = tl.dot(b_b.to(b_q.dtype), b_ks, b_dqs, input_precision=DOT)
        store_rows(dq_slots + begin_q * K, b_dqs, o_q, m_q, HQ * K, K)
        b_dq = tl.dot(b_w.to(b_q.dtype), b_k, input_precision=DOT)
    else:
        b_dq = tl.dot((b_b + b_w).to(b_q.dtype), b_k, b_dqs, input_precision=DOT)

    o_n = tl.arange(0, BN)
    skip = tl.maximum(oldest - first - BT, 0) // BN * BN
    for shift in range(BT + skip, tl.minimum(BT + window, keys - first), BN):
        o_j = first + shift + o_n
        m_j = (o_j >= oldest) & (o_j < keys)
        b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
        b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
        m_w = (shift + o_n[None, :] <= o_r[:, None] + window) & m_j[None, :]
        b_s = tl.exp2(tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * scale_2 - b_lse[:, None])
        b_ds = b_s * (tl.dot(b_do, tl.trans(b_v), input_precision=DOT) - b_delta[:, None]) * scale
        b_dq = tl.dot(tl.where(m_w, b_ds, 0.0).to(b_q.dtype), b_k, b_dq, input_precision=DOT)
    store_rows(dq + begin_q * K, b_dq, o_q, m_q, HQ * K, K)
