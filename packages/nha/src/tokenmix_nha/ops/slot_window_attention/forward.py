"""Outputs of a chunk of queries: slot logits, one softmax with the window's, and both sums of values."""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
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
def slot_window_forward_kernel(
    q, k, v, f, q_slots, k_slots, g, states_k, states_v, start, cu_seqlens, o, lse,
    scale, T, N, H, before, window, chunks, entries, extra, lead,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """o `[BT, V]` and the base-2 log-sum-exp of the queries that see chunk `i_t` of entering tokens arrive."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), T, N, chunks, extra, cu_seqlens, BT, PACKED)
    i_h, HQ = tl.program_id(1) // GROUP, H * GROUP
    i_t -= lead
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    begin_q = begin * HQ + tl.program_id(1)
    begin_k = begin_k * H + i_h
    entry = first_entry(i_n, begin + i_n.to(tl.int64) * before, entries, BT, PACKED)
    p_g = g + ((entry + tl.maximum(i_t, 0)) * H + i_h) * BT * M
    p_sk = states_k + ((entry + tl.maximum(i_t, 0)) * H + i_h) * K * M
    p_sv = states_v + ((entry + tl.maximum(i_t, 0)) * H + i_h) * V * M

    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)
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
    scale *= LOG2_E

    # the chunk's first BT keys enter the slots for rows at or below them and are in the window of the rows above
    b_q = load_rows(q + begin_q * K, o_q, m_q, HQ * K, K)
    b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
    b_a = tl.dot(b_q, tl.trans(b_k), input_precision=DOT)
    b_qs, b_as = b_q, b_a
    if OWN_SLOT_KEYS:
        b_qs = load_rows(q_slots + begin_q * K, o_q, m_q, HQ * K, K)
        b_ks = load_rows(k_slots + begin_k * K, o_j, m_j, H * K, K)
        b_as = tl.dot(b_qs, tl.trans(b_ks), input_precision=DOT)

    entering = i_t >= 0
    b_g = load_tile(p_g, entering, BT, M)
    b_i = enter_weight(load_rows(f + begin_k * M, o_j, m_j & entering, H * M, M).to(tl.float32))
    b_z = tl.dot(b_qs, load_tile(p_sk, True, K, M), input_precision=DOT) * tl.exp2(b_g)
    for level in tl.static_range(LEVELS + 1):
        b_row, b_col = gate_factors(p_g, b_g, entering, level, LEVELS, BT, M)
        b_al = tl.where(level_pairs(o_r[:, None], o_r[None, :], level, LEVELS, BT), b_as, 0.0).to(FACTOR)
        b_z += b_row * tl.dot(b_al, (b_col * b_i).to(FACTOR), input_precision=DOT)

    b_z *= scale
    m_w = (o_r[None, :] > o_r[:, None]) & (o_r[None, :] <= o_r[:, None] + window) & m_j[None, :]
    b_w = tl.where(m_w, b_a * scale, float("-inf"))
    b_max = tl.maximum(tl.max(b_z, 1), tl.max(b_w, 1))
    b_p = tl.exp2(b_z - b_max[:, None])
    b_w = tl.exp2(b_w - b_max[:, None])
    b_l = tl.sum(b_p, 1) + tl.sum(b_w, 1)

    b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
    for level in tl.static_range(LEVELS + 1):
        b_row, b_col = gate_factors(p_g, b_g, entering, level, LEVELS, BT, M)
        b_b = tl.dot((b_p * b_row).to(FACTOR), tl.trans((b_col * b_i).to(FACTOR)), input_precision=DOT)
        b_w += tl.where(level_pairs(o_r[:, None], o_r[None, :], level, LEVELS, BT), b_b, 0.0)
    b_o = tl.dot((b_p * tl.exp2(b_g)).to(b_v.dtype), tl.trans(load_tile(p_sv, True, V, M)), input_precision=DOT)
    b_o = tl.dot(b_w.to(b_v.dtype), b_v, b_o, input_precision=DOT)

    # the rest of the window, skipping tiles before the first key
    o_n = tl.arange(0, BN)
    skip = tl.maximum(oldest - first - BT, 0) // BN * BN
    for shift in range(BT + skip, tl.minimum(BT + window, keys - first), BN):
        o_j = first + shift + o_n
        m_j = (o_j >= oldest) & (o_j < keys)
        b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
        b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
        m_w = (shift + o_n[None, :] <= o_r[:, None] + window) & m_j[None, :]
        b_s = tl.where(m_w, tl.dot(b_q, tl.trans(b_k), input_precision=DOT) * scale, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_shrink = tl.exp2(b_max - b_new)
        b_s = tl.exp2(b_s - b_new[:, None])
        b_l = b_l * b_shrink + tl.sum(b_s, 1)
        b_o = tl.dot(b_s.to(b_v.dtype), b_v, b_o * b_shrink[:, None], input_precision=DOT)
        b_max = b_new

    store_rows(o + begin_q * V, b_o / b_l[:, None], o_q, m_q, HQ * V, V)
    tl.store(lse + begin_q + o_q.to(tl.int64) * HQ, b_max + tl.log2(b_l), mask=m_q)
