"""The backward kernels for Hopper, in Gluon: 16-bit heads of 64 or 128, any mask, for all queries or chosen ones.

The arithmetic is that of `backward.py`. What differs is the order: both products that a tile begins with are started
together, exponentials run beside the second, and the next tile is copied meanwhile; and addresses take fewer registers,
which lets 64 queries meet 64 keys without spilling.
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
from tokenmix_core.ops.softmax_attention.selection import first_place, list_tiles
from tokenmix_core.ops.softmax_attention.tiles import key_tiles, query_tiles, tile_of_queries
from tokenmix_core.tile.hopper import (
    LOG2_E,
    await_copies,
    barrier,
    begin_copy,
    begin_vector_copy,
    locate_chunk,
    product_layout,
    row_layout,
    store_rows,
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


@cached_launch
@gluon.jit
def _backward_queries(
    q, k, v, o, do, lse, dlse, delta, dq, cu_seqlens, selected,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, THROUGH_LSE: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """dq and delta of a tile of queries and a head a program."""
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
        scores: gl.constexpr = product_layout(BT, gl.num_warps())
        sums: gl.constexpr = product_layout(D, gl.num_warps())
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
        sh_k = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, D], shared)
        sh_v = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, D], shared)
        begin_copy(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        begin_copy(sh_do, do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BT, queries, s_dt)
        async_copy.commit_group()
        i_k = gl.where(far_sinks > 0, 0, hidden)
        begin_copy(sh_k.index(0), p_k, i_k * BT, keys, s_kt)
        begin_copy(sh_v.index(0), p_v, i_k * BT, keys, s_vt)
        async_copy.commit_group()

        o_row = (i_b * HQ + i_h) * TQ + start
        o_t = i_t * BT + gl.arange(0, BT, gl.SliceLayout(1, rows))
        o_d = gl.arange(0, D, gl.SliceLayout(0, rows))
        p_o = o + o_head + o_t.to(gl.int64)[:, None] * (HQ * D) + o_d[None, :]
        b_o = gl.load(p_o, mask=(o_t < queries)[:, None], other=0.0).to(gl.float32)
        await_copies(1)
        b_delta = gl.sum(b_o * sh_do.load(rows).to(gl.float32), 1)
        if THROUGH_LSE:
            b_delta -= gl.load(dlse + o_row + o_t, mask=o_t < queries, other=0.0)
        gl.store(delta + o_row + o_t, b_delta, mask=o_t < queries)
        b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_lse = gl.load(lse + o_row + i_t * BT + o_m, mask=i_t * BT + o_m < queries, other=0.0) * LOG2_E

        b_dq = gl.zeros([BT, D], gl.float32, sums)
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        for i in range(far_sinks + stop - near):
            await_copies(0)
            sh_ki = sh_k.index(i % 2)
            b_s = warpgroup_mma(sh_q, sh_ki.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_dp = warpgroup_mma(sh_do, sh_v.index(i % 2).permute((1, 0)), zeros, use_acc=False, is_async=True)
            i_next = i + 1 + gl.where(i + 1 < far_sinks, 0, hidden)
            begin_copy(sh_k.index((i + 1) % 2), p_k, i_next * BT, keys, s_kt)
            begin_copy(sh_v.index((i + 1) % 2), p_v, i_next * BT, keys, s_vt)
            async_copy.commit_group()
            b_s = warpgroup_mma_wait(1, [b_s])
            b_p = gl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
            if (i_k < full) | (i_k >= end):
                o_k = gl.arange(0, BT, gl.SliceLayout(0, scores))[None, :]
                distance = o_m[:, None] - (o_k - (first - i_k * BT))
                m_s = visible(distance, i_k * BT + o_k, keys, window, sinks, CAUSAL, WINDOW)
                b_p = gl.where(m_s, b_p, 0.0)
            b_dp = warpgroup_mma_wait(0, [b_dp])
            b_ds = (b_p * (b_dp - b_delta[:, None])).to(q.dtype.element_ty)
            b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, sums, 2))
            b_dq = warpgroup_mma(b_ds, sh_ki, b_dq, is_async=True)
            # what stands among the waited for is not overwritten before
            b_dq, b_ds = warpgroup_mma_wait(0, [b_dq, b_ds])
            i_k = i_next
        # through shared memory, so that a thread stores 16 bytes at once
        await_copies(0)
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


@cached_launch
@gluon.jit
def _backward_keys(
    q, k, v, do, lse, delta, dk, dv, cu_seqlens, ranks, order,
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
        scores: gl.constexpr = product_layout(BT, gl.num_warps())
        sums: gl.constexpr = product_layout(D, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
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
        sh_q = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, D], shared)
        sh_do = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, D], shared)
        sh_lse = gl.allocate_shared_memory(gl.float32, [2, BT], vector)
        sh_delta = gl.allocate_shared_memory(gl.float32, [2, BT], vector)
        # of the head that is copied next, from the first of the group on
        i_h = i_hk * (HQ // H)
        p_q = q + i_b * s_qb + start * s_qt + i_h * s_qh
        p_do = do + i_b * s_db + start * s_dt + i_h * s_dh
        p_lse = lse + (i_b * HQ + i_h) * TQ + start
        p_delta = delta + (i_b * HQ + i_h) * TQ + start
        begin_copy(sh_k, k + i_b * s_kb + start * s_kt + i_hk * s_kh, first, keys, s_kt)
        begin_copy(sh_v, v + i_b * s_vb + start * s_vt + i_hk * s_vh, first, keys, s_vt)
        begin_copy(sh_q.index(0), p_q, t_q * BT, queries, s_qt)
        begin_copy(sh_do.index(0), p_do, t_q * BT, queries, s_dt)
        begin_vector_copy(sh_lse.index(0), p_lse, t_q * BT, queries)
        begin_vector_copy(sh_delta.index(0), p_delta, t_q * BT, queries)
        async_copy.commit_group()

        b_dk = gl.zeros([BT, D], gl.float32, sums)
        b_dv = gl.zeros([BT, D], gl.float32, sums)
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        o_n = gl.arange(0, BT, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(0, scores))
        i_q = near
        for i in range(count):
            await_copies(0)
            sh_qi = sh_q.index(i % 2)
            sh_doi = sh_do.index(i % 2)
            b_st = warpgroup_mma(sh_k, sh_qi.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_dpt = warpgroup_mma(sh_v, sh_doi.permute((1, 0)), zeros, use_acc=False, is_async=True)
            i_next = i_q + 1
            if i_next == stop:
                i_next = near
                p_q += s_qh
                p_do += s_dh
                p_lse += TQ
                p_delta += TQ
            t_next = listed(order, i_next, i + 1 < count)
            # nothing comes after the last tile
            left = gl.where(i + 1 < count, queries, 0)
            begin_copy(sh_q.index((i + 1) % 2), p_q, t_next * BT, left, s_qt)
            begin_copy(sh_do.index((i + 1) % 2), p_do, t_next * BT, left, s_dt)
            begin_vector_copy(sh_lse.index((i + 1) % 2), p_lse, t_next * BT, left)
            begin_vector_copy(sh_delta.index((i + 1) % 2), p_delta, t_next * BT, left)
            async_copy.commit_group()
            b_lse = sh_lse.index(i % 2).load(gl.SliceLayout(0, scores)) * LOG2_E
            b_st = warpgroup_mma_wait(1, [b_st])
            b_pt = gl.exp2(b_st * (scale * LOG2_E) - b_lse[None, :])
            if (i_q < full) | (i_q >= end):
                # what there is no query for has a gradient of 0
                distance = (o_m + (t_q * BT + shift - first))[None, :] - o_n[:, None]
                m_s = visible(distance, first + o_n[:, None], keys, window, sinks, CAUSAL, WINDOW)
                b_pt = gl.where(m_s, b_pt, 0.0)
            b_left = gl.convert_layout(b_pt.to(q.dtype.element_ty), gl.DotOperandLayout(0, sums, 2))
            b_dv = warpgroup_mma(b_left, sh_doi, b_dv, is_async=True)
            b_delta = sh_delta.index(i % 2).load(gl.SliceLayout(0, scores))
            b_dpt = warpgroup_mma_wait(1, [b_dpt])
            b_dst = (b_pt * (b_dpt - b_delta[None, :])).to(q.dtype.element_ty)
            b_dst = gl.convert_layout(b_dst, gl.DotOperandLayout(0, sums, 2))
            b_dk = warpgroup_mma(b_dst, sh_qi, b_dk, is_async=True)
            # what stands among the waited for is not overwritten before
            b_dk, b_dv, b_left, b_dst = warpgroup_mma_wait(0, [b_dk, b_dv, b_left, b_dst])
            i_q, t_q = i_next, t_next
        await_copies(0)
        sh_k.store((b_dk * scale).to(dk.dtype.element_ty))
        sh_v.store(b_dv.to(dv.dtype.element_ty))
        barrier()
        o_x = (i_b * TK + start + first) * H * D + i_hk * D
        store_rows(dk + o_x, sh_k, H * D, keys - first, gl.num_warps())
        store_rows(dv + o_x, sh_v, H * D, keys - first, gl.num_warps())


def backward_queries(q, k, v, o, do, lse, dlse, delta, dq, cu_seqlens, mask, scale, selected, fill=True) -> None:
    """Write dq, and delta for `backward_keys`."""
    B, TQ, HQ, _ = q.shape
    tiles = chunk_slots(1, TQ, TILE, cu_seqlens)
    _backward_queries[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, delta=delta, dq=dq, cu_seqlens=cu_seqlens, selected=selected,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BT=TILE, **constants(q, cu_seqlens, mask), THROUGH_LSE=dlse is not None, FILL=fill,
        maxnreg=tuning.registers_of_many(tiles * HQ * B, 128) if q.shape[3] == 64 else None,
    )  # fmt: skip


def backward_keys(q, k, v, do, lse, delta, dk, dv, cu_seqlens, mask, scale, selected) -> None:
    """Write dk and dv."""
    ranks, order = (None, None) if selected is None else list_tiles(selected, cu_seqlens, TILE)
    B, TK, H, _ = k.shape
    tiles = chunk_slots(1, TK, TILE, cu_seqlens)
    _backward_keys[(tiles * H * B,)](
        q=q, k=k, v=v, do=do, lse=lse, delta=delta, dk=dk, dv=dv, cu_seqlens=cu_seqlens, ranks=ranks, order=order,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BT=TILE, **constants(q, cu_seqlens, mask),
        maxnreg=tuning.registers_of_many(tiles * H * B, 168) if q.shape[3] == 64 else None,
    )  # fmt: skip
