"""Gradients of a chunk's keys, values and gates: as tokens that enter the slots, and as tokens of the window."""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
    LOG2_E,
    LOWEST_GATE,
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
def slot_window_backward_keys_kernel(
    q, k, v, f, q_slots, k_slots, g, states_k, states_v, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, x,
    dk, dv, df, dk_slots,
    scale, T, N, H, before, window, chunks, entries,
    M: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr,
    GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dk, dv, df (and dk_slots) of BT keys; tiles are transposed, `[key, query]`."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), T, N, chunks, before, cu_seqlens, BT, PACKED)
    i_h, HQ = tl.program_id(1), H * GROUP
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    first = i_t * BT
    if first >= keys:
        return
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + i_t) * H + i_h
    begin_k = begin_k * H + i_h
    p_g = g + entry * BT * M

    o_r, o_n = tl.arange(0, BT), tl.arange(0, BN)
    oldest = 0
    if HAS_START:
        oldest = tl.load(start + i_n)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)
    entering = first < keys - window
    m_e = m_j & (o_j < keys - window)
    scale_2 = scale * LOG2_E

    b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
    b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
    b_ks = b_k
    if OWN_SLOT_KEYS:
        b_ks = load_rows(k_slots + begin_k * K, o_j, m_j, H * K, K)
    b_f = load_rows(f + begin_k * M, o_j, m_e, H * M, M).to(tl.float32)
    b_i = enter_weight(b_f)
    b_g = load_tile(p_g, entering, BT, M)

    # what the slots after the chunk owe to its tokens
    b_dsk = load_tile(ds_k + entry * K * M, entering, K, M)
    b_dsv = load_tile(ds_v + entry * V * M, entering, V, M)
    b_end = tl.load(p_g + (BT - 1) * M + tl.arange(0, M), mask=entering, other=0.0)
    b_decay = tl.exp2(tl.minimum(b_end[None, :] - b_g, 0.0))
    b_e = (tl.dot(b_ks, b_dsk, input_precision=DOT) + tl.dot(b_v, b_dsv, input_precision=DOT)) * b_decay
    b_w = (b_i * b_decay).to(b_k.dtype)
    b_dks = tl.dot(b_w, tl.trans(b_dsk), input_precision=DOT)
    b_dv = tl.dot(b_w, tl.trans(b_dsv), input_precision=DOT)
    b_dk = tl.zeros([BT, K], dtype=tl.float32)
    if not OWN_SLOT_KEYS:
        b_dk += b_dks
    b_sum = tl.sum(b_dsk.to(tl.float32) * load_tile(states_k + (entry + H) * K * M, entering, K, M).to(tl.float32), 0)
    b_sum += tl.sum(b_dsv.to(tl.float32) * load_tile(states_v + (entry + H) * V * M, entering, V, M).to(tl.float32), 0)
    b_x = tl.zeros([BT, M], dtype=tl.float32)

    for i_g in range(GROUP):
        begin_q = begin * HQ + i_h * GROUP + i_g
        # queries that see the chunk's tokens arrive in the slots; some of its tokens are in their window still
        o_q = first + window - before + o_r
        m_q = (o_q >= 0) & (o_q < length)
        b_q = load_rows(q + begin_q * K, o_q, m_q, HQ * K, K)
        b_do = load_rows(do + begin_q * V, o_q, m_q, HQ * V, V)
        b_lse = tl.load(lse + begin_q + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
        b_delta = tl.load(delta + begin_q + o_q.to(tl.int64) * HQ, mask=m_q, other=0.0)
        b_a = tl.dot(b_k, tl.trans(b_q), input_precision=DOT)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=DOT)
        m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + window) & m_j[:, None]
        b_pw = tl.where(m_w, tl.exp2(b_a * scale_2 - b_lse[None, :]), 0.0)
        b_zw = b_pw * (b_dp - b_delta[None, :]) * scale
        b_qs, b_as = b_q, b_a
        if OWN_SLOT_KEYS:
            b_qs = load_rows(q_slots + begin_q * K, o_q, m_q, HQ * K, K)
            b_as = tl.dot(b_ks, tl.trans(b_qs), input_precision=DOT)
        b_p = load_rows(p + begin_q * M, o_q, m_q, HQ * M, M).to(tl.float32)
        b_dz = load_rows(dz + begin_q * M, o_q, m_q, HQ * M, M).to(tl.float32)
        b_x += load_rows(x + begin_q * M, o_q, m_q, HQ * M, M)
        b_bz = tl.zeros([BT, BT], dtype=tl.float32)
        for level in tl.static_range(LEVELS + 1):
            b_row, b_col = gate_factors(p_g, b_g, entering, level, LEVELS, BT, M)
            m_l = level_pairs(o_r[None, :], o_r[:, None], level, LEVELS, BT)
            b_pr, b_zr = (b_p * b_row).to(FACTOR), (b_dz * b_row).to(FACTOR)
            b_el = tl.dot(tl.where(m_l, b_as, 0.0).to(FACTOR), b_zr, input_precision=DOT)
            b_el += tl.dot(tl.where(m_l, b_dp, 0.0).to(FACTOR), b_pr, input_precision=DOT)
            b_e += b_col * b_el
            b_col = (b_col * b_i).to(FACTOR)
            b_pw += tl.where(m_l, tl.dot(b_col, tl.trans(b_pr), input_precision=DOT), 0.0)
            b_bz += tl.where(m_l, tl.dot(b_col, tl.trans(b_zr), input_precision=DOT), 0.0)
        b_dv = tl.dot(b_pw.to(b_q.dtype), b_do, b_dv, input_precision=DOT)
        if OWN_SLOT_KEYS:
            b_dks = tl.dot(b_bz.to(b_q.dtype), b_qs, b_dks, input_precision=DOT)
            b_dk = tl.dot(b_zw.to(b_q.dtype), b_q, b_dk, input_precision=DOT)
        else:
            b_dk = tl.dot((b_bz + b_zw).to(b_q.dtype), b_q, b_dk, input_precision=DOT)

        # earlier queries, whose windows hold the tokens
        for shift in range(tl.maximum(before - first, 0) // BN * BN, tl.minimum(window, keys - first), BN):
            o_q = first - before + shift + o_n
            m_q = (o_q >= 0) & (o_q < length) & (shift + o_n < window)
            b_q = load_rows(q + begin_q * K, o_q, m_q, HQ * K, K)
            b_do = load_rows(do + begin_q * V, o_q, m_q, HQ * V, V)
            b_lse = tl.load(lse + begin_q + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
            b_delta = tl.load(delta + begin_q + o_q.to(tl.int64) * HQ, mask=m_q, other=0.0)
            m_w = (o_r[:, None] <= shift + o_n[None, :]) & m_j[:, None]
            b_pt = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=DOT) * scale_2 - b_lse[None, :])
            b_pt = tl.where(m_w, b_pt, 0.0)
            b_zt = b_pt * (tl.dot(b_v, tl.trans(b_do), input_precision=DOT) - b_delta[None, :]) * scale
            b_dv = tl.dot(b_pt.to(b_q.dtype), b_do, b_dv, input_precision=DOT)
            b_dk = tl.dot(b_zt.to(b_q.dtype), b_q, b_dk, input_precision=DOT)

    # keys that do not exist get zeros
    m_s = o_j < keys
    store_rows(dk + begin_k * K, b_dk, o_j, m_s, H * K, K)
    store_rows(dv + begin_k * V, b_dv, o_j, m_s, H * V, V)
    if OWN_SLOT_KEYS:
        store_rows(dk_slots + begin_k * K, b_dks, o_j, m_s, H * K, K)
    # ⟨dS_j, S_j⟩, from the chunk's end to token j, less what token j itself put in
    b_e = tl.where(m_e[:, None], b_e, 0.0)
    b_df = b_sum[None, :] + tl.cumsum(b_x - b_i * b_e, 0, reverse=True) - (1.0 - b_i) * b_e
    m_f = m_e[:, None] & (b_f * LOG2_E > LOWEST_GATE)
    store_rows(df + begin_k * M, tl.where(m_f, b_df, 0.0), o_j, m_s, H * M, M)
