"""Gradients of a chunk's queries, and what the slots' gradients need of its softmax."""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
    LOG2_E,
    column_factor,
    first_entry,
    load_rows,
    load_tile,
    locate_chunk,
    partners,
    row_factor,
    store_rows,
)


@triton.jit
def slot_window_backward_queries_kernel(
    q, k, v, q_slots, k_slots, g, h, states_k, states_v, start, cu_seqlens, o, lse, do, dq, dq_slots, p, dz, x, delta,
    scale, T, N, H, before, window, chunks, entries, extra, lead, levels,
    M: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dq (and dq_slots) of a chunk; by slot the probability p, the scaled logit gradient dz and x = ⟨dS, S⟩."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), T, N, chunks, extra, cu_seqlens, BT, PACKED)
    i_h, HQ = tl.program_id(1) // GROUP, H * GROUP
    i_t -= lead
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    begin_q = begin * HQ + tl.program_id(1)
    rows = tl.where(i_t >= 0, BT, 0)
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + tl.maximum(i_t, 0)) * H + i_h
    begin_k = begin_k * H + i_h
    p_g, p_h = g + entry * BT * M, h + entry * BT * M

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
    if OWN_SLOT_KEYS:
        b_qs = load_rows(q_slots + begin_q * K, o_q, m_q, HQ * K, K)
        b_ks = load_rows(k_slots + begin_k * K, o_j, m_j, H * K, K)
    else:
        b_qs = b_q
        b_ks = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
    b_a = tl.dot(b_qs, tl.trans(b_ks), input_precision=DOT)
    b_dp = tl.dot(b_do, tl.trans(load_rows(v + begin_k * V, o_j, m_j, H * V, V)), input_precision=DOT)
    b_sk = load_tile(states_k + entry * K * M, K, K, M)
    b_decay = tl.exp2(load_tile(p_g, rows, BT, M))
    b_z = tl.dot(b_qs, b_sk, input_precision=DOT) * b_decay
    b_dz = tl.dot(b_do, load_tile(states_v + entry * V * M, V, V, M), input_precision=DOT) * b_decay
    b_al, b_dl = b_a.to(FACTOR), b_dp.to(FACTOR)
    for level in tl.range(levels + 1, num_stages=1):
        b_row, b_ref = row_factor(p_g, rows, level, levels, BT, M)
        b_col = column_factor(p_h, b_ref, rows, level, levels, BT, M).to(FACTOR)
        low, high = partners(o_r, level, levels, BT)
        m_l = (o_r[None, :] >= low[:, None]) & (o_r[None, :] < high[:, None])
        b_z += b_row * tl.dot(tl.where(m_l, b_al, 0.0), b_col, input_precision=DOT)
        b_dz += b_row * tl.dot(tl.where(m_l, b_dl, 0.0), b_col, input_precision=DOT)

    b_z *= scale
    # a tile may be wider than the slots that exist
    b_p = tl.where((tl.arange(0, M) < SLOTS)[None, :], tl.exp2(b_z * LOG2_E - b_lse[:, None]), 0.0)
    b_x = b_p * b_dz
    b_dz = b_p * (b_dz - b_delta[:, None])
    b_x += b_dz * b_z
    b_dz *= scale
    store_rows(p + begin_q * M, b_p, o_q, m_q, HQ * M, M)
    store_rows(dz + begin_q * M, b_dz, o_q, m_q, HQ * M, M)
    store_rows(x + begin_q * M, b_x, o_q, m_q, HQ * M, M)

    # the chunk's first tile serves slots and window where both have the same keys
    scale_2 = scale * LOG2_E
    shift_0 = 0
    b_w = tl.zeros([BT, BT], dtype=tl.float32)
    if not OWN_SLOT_KEYS:
        shift_0 = BT
        m_w = (o_r[None, :] > o_r[:, None]) & (o_r[None, :] <= o_r[:, None] + window) & m_j[None, :]
        b_pw = tl.exp2(tl.where(m_w, b_a * scale_2 - b_lse[:, None], float("-inf")))
        b_w += b_pw * (b_dp - b_delta[:, None]) * scale
    for level in tl.range(levels + 1, num_stages=1):
        b_row, b_ref = row_factor(p_g, rows, level, levels, BT, M)
        b_col = column_factor(p_h, b_ref, rows, level, levels, BT, M).to(FACTOR)
        low, high = partners(o_r, level, levels, BT)
        m_l = (o_r[None, :] >= low[:, None]) & (o_r[None, :] < high[:, None])
        b_w += tl.where(m_l, tl.dot((b_dz * b_row).to(FACTOR), tl.trans(b_col), input_precision=DOT), 0.0)
    b_dz *= tl.exp2(load_tile(p_g, rows, BT, M))
    b_dq = tl.dot(b_dz.to(b_q.dtype), tl.trans(b_sk), input_precision=DOT)
    b_dq = tl.dot(b_w.to(b_q.dtype), b_ks, b_dq, input_precision=DOT)
    if OWN_SLOT_KEYS:
        store_rows(dq_slots + begin_q * K, b_dq, o_q, m_q, HQ * K, K)
        b_dq = tl.zeros([BT, K], dtype=tl.float32)

    o_n = tl.arange(0, BN)
    skip = tl.maximum(oldest - first - shift_0, 0) // BN * BN
    for shift in range(shift_0 + skip, tl.minimum(BT + window, keys - first), BN):
        o_jn = first + shift + o_n
        m_jn = (o_jn >= oldest) & (o_jn < keys)
        b_kn = load_rows(k + begin_k * K, o_jn, m_jn, H * K, K)
        b_vn = load_rows(v + begin_k * V, o_jn, m_jn, H * V, V)
        o_s = (shift + o_n)[None, :] - o_r[:, None]
        m_wn = (o_s > 0) & (o_s <= window) & m_jn[None, :]
        b_s = tl.dot(b_q, tl.trans(b_kn), input_precision=DOT) * scale_2 - b_lse[:, None]
        b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
        b_s *= (tl.dot(b_do, tl.trans(b_vn), input_precision=DOT) - b_delta[:, None]) * scale
        b_dq = tl.dot(b_s.to(b_q.dtype), b_kn, b_dq, input_precision=DOT)
    store_rows(dq + begin_q * K, b_dq, o_q, m_q, HQ * K, K)
