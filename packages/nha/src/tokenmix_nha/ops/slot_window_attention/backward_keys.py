"""Gradients of a chunk's keys, values and gates: as tokens that enter the slots, and as tokens of the window.

Tiles are transposed, `[token, query]`. One program takes the values of a chunk and the next one its keys, side by
side, so that they share what they read through the second cache; the gates' gradient is the sum of what both find.
"""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
    LOG2_E,
    LOWEST_GATE,
    anew,
    column_factor,
    enter_weight,
    first_entry,
    load_gates,
    load_rows,
    load_tile,
    locate_chunk,
    partners,
    row_factor,
    store_rows,
)


@triton.jit
def _entering_pairs(
    b_x, b_b, b_e, p_rows, o_q, m_q, stride, p_g, p_h, rows, levels,
    M: tl.constexpr, BT: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What the queries of a chunk owe to its tokens by way of the slots.

    With y by slot at `p_rows`: adds `Σ_m weight_m[t, j] y_m(t)` to b_b, and to b_e the slots' gradients at each token
    times the token, `Σ_t exp2(G_t − G_j) y_m(t) x[j, t]`.
    """
    o_r = tl.arange(0, BT)
    b_x = b_x.to(FACTOR)
    for level in tl.range(levels + 1, num_stages=1):
        b_row, b_ref = row_factor(p_g, rows, level, levels, BT, M)
        b_y = load_rows(anew(p_rows, level, levels), o_q, m_q, stride, M)
        b_row = (b_row * b_y.to(tl.float32)).to(FACTOR)
        low, high = partners(o_r, level, levels, BT)
        m_l = (o_r[:, None] >= low[None, :]) & (o_r[:, None] < high[None, :])
        b_d = b_ref - load_tile(anew(p_g, level, levels), rows, BT, M)
        b_d = tl.exp2(tl.minimum(b_d, tl.where(level == levels, 126.0, 0.0)))
        b_e += b_d * tl.dot(tl.where(m_l, b_x, 0.0), b_row, input_precision=DOT)
        b_col = column_factor(p_h, b_ref, rows, level, levels, BT, M).to(FACTOR)
        b_b += tl.where(m_l, tl.dot(b_col, tl.trans(b_row), input_precision=DOT), 0.0)
    return b_b, b_e


@triton.jit
def _after_chunk(
    b_x, p_ds, p_states, p_g, p_f, o_j, m_e, rows, H, D: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr,
    BT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What the slots after the chunk owe to its tokens: for x, times x by slot, and `⟨dS, S⟩` by slot."""
    columns = tl.where(rows > 0, D, 0)
    b_ds = load_tile(p_ds, columns, D, M)
    b_g = load_tile(p_g, rows, BT, M)
    o_m = tl.arange(0, M)
    b_end = tl.load(p_g + (BT - 1) * M + o_m, mask=o_m < rows * M, other=0.0)
    b_decay = tl.exp2(tl.minimum(b_end[None, :] - b_g, 0.0))
    b_in = (enter_weight(load_gates(p_f, o_j, m_e, H * SLOTS, M, SLOTS)) * b_decay).to(b_x.dtype)
    b_dx = tl.dot(b_in, tl.trans(b_ds), input_precision=DOT)
    b_e = tl.dot(b_x, b_ds, input_precision=DOT) * b_decay
    return b_dx, b_e, tl.sum(b_ds.to(tl.float32) * load_tile(p_states, columns, D, M).to(tl.float32), 0)


@triton.jit
def _add_gate_gradient(p_df, p_f, b_x, b_e, b_end, o_j, m_e, H, M: tl.constexpr, SLOTS: tl.constexpr):
    """Add `⟨dS_j, S_j⟩`, carried from the chunk's end to token j, less what token j itself put in: exact in any order,
    since there are but two additions to a zero."""
    b_f = load_gates(p_f, o_j, m_e, H * SLOTS, M, SLOTS)
    b_i = enter_weight(b_f)
    b_e = tl.where(m_e[:, None], b_e, 0.0)
    b_df = b_end[None, :] + tl.cumsum(b_x - b_i * b_e, 0, reverse=True) - (1.0 - b_i) * b_e
    o_m = tl.arange(0, M)
    m_f = m_e[:, None] & (o_m < SLOTS)[None, :] & (b_f * LOG2_E > LOWEST_GATE)
    tl.atomic_add(p_df + o_j.to(tl.int64)[:, None] * (H * SLOTS) + o_m[None, :], b_df, mask=m_f, sem="relaxed")


@triton.jit
def slot_window_backward_keys_kernel(
    q, k, v, f, q_slots, k_slots, g, h, states_k, states_v, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, x,
    dk, dv, df, dk_slots,
    scale, T, N, H, before, window, chunks, entries, levels,
    M: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr, PACKED: tl.constexpr,
    FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dv or dk (and dk_slots) of BT tokens, and their part of df."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0) // 2, T, N, chunks, before, cu_seqlens, BT, PACKED)
    i_h, HQ = tl.program_id(1), H * GROUP
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    first = i_t * BT
    if first >= keys:
        return
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + i_t) * H + i_h
    begin_k = begin_k * H + i_h
    begin_q = begin * HQ + i_h * GROUP
    p_g, p_h = g + entry * BT * M, h + entry * BT * M
    p_f, p_df = f + begin_k * SLOTS, df + begin_k * SLOTS

    o_r, o_n = tl.arange(0, BT), tl.arange(0, BN)
    oldest = 0
    if HAS_START:
        oldest = tl.load(start + i_n)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)
    m_s = o_j < keys
    rows = tl.where(first < keys - window, BT, 0)
    m_e = m_j & (o_j < keys - window)
    scale_2 = scale * LOG2_E
    # rows of queries that see the chunk's tokens arrive in the slots; the window of some holds others of them still
    o_q = first + window - before + o_r
    m_q = (o_q >= 0) & (o_q < length)
    # earlier queries, whose windows hold the tokens
    shift_0 = tl.maximum(before - first, 0) // BN * BN
    shift_1 = tl.minimum(window, keys - first)
    b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
    b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)

    if tl.program_id(0) % 2 == 0:
        b_dv, b_e, b_end = _after_chunk(
            b_v, ds_v + entry * V * M, states_v + (entry + H) * V * M,
            p_g, p_f, o_j, m_e, rows, H, V, M, SLOTS, BT, DOT,
        )  # fmt: skip
        for i_g in range(GROUP):
            p_q, p_do, p_row = q + (begin_q + i_g) * K, do + (begin_q + i_g) * V, begin_q + i_g
            b_do = load_rows(p_do, o_q, m_q, HQ * V, V)
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=DOT)
            b_q = load_rows(p_q, o_q, m_q, HQ * K, K)
            b_lse = tl.load(lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
            m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + window) & m_j[:, None]
            b_b = tl.dot(b_k, tl.trans(b_q), input_precision=DOT) * scale_2 - b_lse[None, :]
            b_b = tl.exp2(tl.where(m_w, b_b, float("-inf")))
            b_b, b_e = _entering_pairs(
                b_dp, b_b, b_e, p + p_row * M, o_q, m_q, HQ * M, p_g, p_h, rows, levels, M, BT, FACTOR, DOT
            )
            b_dv = tl.dot(b_b.to(b_k.dtype), b_do, b_dv, input_precision=DOT)
            for shift in range(shift_0, shift_1, BN):
                o_qn = first - before + shift + o_n
                m_qn = (o_qn >= 0) & (o_qn < length) & (shift + o_n < window)
                b_qn = load_rows(p_q, o_qn, m_qn, HQ * K, K)
                b_don = load_rows(p_do, o_qn, m_qn, HQ * V, V)
                b_lsen = tl.load(lse + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=float("inf"))
                m_wn = (o_r[:, None] <= shift + o_n[None, :]) & m_j[:, None]
                b_s = tl.dot(b_k, tl.trans(b_qn), input_precision=DOT) * scale_2 - b_lsen[None, :]
                b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
                b_dv = tl.dot(b_s.to(b_k.dtype), b_don, b_dv, input_precision=DOT)
        store_rows(dv + begin_k * V, b_dv, o_j, m_s, H * V, V)
        _add_gate_gradient(p_df, p_f, tl.zeros_like(b_e), b_e, b_end, o_j, m_e, H, M, SLOTS)
    else:
        b_ks = b_k
        if OWN_SLOT_KEYS:
            b_ks = load_rows(k_slots + begin_k * K, o_j, m_j, H * K, K)
        b_dk, b_e, b_end = _after_chunk(
            b_ks, ds_k + entry * K * M, states_k + (entry + H) * K * M,
            p_g, p_f, o_j, m_e, rows, H, K, M, SLOTS, BT, DOT,
        )  # fmt: skip
        b_x = tl.zeros([BT, M], dtype=tl.float32)
        for i_g in range(GROUP):
            p_row = begin_q + i_g
            if OWN_SLOT_KEYS:
                b_q = load_rows(q_slots + p_row * K, o_q, m_q, HQ * K, K)
            else:
                b_q = load_rows(q + p_row * K, o_q, m_q, HQ * K, K)
            b_a = tl.dot(b_ks, tl.trans(b_q), input_precision=DOT)
            b_b = tl.zeros([BT, BT], dtype=tl.float32)
            if not OWN_SLOT_KEYS:
                b_lse = tl.load(lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
                b_delta = tl.load(delta + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=0.0)
                b_do = load_rows(do + p_row * V, o_q, m_q, HQ * V, V)
                m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + window) & m_j[:, None]
                b_b = tl.exp2(tl.where(m_w, b_a * scale_2 - b_lse[None, :], float("-inf")))
                b_b *= (tl.dot(b_v, tl.trans(b_do), input_precision=DOT) - b_delta[None, :]) * scale
            b_b, b_e = _entering_pairs(
                b_a, b_b, b_e, dz + p_row * M, o_q, m_q, HQ * M, p_g, p_h, rows, levels, M, BT, FACTOR, DOT
            )
            b_dk = tl.dot(b_b.to(b_k.dtype), b_q, b_dk, input_precision=DOT)
            b_x += load_rows(x + p_row * M, o_q, m_q, HQ * M, M)
        _add_gate_gradient(p_df, p_f, b_x, b_e, b_end, o_j, m_e, H, M, SLOTS)
        if OWN_SLOT_KEYS:
            store_rows(dk_slots + begin_k * K, b_dk, o_j, m_s, H * K, K)
            b_dk = tl.zeros([BT, K], dtype=tl.float32)
            # the window's keys have queries of their own, those of this chunk included
            shift_1 = tl.minimum(window + BT, keys - first)
        for i_g in range(GROUP):
            p_q, p_do, p_row = q + (begin_q + i_g) * K, do + (begin_q + i_g) * V, begin_q + i_g
            for shift in range(shift_0, shift_1, BN):
                o_qn = first - before + shift + o_n
                m_qn = (o_qn >= 0) & (o_qn < length)
                if not OWN_SLOT_KEYS:
                    m_qn &= shift + o_n < window
                b_qn = load_rows(p_q, o_qn, m_qn, HQ * K, K)
                b_don = load_rows(p_do, o_qn, m_qn, HQ * V, V)
                b_lsen = tl.load(lse + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=float("inf"))
                b_deltan = tl.load(delta + p_row + o_qn.to(tl.int64) * HQ, mask=m_qn, other=0.0)
                o_s = (shift + o_n)[None, :] - o_r[:, None]
                m_wn = (o_s >= 0) & (o_s < window) & m_j[:, None]
                b_s = tl.dot(b_k, tl.trans(b_qn), input_precision=DOT) * scale_2 - b_lsen[None, :]
                b_s = tl.exp2(tl.where(m_wn, b_s, float("-inf")))
                b_s *= (tl.dot(b_v, tl.trans(b_don), input_precision=DOT) - b_deltan[None, :]) * scale
                b_dk = tl.dot(b_s.to(b_k.dtype), b_qn, b_dk, input_precision=DOT)
        store_rows(dk + begin_k * K, b_dk, o_j, m_s, H * K, K)
