"""Slots at the borders of chunks, forward in time, and their gradients, backward in time.

One program walks a part of the head sizes of one head of one sequence, or one segment of it: with few heads the
sequence is cut into segments whose own sums and decays come first (`LOCAL`), so that every segment can begin at once.
"""

import triton
import triton.language as tl

from tokenmix_nha.ops.slot_window_attention.tile import (
    LOG2_E,
    LOWEST_GATE,
    enter_weight,
    first_entry,
    load_gates,
    sequence_span,
)


@triton.jit
def _load_columns(p, o_t, m_t, stride, first, BD: tl.constexpr):
    """Columns `first … first + BD` of rows `o_t`."""
    o_d = first + tl.arange(0, BD)
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride + o_d[None, :], mask=m_t[:, None], other=0.0)


@triton.jit
def _load_slots(p, i_nh, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr):
    """A tile `[BD, M]` of slots `[N, H, SLOTS, D]`, zero beyond the slots that exist."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    p = p + i_nh.to(tl.int64) * SLOTS * D + o_m[None, :] * D + o_d[:, None]
    return tl.load(p, mask=(o_m < SLOTS)[None, :], other=0.0)


@triton.jit
def _store_slots(p, b_s, i_nh, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SLOTS: tl.constexpr):
    """Store a tile `[BD, M]` into slots `[N, H, SLOTS, D]`."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    tl.store(p + i_nh.to(tl.int64) * SLOTS * D + o_m[None, :] * D + o_d[:, None], b_s, mask=(o_m < SLOTS)[None, :])


@triton.jit
def _tile_offsets(index, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Offsets of a tile `[BD, M]` in the `index`-th of tiles `[D, M]`."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    return index.to(tl.int64) * D * M + o_d[:, None] * M + o_m[None, :]


@triton.jit
def slot_states_kernel(
    k, v, f, initial_k, initial_v, cu_seqlens, local_k, local_v, local_g, g, h, states_k, states_v, final_k, final_v,
    T, NH, H, before, window, entries, segments,
    M: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, ND: tl.constexpr,
    PACKED: tl.constexpr, HAS_INITIAL: tl.constexpr, LOCAL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Slots before every chunk of entering tokens `[entries, H, D, M]` and the chunk's log2 gates.

    g is cumulative, and `h = log2(enter) − g` is its counterpart on the tokens' side.
    """
    i_s, i_nh = tl.program_id(0) // NH, tl.program_id(0) % NH
    i_d = tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    BK: tl.constexpr = K // ND
    BV: tl.constexpr = V // ND
    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)

    begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    begin += i_n.to(tl.int64) * before
    entering = tl.maximum(length + before - window, 0)
    entry = first_entry(i_n, begin, entries, BT, PACKED)
    chunks = tl.cdiv(entering, BT)
    per_segment = tl.cdiv(chunks, segments)
    first = i_s * per_segment
    last = tl.minimum(first + per_segment, chunks)
    p_k, p_v, p_f = k + (begin * H + i_h) * K, v + (begin * H + i_h) * V, f + (begin * H + i_h) * SLOTS

    b_sk = tl.zeros([BK, M], dtype=tl.float32)
    b_sv = tl.zeros([BV, M], dtype=tl.float32)
    b_total = tl.zeros([M], dtype=tl.float32)
    if not LOCAL:
        if HAS_INITIAL:
            b_sk += _load_slots(initial_k, i_nh, i_d * BK, BK, K, M, SLOTS)
            b_sv += _load_slots(initial_v, i_nh, i_d * BV, BV, V, M, SLOTS)
        if local_g is not None:
            for i in range(i_s):
                index = i * NH + i_nh
                b_decay = tl.exp2(tl.load(local_g + index * M + o_m))[None, :]
                b_sk = b_sk * b_decay + tl.load(local_k + _tile_offsets(index, i_d * BK, BK, K, M))
                b_sv = b_sv * b_decay + tl.load(local_v + _tile_offsets(index, i_d * BV, BV, V, M))

    for i in range(first, last):
        o_t = i * BT + o_r
        m_t = o_t < entering
        b_f = load_gates(p_f, o_t, m_t, H * SLOTS, M, SLOTS)
        b_log = tl.maximum(b_f * LOG2_E, LOWEST_GATE)
        b_g = tl.cumsum(b_log, 0)
        b_end = tl.sum(b_log, 0)
        b_enter = enter_weight(b_f)
        if not LOCAL:
            tile = (entry + i) * H + i_h
            if i_d == 0:
                o_g = (tile * BT + o_r[:, None]) * M + o_m[None, :]
                tl.store(g + o_g, b_g)
                tl.store(h + o_g, tl.log2(b_enter) - b_g)
            tl.store(states_k + _tile_offsets(tile, i_d * BK, BK, K, M), b_sk.to(states_k.dtype.element_ty))
            tl.store(states_v + _tile_offsets(tile, i_d * BV, BV, V, M), b_sv.to(states_v.dtype.element_ty))
        b_k = _load_columns(p_k, o_t, m_t, H * K, i_d * BK, BK)
        b_v = _load_columns(p_v, o_t, m_t, H * V, i_d * BV, BV)
        b_w = (tl.exp2(tl.minimum(b_end[None, :] - b_g, 0.0)) * b_enter).to(b_k.dtype)
        b_decay = tl.exp2(b_end)[None, :]
        b_sk = b_sk * b_decay + tl.dot(tl.trans(b_k), b_w, input_precision=DOT)
        b_sv = b_sv * b_decay + tl.dot(tl.trans(b_v), b_w, input_precision=DOT)
        b_total += b_end

    if LOCAL:
        index = i_s * NH + i_nh
        tl.store(local_k + _tile_offsets(index, i_d * BK, BK, K, M), b_sk)
        tl.store(local_v + _tile_offsets(index, i_d * BV, BV, V, M), b_sv)
        if i_d == 0:
            tl.store(local_g + index * M + o_m, b_total)
    elif (last == chunks) & ((first < chunks) | (i_s == 0)):
        tile = (entry + chunks) * H + i_h
        tl.store(states_k + _tile_offsets(tile, i_d * BK, BK, K, M), b_sk.to(states_k.dtype.element_ty))
        tl.store(states_v + _tile_offsets(tile, i_d * BV, BV, V, M), b_sv.to(states_v.dtype.element_ty))
        _store_slots(final_k, b_sk, i_nh, i_d * BK, BK, K, M, SLOTS)
        _store_slots(final_v, b_sv, i_nh, i_d * BV, BV, V, M, SLOTS)


@triton.jit
def slot_gradients_kernel(
    q, do, p, dz, g, dfinal_k, dfinal_v, cu_seqlens, local_k, local_v, local_g, ds_k, ds_v, dinitial_k, dinitial_v,
    T, NH, H, before, window, entries, segments, lead,
    M: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, ND: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, LOCAL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of the slots after every chunk `[entries, H, D, M]`, and of the initial slots."""
    i_s, i_nh = tl.program_id(0) // NH, tl.program_id(0) % NH
    i_d = tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    HQ = H * GROUP
    BK: tl.constexpr = K // ND
    BV: tl.constexpr = V // ND
    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)

    begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    entry = first_entry(i_n, begin + i_n.to(tl.int64) * before, entries, BT, PACKED)
    chunks = tl.cdiv(tl.maximum(length + before - window, 0), BT)
    per_segment = tl.cdiv(chunks, segments)
    first = i_s * per_segment
    last = tl.minimum(first + per_segment, chunks)
    row = begin * HQ + i_h * GROUP

    b_sk = tl.zeros([BK, M], dtype=tl.float32)
    b_sv = tl.zeros([BV, M], dtype=tl.float32)
    b_total = tl.zeros([M], dtype=tl.float32)
    if not LOCAL:
        b_sk += _load_slots(dfinal_k, i_nh, i_d * BK, BK, K, M, SLOTS)
        b_sv += _load_slots(dfinal_v, i_nh, i_d * BV, BV, V, M, SLOTS)
        if local_g is not None:
            for i in range(segments - 1 - i_s):
                index = (segments - 1 - i) * NH + i_nh
                b_decay = tl.exp2(tl.load(local_g + index * M + o_m))[None, :]
                b_sk = b_sk * b_decay + tl.load(local_k + _tile_offsets(index, i_d * BK, BK, K, M))
                b_sv = b_sv * b_decay + tl.load(local_v + _tile_offsets(index, i_d * BV, BV, V, M))

    # before the first chunk come the queries that see the initial slots as they are
    stop = first
    if (i_s == 0) & (not LOCAL):
        stop = -lead
    for step in range(tl.maximum(last - stop, 0)):
        i = last - 1 - step
        b_g = tl.zeros([BT, M], dtype=tl.float32)
        b_end = tl.zeros([M], dtype=tl.float32)
        if i >= 0:
            tile = (entry + i) * H + i_h
            p_g = g + tile * BT * M
            b_g += tl.load(p_g + o_r[:, None] * M + o_m[None, :])
            b_end += tl.load(p_g + (BT - 1) * M + o_m)
            if not LOCAL:
                tl.store(ds_k + _tile_offsets(tile, i_d * BK, BK, K, M), b_sk.to(ds_k.dtype.element_ty))
                tl.store(ds_v + _tile_offsets(tile, i_d * BV, BV, V, M), b_sv.to(ds_v.dtype.element_ty))
        b_decay = tl.exp2(b_end)[None, :]
        b_sk *= b_decay
        b_sv *= b_decay
        b_row = tl.exp2(b_g)
        o_t = i * BT + o_r + window - before
        m_t = (o_t >= 0) & (o_t < length)
        for i_g in range(GROUP):
            p_row = row + i_g
            b_q = _load_columns(q + p_row * K, o_t, m_t, HQ * K, i_d * BK, BK)
            b_do = _load_columns(do + p_row * V, o_t, m_t, HQ * V, i_d * BV, BV)
            b_dz = _load_columns(dz + p_row * M, o_t, m_t, HQ * M, 0, M)
            b_p = _load_columns(p + p_row * M, o_t, m_t, HQ * M, 0, M)
            b_sk += tl.dot(tl.trans(b_q), (b_dz * b_row).to(b_q.dtype), input_precision=DOT)
            b_sv += tl.dot(tl.trans(b_do), (b_p * b_row).to(b_q.dtype), input_precision=DOT)
        b_total += b_end

    if LOCAL:
        index = i_s * NH + i_nh
        tl.store(local_k + _tile_offsets(index, i_d * BK, BK, K, M), b_sk)
        tl.store(local_v + _tile_offsets(index, i_d * BV, BV, V, M), b_sv)
        if i_d == 0:
            tl.store(local_g + index * M + o_m, b_total)
    elif i_s == 0:
        _store_slots(dinitial_k, b_sk, i_nh, i_d * BK, BK, K, M, SLOTS)
        _store_slots(dinitial_v, b_sv, i_nh, i_d * BV, BV, V, M, SLOTS)
