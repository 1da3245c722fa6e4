"""The backward kernels for Hopper, in Gluon: 16-bit heads of 64 or 128, any mask, for all queries or chosen ones.

The arithmetic is that of `backward.py`. What differs is the order: both products that a tile begins with are started
together, exponentials run beside the second, and the next tile is copied meanwhile; and in the kernel of keys matrix
units subtract log-sum-exps and deltas (`terms.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import sizes, strides
from tokenmix_core.ops.softmax_attention.hopper import TILE, constants
from tokenmix_core.ops.softmax_attention.hopper.terms import (
    EACH,
    TERMS,
    adding_terms,
    allocate_terms,
    store_terms,
)
from tokenmix_core.ops.softmax_attention.selection import first_place, list_tiles
from tokenmix_core.ops.softmax_attention.tiles import key_tiles, query_tiles, tile_of_queries
from tokenmix_core.tile.hopper import (
    LOG2_E,
    async_copy_tile,
    barrier,
    locate_chunk,
    mma_layout,
    opaque,
    opaque_tile,
    row_layout,
    store_rows,
    wait_async_copies,
)
from tokenmix_core.tile.masks import visible


@gluon.jit
def holds_selected(selected, first, rows, BT: gl.constexpr):
    """Tell whether one of the rows `first` … `first + BT − 1` is selected."""
    o_t = first + gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(gl.load(selected + o_t, mask=o_t < rows, other=0).to(gl.int32), 0) != 0


@gluon.jit
def store_zeros(p_x, first, rows, stride, BT: gl.constexpr, D: gl.constexpr):
    """Store zeros in the rows `first` … `first + BT − 1` that exist."""
    layout: gl.constexpr = row_layout(D, gl.num_warps())
    o_t = first + gl.arange(0, BT, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    p_x += o_t.to(gl.int64)[:, None] * stride + o_d[None, :]
    gl.store(p_x, gl.zeros([BT, D], p_x.dtype.element_ty, layout), mask=(o_t < rows)[:, None])


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, BT: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Shared memory for two tiles of rows, as wide as keys and as values."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(dtype, [BT, K], shared), gl.allocate_shared_memory(dtype, [BT, V], shared)


@gluon.jit
def columns_before(b_row, columns: gl.constexpr):
    """A number for each row, minus 0, 1, … by column, where a thread's columns are constants away from its first."""
    o_c = gl.arange(0, columns, gl.SliceLayout(0, mma_layout(columns, gl.num_warps())))[None, :]
    return b_row[:, None] - o_c % 8 - o_c // 8 * 8


@gluon.jit
def columns_behind(b_row, columns: gl.constexpr):
    """A number for each row, plus 0, 1, … by column, where a thread's columns are constants away from its first.

    Triton must not know the number: it takes a multiple of 16 minus the rows 0, 1, … for multiples of 16, too, and then
    compares but one of several columns.
    """
    o_c = gl.arange(0, columns, gl.SliceLayout(0, mma_layout(columns, gl.num_warps())))
    return opaque(b_row)[:, None] + (o_c % 8)[None, :] + (o_c // 8 * 8)[None, :]


@gluon.jit
def meet_keys(
    i, i_k, b_dq, here_s, next_s, given, s_kt: gl.constexpr, s_vt: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Add what the i-th tile of keys, which is in `here_s`, gives to dq; the next one is brought to `next_s`.

    Returns:
        the next tile, and dq.
    """
    pointers, queries_s, b_lse, b_delta, span, o_q, window, sinks, scale = given
    keys, far_sinks, hidden, full, end, count = span
    sh_k, sh_v = opaque_tile(here_s[0]), opaque_tile(here_s[1])
    BT: gl.constexpr = sh_k.shape[0]
    scores: gl.constexpr = mma_layout(BT, gl.num_warps())
    sums: gl.constexpr = mma_layout(sh_k.shape[1], gl.num_warps())
    zeros = gl.zeros([BT, BT], gl.float32, scores)
    wait_async_copies(0)
    b_s = warpgroup_mma(opaque_tile(queries_s[0]), sh_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_dp = warpgroup_mma(opaque_tile(queries_s[1]), sh_v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    i_next = i + 1 + gl.where(i + 1 < far_sinks, 0, hidden)
    # nothing comes after the last tile
    left = gl.where(i + 1 < count, keys, 0)
    async_copy_tile(next_s[0], pointers[0], i_next * BT, left, s_kt, THREAD_RELATIVE=True)
    async_copy_tile(next_s[1], pointers[1], i_next * BT, left, s_vt, THREAD_RELATIVE=True)
    async_copy.commit_group()
    b_s = warpgroup_mma_wait(1, [b_s])
    b_p = gl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
    if (i_k < full) | (i_k >= end):
        o_k = gl.arange(0, BT, gl.SliceLayout(0, scores))[None, :]
        distance = columns_before(o_q - i_k * BT, BT)
        m_s = visible(distance, i_k * BT + o_k, keys, window, sinks, CAUSAL, WINDOW)
        b_p = gl.where(m_s, b_p, 0.0)
    b_dp = warpgroup_mma_wait(0, [b_dp])
    b_ds = (b_p * (b_dp - b_delta[:, None])).to(sh_k.dtype)
    b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, sums, 2))
    b_dq = warpgroup_mma(b_ds, sh_k, b_dq, is_async=True)
    # what stands among the waited for is not overwritten before
    b_dq, b_ds = warpgroup_mma_wait(0, [b_dq, b_ds])
    return i_next, b_dq


@cached_launch
@gluon.jit
def _backward_queries(
    q, k, v, o, do, lse, dlse, delta, terms, dq, cu_seqlens, selected,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, THROUGH_LSE: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """dq, delta and, if wanted, terms of a tile of queries and a head a program."""
    i_b, i_h, i_hk, i_t = tile_of_queries(tiles, HQ, H)
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        _, start, queries, first_row = locate_chunk(i_t, TQ, BT, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BT
        keys = queries
    o_head = (i_b * TQ + start) * HQ * D + i_h * D
    wanted = i_t * BT < queries
    if selected is not None:
        wanted = holds_selected(selected + i_b * TQ + start, i_t * BT, queries, BT)
        if FILL and not wanted:
            store_zeros(dq + o_head, i_t * BT, queries, HQ * D, BT, D)
    if wanted:
        rows: gl.constexpr = row_layout(D, gl.num_warps())
        scores: gl.constexpr = mma_layout(BT, gl.num_warps())
        sums: gl.constexpr = mma_layout(D, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        first = i_t * BT + keys - queries
        last = gl.minimum(first + BT, keys) - 1
        far_sinks, near, full, end, stop = key_tiles(first, last, keys, window, sinks, BT, CAUSAL, WINDOW)
        # between the sinks' tiles and the window's
        hidden = near - far_sinks
        sh_q = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        sh_do = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        # places that Triton tells apart: in a ring products and copies would wait for each other
        even_s = allocate_tiles(q.dtype.element_ty, BT, D, D)
        odd_s = allocate_tiles(q.dtype.element_ty, BT, D, D)
        async_copy_tile(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        async_copy_tile(sh_do, do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BT, queries, s_dt)
        async_copy.commit_group()
        i_k = gl.where(far_sinks > 0, 0, hidden)
        async_copy_tile(even_s[0], p_k, i_k * BT, keys, s_kt)
        async_copy_tile(even_s[1], p_v, i_k * BT, keys, s_vt)
        async_copy.commit_group()

        o_row = (i_b * HQ + i_h) * TQ + start
        o_t = i_t * BT + gl.arange(0, BT, gl.SliceLayout(1, rows))
        o_d = gl.arange(0, D, gl.SliceLayout(0, rows))
        p_o = o + o_head + o_t.to(gl.int64)[:, None] * (HQ * D) + o_d[None, :]
        b_o = gl.load(p_o, mask=(o_t < queries)[:, None], other=0.0).to(gl.float32)
        wait_async_copies(1)
        b_delta = gl.sum(b_o * sh_do.load(rows).to(gl.float32), 1)
        if THROUGH_LSE:
            b_delta -= gl.load(dlse + o_row + o_t, mask=o_t < queries, other=0.0)
        gl.store(delta + o_row + o_t, b_delta, mask=o_t < queries)
        b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_lse = gl.load(lse + o_row + i_t * BT + o_m, mask=i_t * BT + o_m < queries, other=0.0) * LOG2_E

        b_dq = gl.zeros([BT, D], gl.float32, sums)
        if terms is not None:
            store_terms(
                terms + (o_row + i_t * BT) * TERMS, b_lse, b_delta, queries - i_t * BT, scale * LOG2_E
            )  # fmt: skip
        count = far_sinks + stop - near
        span = (keys, far_sinks, hidden, full, end, count)
        given = ((p_k, p_v), (sh_q, sh_do), b_lse, b_delta, span, first + o_m, window, sinks, scale)
        for i in range(0, count - 1, 2):
            i_k, b_dq = meet_keys(i, i_k, b_dq, even_s, odd_s, given, s_kt, s_vt, CAUSAL, WINDOW)
            i_k, b_dq = meet_keys(i + 1, i_k, b_dq, odd_s, even_s, given, s_kt, s_vt, CAUSAL, WINDOW)
        if count % 2 == 1:
            i_k, b_dq = meet_keys(count - 1, i_k, b_dq, even_s, odd_s, given, s_kt, s_vt, CAUSAL, WINDOW)
        # through shared memory, so that a thread stores 16 bytes at once
        wait_async_copies(0)
        sh_q.store((b_dq * scale).to(dq.dtype.element_ty))
        barrier()
        store_rows(dq + o_head + (i_t * BT).to(gl.int64) * (HQ * D), sh_q, HQ * D, queries - i_t * BT, gl.num_warps())


@gluon.jit
def listed(order, i, exists):
    """The tile at place i of a list, 0 where there is none; i itself without a list."""
    if order is None:
        return i
    else:
        return gl.load(order + i, mask=exists, other=0)


@gluon.jit
def allocate_queries(dtype: gl.constexpr, BT: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Shared memory for a tile of queries, of do and of terms."""
    sh_q, sh_do = allocate_tiles(dtype, BT, K, V)
    return sh_q, sh_do, allocate_terms(BT)


@gluon.jit
def bring_queries(queries_s, pointers, i_h, steps, first, queries, s_qt: gl.constexpr, s_dt: gl.constexpr):
    """Begin to copy a tile of queries from `first` on, of the i-th head behind `pointers`, and what belongs to them."""
    i_h = i_h.to(gl.int64)
    async_copy_tile(queries_s[0], pointers[0] + i_h * steps[0], first, queries, s_qt, THREAD_RELATIVE=True)
    async_copy_tile(queries_s[1], pointers[1] + i_h * steps[1], first, queries, s_dt, THREAD_RELATIVE=True)
    async_copy_tile(queries_s[2], pointers[2] + i_h * steps[2], first, queries, TERMS, THREAD_RELATIVE=True)
    async_copy.commit_group()


@gluon.jit
def next_tile(i_q, i_h, near, stop):
    """The tile of queries behind a tile, and its head: behind the last of a head the first of the next one."""
    last = i_q + 1 == stop
    return gl.where(last, near, i_q + 1), i_h + gl.where(last, 1, 0)


@gluon.jit
def begin_weights(keys_s, queries_s):
    """Begin K Qᵀ − lse / scale and V dOᵀ − δ of tiles in shared memory."""
    sh_k, sh_v, adds_lse, adds_delta = keys_s
    sh_q, sh_do, sh_terms = queries_s
    BN: gl.constexpr = sh_k.shape[0]
    BM: gl.constexpr = sh_q.shape[0]
    zeros = gl.zeros([BN, BM], gl.float32, mma_layout(BM, gl.num_warps()))
    b_terms = sh_terms.permute((1, 0))
    b_st = warpgroup_mma(adds_lse, b_terms, zeros, use_acc=False, is_async=True)
    b_st = warpgroup_mma(opaque_tile(sh_k), opaque_tile(sh_q).permute((1, 0)), b_st, is_async=True)
    b_dpt = warpgroup_mma(adds_delta, b_terms, zeros, use_acc=False, is_async=True)
    b_dpt = warpgroup_mma(opaque_tile(sh_v), opaque_tile(sh_do).permute((1, 0)), b_dpt, is_async=True)
    return b_st, b_dpt


@gluon.jit
def meet_queries(
    i, cursor, sums, here_s, next_s, given, steps, s_qt: gl.constexpr, s_dt: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Add what the i-th tile of queries, which is in `here_s`, gives to dk and dv; the next one is brought to `next_s`.

    Returns:
        the next tile and its head, and the sums.
    """
    i_q, t_q, i_h = cursor
    b_dk, b_dv = sums
    pointers, keys_s, order, span, o_k, window, sinks, scale = given
    queries, keys, near, full, end, stop, count = span
    more = i + 1 < count
    BT: gl.constexpr = here_s[0].shape[0]
    dtype: gl.constexpr = here_s[0].dtype
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout(here_s[0].shape[1], gl.num_warps()), 2)
    wait_async_copies(0)
    b_st, b_dpt = begin_weights(keys_s, here_s)
    i_next, i_h = next_tile(i_q, i_h, near, stop)
    t_next = listed(order, i_next, more)
    # nothing comes after the last tile
    bring_queries(next_s, pointers, i_h, steps, t_next * BT, gl.where(more, queries, 0), s_qt, s_dt)
    b_st = warpgroup_mma_wait(1, [b_st])
    b_pt = gl.exp2(b_st * (scale * LOG2_E))
    if (i_q < full) | (i_q >= end):
        # what there is no query for has a gradient of 0
        distance = columns_behind(t_q * BT + keys - queries - o_k, BT)
        m_s = visible(distance, o_k[:, None], keys, window, sinks, CAUSAL, WINDOW)
        b_pt = gl.where(m_s, b_pt, 0.0)
    b_left = gl.convert_layout(b_pt.to(dtype), left)
    b_dv = warpgroup_mma(b_left, opaque_tile(here_s[1]), b_dv, is_async=True)
    b_dpt = warpgroup_mma_wait(1, [b_dpt])
    b_right = gl.convert_layout((b_pt * b_dpt).to(dtype), left)
    b_dk = warpgroup_mma(b_right, opaque_tile(here_s[0]), b_dk, is_async=True)
    # what stands among the waited for is not overwritten before
    b_dk, b_dv, b_left, b_right = warpgroup_mma_wait(0, [b_dk, b_dv, b_left, b_right])
    return (i_next, t_next, i_h), (b_dk, b_dv)


@cached_launch
@gluon.jit
def _backward_keys(
    q, k, v, do, terms, dk, dv, cu_seqlens, ranks, order,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys and a key head a program."""
    pid = gl.program_id(0)
    i_t = pid % tiles
    i_hk = (pid // tiles % H).to(gl.int64)
    i_b = (pid // tiles // H).to(gl.int64)
    i_n = 0
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        i_n, start, queries, first_row = locate_chunk(i_t, TQ, BT, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BT
        keys = queries
    if i_t * BT < keys:
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        shift = keys - queries
        first = i_t * BT
        last = gl.minimum(first + BT, keys) - 1
        near, full, end, stop = query_tiles(first, last, queries, shift, window, sinks, BT, CAUSAL, WINDOW)
        if order is not None:
            # from here on tiles are counted along the list of those that hold a selected query
            place = first_place(i_b, i_n, start, gl.cdiv(TQ, BT), BT, PACKED)
            order += place
            near = gl.load(ranks + place + near)
            full = gl.load(ranks + place + full)
            end = gl.load(ranks + place + end)
            stop = gl.load(ranks + place + stop)
        count = (stop - near) * (HQ // H)
        t_q = listed(order, near, count > 0)
        sh_k = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        sh_v = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        # places that Triton tells apart: in a ring products and copies would wait for each other
        even_s = allocate_queries(q.dtype.element_ty, BT, D, D)
        odd_s = allocate_queries(q.dtype.element_ty, BT, D, D)
        # from the first head of the group on
        i_h = i_hk * (HQ // H)
        pointers = (
            q + i_b * s_qb + start * s_qt + i_h * s_qh,
            do + i_b * s_db + start * s_dt + i_h * s_dh,
            terms + ((i_b * HQ + i_h) * TQ + start) * TERMS,
        )
        steps = (s_qh, s_dh, TQ * TERMS)
        async_copy_tile(sh_k, k + i_b * s_kb + start * s_kt + i_hk * s_kh, first, keys, s_kt)
        async_copy_tile(sh_v, v + i_b * s_vb + start * s_vt + i_hk * s_vh, first, keys, s_vt)
        cursor = (near, t_q, near * 0)
        bring_queries(even_s, pointers, near * 0, steps, t_q * BT, queries, s_qt, s_dt)

        keys_s = (sh_k, sh_v, adding_terms(0, BT), adding_terms(EACH, BT))
        o_k = first + gl.arange(0, BT, gl.SliceLayout(1, mma_layout(BT, gl.num_warps())))
        given = (pointers, keys_s, order, (queries, keys, near, full, end, stop, count), o_k, window, sinks, scale)
        zeros = gl.zeros([BT, D], gl.float32, mma_layout(D, gl.num_warps()))
        sums = (zeros, zeros)
        for i in range(0, count - 1, 2):
            cursor, sums = meet_queries(
                i, cursor, sums, even_s, odd_s, given, steps, s_qt, s_dt, CAUSAL, WINDOW
            )  # fmt: skip
            cursor, sums = meet_queries(
                i + 1, cursor, sums, odd_s, even_s, given, steps, s_qt, s_dt, CAUSAL, WINDOW
            )  # fmt: skip
        if count % 2 == 1:
            cursor, sums = meet_queries(
                count - 1, cursor, sums, even_s, odd_s, given, steps, s_qt, s_dt, CAUSAL, WINDOW
            )
        b_dk, b_dv = sums
        wait_async_copies(0)
        sh_k.store((b_dk * scale).to(dk.dtype.element_ty))
        sh_v.store(b_dv.to(dv.dtype.element_ty))
        barrier()
        o_x = (i_b * TK + start + first) * H * D + i_hk * D
        store_rows(dk + o_x, sh_k, H * D, keys - first, gl.num_warps())
        store_rows(dv + o_x, sh_v, H * D, keys - first, gl.num_warps())


def backward_queries(q, k, v, o, do, lse, dlse, delta, terms, dq, cu_seqlens, mask, scale, selected, fill=True) -> None:
    """Write dq and delta, and for `backward_keys` the terms of queries unless that is None."""
    B, TQ, HQ, _ = q.shape
    tiles = chunk_slots(1, TQ, TILE, cu_seqlens)
    _backward_queries[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, delta=delta, terms=terms, dq=dq, cu_seqlens=cu_seqlens,
        selected=selected,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BT=TILE, **constants(q, cu_seqlens, mask), THROUGH_LSE=dlse is not None, FILL=fill,
        maxnreg=tuning.registers_of_many(tiles * HQ * B, 128) if q.shape[3] == 64 else None,
    )  # fmt: skip


def backward_keys(q, k, v, do, terms, dk, dv, cu_seqlens, mask, scale, selected) -> None:
    """Write dk and dv."""
    ranks, order = (None, None) if selected is None else list_tiles(selected, cu_seqlens, TILE)
    B, TK, H, _ = k.shape
    tiles = chunk_slots(1, TK, TILE, cu_seqlens)
    _backward_keys[(tiles * H * B,)](
        q=q, k=k, v=v, do=do, terms=terms, dk=dk, dv=dv, cu_seqlens=cu_seqlens, ranks=ranks, order=order,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BT=TILE, **constants(q, cu_seqlens, mask),
        maxnreg=tuning.registers_of_many(tiles * H * B, 168) if q.shape[3] == 64 else None,
    )  # fmt: skip
