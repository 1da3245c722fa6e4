"""Gradients of a chunk's keys, values and gates: as tokens that enter the slots, and as tokens of the window.

Tiles are transposed, `[token, query]`.
"""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
    LOG2_E,
    block_pairs,
    block_to_border,
    chunk_gates,
    enter_weight,
    first_entry,
    gates_between,
    load_columns,
    load_gates,
    load_rows,
    locate_chunk,
    log2_gates,
    opposite_pairs,
    store_rows,
    sums_of_rows,
)


@triton.jit
def _from_later(
    b_dx, p_ds, p_f, o_j, m_e, stride, slots, BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Add what BM slots after the chunk owe to its tokens."""
    b_f = load_gates(p_f, o_j, m_e, stride, slots, BM)
    b_in = enter_weight(b_f) * tl.exp2(gates_between(log2_gates(b_f, DOT), tl.arange(0, BT), BT - 1, BT, DOT))
    b_ds = load_columns(p_ds, M, D, BM)
    return tl.dot(b_in.to(b_ds.dtype), tl.trans(b_ds), b_dx, input_precision=DOT)


@triton.jit
def _pair_weights(
    b_y, p_f, count, o_j, m_e, stride, slots, BM: tl.constexpr, BT: tl.constexpr, FACTOR: tl.constexpr,
    DOT: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """`Σ_m col_m(j) y_m(t)` `[token, query]` over BM slots, where j has entered the slots that t sees."""
    b_f, b_log, size, b_g = chunk_gates(p_f, count, o_j, m_e, stride, slots, BM, BT, DOT)
    b_col = (tl.exp2(-b_g) * enter_weight(b_f)).to(FACTOR)
    o_r = tl.arange(0, BT)
    r_j, r_t = o_r[:, None], o_r[None, :]
    b_b = tl.where(block_pairs(r_t, r_j, size), tl.dot(b_col, tl.trans(b_y), input_precision=DOT), 0.0)
    if STRONG:
        for i in range(count):
            half = (BT // 2) >> i
            b_border = block_to_border(b_log, size, half, BT, DOT)
            b_h = tl.trans((b_y * b_border).to(FACTOR))
            b_c = tl.dot((b_col * b_border).to(FACTOR), b_h, input_precision=DOT)
            b_b += tl.where(opposite_pairs(r_t, r_j, half), b_c, 0.0)
    return b_b


@triton.jit
def _pair_sums(
    b_x, b_y, b_e, p_f, count, o_j, m_e, stride, slots, BM: tl.constexpr, BT: tl.constexpr, FACTOR: tl.constexpr,
    DOT: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """Add `Σ_t x[j, t] y_m(t)` over the same pairs, still to be weighted by column factors of j."""
    o_r = tl.arange(0, BT)
    r_j, r_t = o_r[:, None], o_r[None, :]
    size = BT >> count
    b_h = tl.where(block_pairs(r_t, r_j, size), b_x, 0.0).to(FACTOR)
    b_e = tl.dot(b_h, b_y, b_e, input_precision=DOT)
    if STRONG:
        b_log = log2_gates(load_gates(p_f, o_j, m_e, stride, slots, BM), DOT)
        for i in range(count):
            half = (BT // 2) >> i
            b_border = block_to_border(b_log, size, half, BT, DOT)
            b_h = tl.where(opposite_pairs(r_t, r_j, half), b_x, 0.0).to(FACTOR)
            b_e += b_border * tl.dot(b_h, (b_y * b_border).to(FACTOR), input_precision=DOT)
    return b_e


@triton.jit
def _store_gates(p, b_x, o_j, m_j, stride, slots, BM: tl.constexpr):
    o_m = tl.arange(0, BM)[None, :]
    p = p + o_j.to(tl.int64)[:, None] * stride + o_m
    tl.store(p, b_x.to(p.dtype.element_ty), mask=m_j[:, None] & (o_m < slots))


@triton.jit
def _inner(p_x, p_y, BM: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Inner products of BM columns of two tiles `[D, M]`."""
    return tl.sum(load_columns(p_x, M, D, BM).to(tl.float32) * load_columns(p_y, M, D, BM).to(tl.float32), 0)


@triton.jit
def slot_window_backward_keys_kernel(
    q, k, v, f, q_slots, k_slots, splits, states_k, states_v, ds_k, ds_v, start, cu_seqlens, lse, delta, do, p, dz, x,
    dk, dv, df, dk_slots,
    scale, T, N, H, before, window, chunks, entries,
    M: tl.constexpr, SLOTS, BM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, STRONG: tl.constexpr, GROUP: tl.constexpr, OWN_SLOT_KEYS: tl.constexpr, HAS_START: tl.constexpr,
    PACKED: tl.constexpr, FACTOR: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """dv, dk (and dk_slots) or BM slots' df of BT tokens: programs of one chunk share what they read."""
    PARTS: tl.constexpr = 2 + M // BM
    part = tl.program_id(0) % PARTS
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0) // PARTS, T, N, chunks, before, cu_seqlens, BT, PACKED)
    i_h, HQ = tl.program_id(1), H * GROUP
    begin_k = begin + i_n.to(tl.int64) * before
    keys = length + before
    first = i_t * BT
    if first >= keys:
        return
    entry = (first_entry(i_n, begin_k, entries, BT, PACKED) + i_t) * H + i_h
    count = 0
    if first < keys - window:
        count = tl.load(splits + entry)
    if (count > 0) != STRONG:
        return
    begin_k = begin_k * H + i_h
    begin_q = begin * HQ + i_h * GROUP

    o_r, o_n = tl.arange(0, BT), tl.arange(0, BN)
    oldest = 0
    if HAS_START:
        oldest = tl.load(start + i_n)
    o_j = first + o_r
    m_j = (o_j >= oldest) & (o_j < keys)
    m_s = o_j < keys
    # slots that any token of the chunk enters
    slots = tl.where(first < keys - window, M, 0)
    m_e = m_j & (o_j < keys - window)
    scale_2 = scale * LOG2_E
    # rows of queries that see the chunk's tokens arrive in the slots; the window of some holds others of them still
    o_q = first + window - before + o_r
    m_q = (o_q >= 0) & (o_q < length)
    m_w = (o_r[:, None] > o_r[None, :]) & (o_r[:, None] <= o_r[None, :] + window) & m_j[:, None]
    # earlier queries, whose windows hold the tokens
    shift_0 = tl.maximum(before - first, 0) // BN * BN
    shift_1 = tl.minimum(window, keys - first)
    p_f = f + begin_k * SLOTS
    p_dsk, p_dsv = ds_k + entry * K * M, ds_v + entry * V * M

    if part == 0:
        b_dv = tl.zeros([BT, V], dtype=tl.float32)
        for i_m in tl.range(0, slots, BM, num_stages=1):
            b_dv = _from_later(b_dv, p_dsv + i_m, p_f + i_m, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, M, V, BT, DOT)
        b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
        for i_g in range(GROUP):
            p_q, p_do, p_row = q + (begin_q + i_g) * K, do + (begin_q + i_g) * V, begin_q + i_g
            b_q = load_rows(p_q, o_q, m_q, HQ * K, K)
            b_lse = tl.load(lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
            b_b = tl.dot(b_k, tl.trans(b_q), input_precision=DOT) * scale_2 - b_lse[None, :]
            b_b = tl.exp2(tl.where(m_w, b_b, float("-inf")))
            for i_m in tl.range(0, slots, BM, num_stages=1):
                b_y = load_rows(p + p_row * M + i_m, o_q, m_q, HQ * M, BM)
                b_b += _pair_weights(
                    b_y, p_f + i_m, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, BT, FACTOR, DOT, STRONG
                )
            b_do = load_rows(p_do, o_q, m_q, HQ * V, V)
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
    elif part == 1:
        b_dk = tl.zeros([BT, K], dtype=tl.float32)
        for i_m in tl.range(0, slots, BM, num_stages=1):
            b_dk = _from_later(b_dk, p_dsk + i_m, p_f + i_m, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, M, K, BT, DOT)
        b_k = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
        b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
        for i_g in range(GROUP):
            p_row = begin_q + i_g
            b_b = tl.zeros([BT, BT], dtype=tl.float32)
            if OWN_SLOT_KEYS:
                b_q = load_rows(q_slots + p_row * K, o_q, m_q, HQ * K, K)
            else:
                b_q = load_rows(q + p_row * K, o_q, m_q, HQ * K, K)
                b_lse = tl.load(lse + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=float("inf"))
                b_delta = tl.load(delta + p_row + o_q.to(tl.int64) * HQ, mask=m_q, other=0.0)
                b_do = load_rows(do + p_row * V, o_q, m_q, HQ * V, V)
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=DOT) * scale_2 - b_lse[None, :]
                b_b += tl.exp2(tl.where(m_w, b_s, float("-inf")))
                b_b *= (tl.dot(b_v, tl.trans(b_do), input_precision=DOT) - b_delta[None, :]) * scale
            for i_m in tl.range(0, slots, BM, num_stages=1):
                b_y = load_rows(dz + p_row * M + i_m, o_q, m_q, HQ * M, BM)
                b_b += _pair_weights(
                    b_y, p_f + i_m, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, BT, FACTOR, DOT, STRONG
                )
            b_dk = tl.dot(b_b.to(b_k.dtype), b_q, b_dk, input_precision=DOT)
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
    elif slots > 0:
        # what tokens from j on ask of all before j, less what token j itself would lose
        if OWN_SLOT_KEYS:
            b_ks = load_rows(k_slots + begin_k * K, o_j, m_j, H * K, K)
        else:
            b_ks = load_rows(k + begin_k * K, o_j, m_j, H * K, K)
        b_v = load_rows(v + begin_k * V, o_j, m_j, H * V, V)
        i_m = (part - 2) * BM
        p_f += i_m
        b_e = tl.zeros([BT, BM], dtype=tl.float32)
        for i_g in range(GROUP):
            p_row = begin_q + i_g
            if OWN_SLOT_KEYS:
                b_q = load_rows(q_slots + p_row * K, o_q, m_q, HQ * K, K)
            else:
                b_q = load_rows(q + p_row * K, o_q, m_q, HQ * K, K)
            b_a = tl.dot(b_ks, tl.trans(b_q), input_precision=DOT)
            b_y = load_rows(dz + p_row * M + i_m, o_q, m_q, HQ * M, BM)
            b_e = _pair_sums(b_a, b_y, b_e, p_f, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, BT, FACTOR, DOT, STRONG)
            b_do = load_rows(do + p_row * V, o_q, m_q, HQ * V, V)
            b_a = tl.dot(b_v, tl.trans(b_do), input_precision=DOT)
            b_y = load_rows(p + p_row * M + i_m, o_q, m_q, HQ * M, BM)
            b_e = _pair_sums(b_a, b_y, b_e, p_f, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, BT, FACTOR, DOT, STRONG)
        b_last = tl.dot(b_ks, load_columns(p_dsk + i_m, M, K, BM), input_precision=DOT)
        b_last = tl.dot(b_v, load_columns(p_dsv + i_m, M, V, BM), b_last, input_precision=DOT)
        b_f, b_log, _, b_g = chunk_gates(p_f, count, o_j, m_e, H * SLOTS, SLOTS - i_m, BM, BT, DOT)
        b_last *= tl.exp2(gates_between(b_log, o_r, BT - 1, BT, DOT))
        b_enter = enter_weight(b_f)
        b_x = -b_e * (tl.exp2(-b_g) * b_enter).to(FACTOR).to(tl.float32)
        for i_g in range(GROUP):
            b_x += load_rows(x + (begin_q + i_g) * M + i_m, o_q, m_q, HQ * M, BM)
        # what later chunks ask of the slots is summed over what they hold of earlier tokens: nothing cancels
        b_later = tl.where(o_r[None, :] >= o_r[:, None], 1.0, 0.0)
        b_df = sums_of_rows(b_later, tl.where(m_e[:, None], b_x, 0.0), DOT)
        b_df += sums_of_rows(1.0 - b_later, b_last * b_enter, DOT)
        b_df -= (1.0 - b_enter) * (b_e * tl.exp2(-b_g) + b_last)
        b_dot = _inner(p_dsk + i_m, states_k + entry * K * M + i_m, BM, M, K)
        b_dot += _inner(p_dsv + i_m, states_v + entry * V * M + i_m, BM, M, V)
        b_df += (b_dot * tl.exp2(tl.sum(b_log, 0)))[None, :]
        # bounded gates have no gradient
        b_df = tl.where(m_e[:, None] & (b_log == b_f * LOG2_E), b_df, 0.0)
        _store_gates(df + begin_k * SLOTS + i_m, b_df, o_j, m_s, H * SLOTS, SLOTS - i_m, BM)
    else:
        i_m = (part - 2) * BM
        b_df = tl.zeros([BT, BM], dtype=tl.float32)
        _store_gates(df + begin_k * SLOTS + i_m, b_df, o_j, m_s, H * SLOTS, SLOTS - i_m, BM)
