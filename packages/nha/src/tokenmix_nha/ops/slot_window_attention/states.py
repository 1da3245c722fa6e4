"""Gates of chunks, slots at the borders of chunks, forward in time, and their gradients, backward in time.

One program of the walks takes a part of the head sizes of one head of one sequence, or one segment of it: with few
heads the sequence is cut into segments whose own sums and decays come first (`LOCAL`), so that every segment can begin
at once.
"""

import triton
import triton.language as tl

from tokenmix_core.tile.launch import cached_launch
from tokenmix_nha.ops.slot_window_attention.tile import (
    LARGEST_FACTOR,
    SIZES,
    as_factor,
    block_to_start,
    enter_weight,
    first_entry,
    gates_between,
    load_gates,
    locate_chunk,
    log2_gates,
    sequence_span,
)


@triton.jit
def _load_columns(p, o_t, m_t, stride, first, BD: tl.constexpr):
    """Columns `first … first + BD` of rows `o_t`."""
    o_d = first + tl.arange(0, BD)
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride + o_d[None, :], mask=m_t[:, None], other=0.0)


@triton.jit
def _load_slots(p, i_nh, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SLOTS):
    """A tile `[BD, M]` of slots `[N, H, SLOTS, D]`, zero beyond the slots that exist."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    p = p + i_nh.to(tl.int64) * SLOTS * D + o_m[None, :] * D + o_d[:, None]
    return tl.load(p, mask=(o_m < SLOTS)[None, :], other=0.0)


@triton.jit
def _store_slots(p, b_s, i_nh, first, BD: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SLOTS):
    """Store a tile `[BD, M]` into slots `[N, H, SLOTS, D]`."""
    o_d, o_m = first + tl.arange(0, BD), tl.arange(0, M)
    tl.store(p + i_nh.to(tl.int64) * SLOTS * D + o_m[None, :] * D + o_d[:, None], b_s, mask=(o_m < SLOTS)[None, :])


@triton.jit
def _tile_offsets(index, first, BD: tl.constexpr, M: tl.constexpr):
    """Offsets of a tile `[BD, M]` that begins at row `first` of the `index`-th of tiles `[D, M]`."""
    return index + (first + tl.arange(0, BD))[:, None] * M + tl.arange(0, M)[None, :]


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_gates_kernel(
    f, weight, row, column, end, splits, cu_seqlens, T, N, H, before, window, chunks, entries,
    M: tl.constexpr, SLOTS, BT: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, ONLY_STRONG: tl.constexpr,
):  # fmt: skip
    """Of a chunk: each token's weight in the slots at the end `[BT, M]`, the log2 decay of the whole `[M]`, and how
    often it must be halved for factors within 2^±80; for the backward pass column factors. ONLY_STRONG chunks are
    known where `splits` already is."""
    i_n, i_t, begin, length = locate_chunk(tl.program_id(0), T, N, chunks, before, cu_seqlens, BT, PACKED)
    i_h = tl.program_id(1)
    begin += i_n.to(tl.int64) * before
    entering = length + before - window
    if i_t * BT >= entering:
        return
    tile = (first_entry(i_n, begin, entries, BT, PACKED) + i_t) * H + i_h
    if ONLY_STRONG:  # noqa: SIM102
        if tl.load(splits + tile) == 0:
            return
    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)
    o_t = i_t * BT + o_r
    b_f = load_gates(f + (begin * H + i_h) * SLOTS, o_t, o_t < entering, H * SLOTS, SLOTS, M)
    b_log = log2_gates(b_f, DOT)
    b_end = tl.sum(b_log, 0)
    b_g = gates_between(b_log, -1, o_r, BT, DOT)
    b_enter = enter_weight(b_f)
    b_weight = b_enter * tl.exp2(tl.minimum(b_end[None, :] - b_g, 0.0))
    tl.store(weight + _tile_offsets(tile * BT * M, 0, BT, M), b_weight.to(weight.dtype.element_ty))
    tl.store(end + tile * M + o_m, b_end)
    # blocks of two or four tokens are small enough for any gates
    lowest = tl.min(b_end, 0)
    size = BT
    count = 0
    while (lowest < -LARGEST_FACTOR) & (size > (2 if DOT == "ieee" else 4)):
        count += 1
        size //= 2
        b_g = gates_between(b_log, (o_r & -size) - 1, o_r, BT, DOT)
        lowest = tl.min(tl.min(b_g, 1), 0)
    tl.store(splits + tile, count)
    b_col = tl.exp2(-b_g) * b_enter
    tl.store(row + _tile_offsets(tile * BT * M, 0, BT, M), tl.exp2(b_g))
    tl.store(column + _tile_offsets(tile * BT * M, 0, BT, M), as_factor(b_col, column.dtype.element_ty, DOT))


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_states_kernel(
    k, v, weight, end, initial_k, initial_v, cu_seqlens, local_k, local_v, local_g, states_k, states_v,
    final_k, final_v, T, NH, H, before, window, entries, segments,
    M: tl.constexpr, SLOTS, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, ND: tl.constexpr,
    HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr, LOCAL: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Slots before every chunk and at the end: tiles `[entries, H, D, M]`."""
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
    p_k, p_v = k + (begin * H + i_h) * K, v + (begin * H + i_h) * V

    b_sk = tl.zeros([BK, M], dtype=tl.float32)
    b_sv = tl.zeros([BV, M], dtype=tl.float32)
    b_total = tl.zeros([M], dtype=tl.float32)
    if not LOCAL:
        if HAS_INITIAL:
            b_sk += _load_slots(initial_k, i_nh, i_d * BK, BK, K, M, SLOTS)
            b_sv += _load_slots(initial_v, i_nh, i_d * BV, BV, V, M, SLOTS)
        if local_g is not None:
            for i in range(i_s):
                index = (i * NH + i_nh).to(tl.int64)
                b_decay = tl.exp2(tl.load(local_g + index * M + o_m))[None, :]
                b_sk = b_sk * b_decay + tl.load(local_k + _tile_offsets(index * K * M, i_d * BK, BK, M))
                b_sv = b_sv * b_decay + tl.load(local_v + _tile_offsets(index * V * M, i_d * BV, BV, M))

    for i in range(first, last):
        o_t = i * BT + o_r
        m_t = o_t < entering
        tile = (entry + i) * H + i_h
        if not LOCAL:
            tl.store(states_k + _tile_offsets(tile * K * M, i_d * BK, BK, M), b_sk.to(states_k.dtype.element_ty))
            tl.store(states_v + _tile_offsets(tile * V * M, i_d * BV, BV, M), b_sv.to(states_v.dtype.element_ty))
        b_k = _load_columns(p_k, o_t, m_t, H * K, i_d * BK, BK)
        b_v = _load_columns(p_v, o_t, m_t, H * V, i_d * BV, BV)
        b_w = tl.load(weight + _tile_offsets(tile * BT * M, 0, BT, M))
        b_end = tl.load(end + tile * M + o_m)
        b_decay = tl.exp2(b_end)[None, :]
        b_sk = tl.dot(tl.trans(b_k), b_w, b_sk * b_decay, input_precision=DOT)
        b_sv = tl.dot(tl.trans(b_v), b_w, b_sv * b_decay, input_precision=DOT)
        b_total += b_end

    if LOCAL:
        index = (i_s * NH + i_nh).to(tl.int64)
        tl.store(local_k + _tile_offsets(index * K * M, i_d * BK, BK, M), b_sk)
        tl.store(local_v + _tile_offsets(index * V * M, i_d * BV, BV, M), b_sv)
        if i_d == 0:
            tl.store(local_g + index * M + o_m, b_total)
    elif (last == chunks) & ((first < chunks) | (i_s == 0)):
        tile = (entry + chunks) * H + i_h
        tl.store(states_k + _tile_offsets(tile * K * M, i_d * BK, BK, M), b_sk.to(states_k.dtype.element_ty))
        tl.store(states_v + _tile_offsets(tile * V * M, i_d * BV, BV, M), b_sv.to(states_v.dtype.element_ty))
        _store_slots(final_k, b_sk, i_nh, i_d * BK, BK, K, M, SLOTS)
        _store_slots(final_v, b_sv, i_nh, i_d * BV, BV, V, M, SLOTS)


@cached_launch
@triton.jit(do_not_specialize=SIZES)
def slot_gradients_kernel(
    q, do, p, dz, f, end, splits, dfinal_k, dfinal_v, cu_seqlens, local_k, local_v, local_g, ds_k, ds_v, dinitial_k,
    dinitial_v, T, NH, H, before, window, entries, segments, lead,
    M: tl.constexpr, SLOTS, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, ND: tl.constexpr,
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
    begin_k = begin + i_n.to(tl.int64) * before
    entry = first_entry(i_n, begin_k, entries, BT, PACKED)
    entering = tl.maximum(length + before - window, 0)
    chunks = tl.cdiv(entering, BT)
    p_f = f + (begin_k * H + i_h) * SLOTS
    per_segment = tl.cdiv(chunks, segments)
    first = i_s * per_segment
    last = tl.minimum(first + per_segment, chunks)
    row = begin * HQ + i_h * GROUP

    b_sk = tl.zeros([BK, M], dtype=tl.float32)
    b_sv = tl.zeros([BV, M], dtype=tl.float32)
    b_total = tl.zeros([M], dtype=tl.float32)
    if not LOCAL:
        if dfinal_k is not None:
            b_sk += _load_slots(dfinal_k, i_nh, i_d * BK, BK, K, M, SLOTS)
        if dfinal_v is not None:
            b_sv += _load_slots(dfinal_v, i_nh, i_d * BV, BV, V, M, SLOTS)
        if local_g is not None:
            for i in range(segments - 1 - i_s):
                index = ((segments - 1 - i) * NH + i_nh).to(tl.int64)
                b_decay = tl.exp2(tl.load(local_g + index * M + o_m))[None, :]
                b_sk = b_sk * b_decay + tl.load(local_k + _tile_offsets(index * K * M, i_d * BK, BK, M))
                b_sv = b_sv * b_decay + tl.load(local_v + _tile_offsets(index * V * M, i_d * BV, BV, M))

    # before the first chunk come the queries that see the initial slots as they are
    stop = first
    if (i_s == 0) & (not LOCAL):
        stop = -lead
    for step in range(tl.maximum(last - stop, 0)):
        i = last - 1 - step
        tile = (entry + tl.maximum(i, 0)) * H + i_h
        b_end = tl.load(end + tile * M + o_m, mask=o_m < tl.where(i >= 0, M, 0), other=0.0)
        count = tl.load(splits + tile, mask=i >= 0, other=0)
        if (i >= 0) & (not LOCAL):
            tl.store(ds_k + _tile_offsets(tile * K * M, i_d * BK, BK, M), b_sk.to(ds_k.dtype.element_ty))
            tl.store(ds_v + _tile_offsets(tile * V * M, i_d * BV, BV, M), b_sv.to(ds_v.dtype.element_ty))
        b_decay = tl.exp2(b_end)[None, :]
        b_sk *= b_decay
        b_sv *= b_decay
        o_t = i * BT + o_r + window - before
        m_t = (o_t >= 0) & (o_t < length)
        for i_g in range(GROUP):
            p_row = row + i_g
            b_q = _load_columns(q + p_row * K, o_t, m_t, HQ * K, i_d * BK, BK)
            b_do = _load_columns(do + p_row * V, o_t, m_t, HQ * V, i_d * BV, BV)
            b_dz = _load_columns(dz + p_row * M, o_t, m_t, HQ * M, 0, M)
            b_p = _load_columns(p + p_row * M, o_t, m_t, HQ * M, 0, M)
            b_dz, b_p = b_dz.to(b_q.dtype), b_p.to(b_q.dtype)
            if count > 0:
                o_j = i * BT + o_r
                b_f = load_gates(p_f, o_j, o_j < entering, H * SLOTS, SLOTS, M)
                b_start = block_to_start(log2_gates(b_f, DOT), BT >> count, BT, DOT)
                b_dz, b_p = (b_dz * b_start).to(b_q.dtype), (b_p * b_start).to(b_q.dtype)
            b_sk = tl.dot(tl.trans(b_q), b_dz, b_sk, input_precision=DOT)
            b_sv = tl.dot(tl.trans(b_do), b_p, b_sv, input_precision=DOT)
        b_total += b_end

    if LOCAL:
        index = (i_s * NH + i_nh).to(tl.int64)
        tl.store(local_k + _tile_offsets(index * K * M, i_d * BK, BK, M), b_sk)
        tl.store(local_v + _tile_offsets(index * V * M, i_d * BV, BV, M), b_sv)
        if i_d == 0:
            tl.store(local_g + index * M + o_m, b_total)
    elif i_s == 0:
        _store_slots(dinitial_k, b_sk, i_nh, i_d * BK, BK, K, M, SLOTS)
        _store_slots(dinitial_v, b_sv, i_nh, i_d * BV, BV, V, M, SLOTS)
