"""The backward kernel of queries for Hopper, in Gluon: dq, and o · do − dlse in terms, of 16-bit heads of 64 or 128.

As attention's kernel of queries, with listed tiles before the local ones: both products that a tile begins with are
started together, exponentials run beside the second, and the next tile is copied meanwhile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import strides
from tokenmix_core.ops.softmax_attention.hopper.backward import allocate_tiles, columns_before
from tokenmix_core.ops.softmax_attention.hopper.terms import TERMS, store_terms
from tokenmix_core.ops.sparse_attention.forward import sizes
from tokenmix_core.ops.sparse_attention.hopper import TILE, constants
from tokenmix_core.ops.sparse_attention.hopper.tiles import begin_gather, columns_read, listed_columns, read_list
from tokenmix_core.ops.sparse_attention.mask import left_of
from tokenmix_core.ops.sparse_attention.tiles import far_tiles, local_tiles, tile_of_queries
from tokenmix_core.tile.hopper import (
    LOG2_E,
    async_copy_tile,
    barrier,
    locate_chunk,
    mma_layout,
    opaque_tile,
    row_layout,
    store_rows,
    wait_async_copies,
)
from tokenmix_core.tile.masks import within


@gluon.jit
def bring_columns(columns_s, i, b_list, given, s_kt: gl.constexpr, s_vt: gl.constexpr, UNIT: gl.constexpr):
    """Begin to copy the i-th tile of columns: what the list says in `b_list`, or behind the list keys side by side.

    Returns:
        what the list says of the tile behind it: read now, it is there when that is asked for.
    """
    pointers, of_list, span = given
    p_k, p_v = pointers
    p_list, begin, far, count = of_list
    keys, near, _, _, total = span
    sh_k, sh_v = columns_s
    BT: gl.constexpr = sh_k.shape[0]
    rows_k: gl.constexpr = gl.SliceLayout(1, row_layout(sh_k.shape[1], gl.num_warps()))
    rows_v: gl.constexpr = gl.SliceLayout(1, row_layout(sh_v.shape[1], gl.num_warps()))
    if i < far:
        b_values = b_list
        if UNIT == 1 and sh_k.shape[1] != sh_v.shape[1]:
            b_values = read_list(p_list, i * BT, count, BT, UNIT, rows_v)
        begin_gather(sh_k, p_k, columns_read(b_list, begin, i * BT, count, BT, UNIT, rows_k), keys, s_kt)
        begin_gather(sh_v, p_v, columns_read(b_values, begin, i * BT, count, BT, UNIT, rows_v), keys, s_vt)
        b_list = read_list(p_list, (i + 1) * BT, count, BT, UNIT, rows_k)
    else:
        # nothing comes after the last tile
        left = gl.where(i < total, keys, 0)
        first = (near + i - far) * BT
        async_copy_tile(sh_k, p_k, first, left, s_kt, THREAD_RELATIVE=True)
        async_copy_tile(sh_v, p_v, first, left, s_vt, THREAD_RELATIVE=True)
    async_copy.commit_group()
    return b_list


@gluon.jit
def meet_columns(
    i, b_list, b_dq, here_s, next_s, given, of_queries, s_kt: gl.constexpr, s_vt: gl.constexpr,
    UNIT: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Add what the i-th tile of columns, which is in `here_s`, gives to dq; the next one is brought to `next_s`.

    Returns:
        what the list says of the tile behind the next one, and dq.
    """
    sh_q, sh_do, b_lse, b_delta, o_q, whole, window, scale = of_queries
    _, of_list, span = given
    p_list, begin, far, count = of_list
    _, near, full, end, _ = span
    sh_k, sh_v = opaque_tile(here_s[0]), opaque_tile(here_s[1])
    BT: gl.constexpr = sh_k.shape[0]
    scores: gl.constexpr = mma_layout(BT, gl.num_warps())
    sums: gl.constexpr = mma_layout(sh_k.shape[1], gl.num_warps())
    column: gl.constexpr = gl.SliceLayout(0, scores)
    zeros = gl.zeros([BT, BT], gl.float32, scores)
    wait_async_copies(0)
    b_s = warpgroup_mma(opaque_tile(sh_q), sh_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_dp = warpgroup_mma(opaque_tile(sh_do), sh_v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_list = bring_columns(next_s, i + 1, b_list, given, s_kt, s_vt, UNIT)
    b_s = warpgroup_mma_wait(1, [b_s])
    b_p = gl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
    i_near = near + i - far
    if gl.where(i < far, i >= whole // BT, (i_near < full) | (i_near >= end)):
        b_left = left_of(o_q, window, UNIT, WINDOW)
        if i < far:
            o_k = listed_columns(p_list, begin, i * BT, count, BT, UNIT, column)
            b_p = gl.where(within(o_k[None, :], b_left[:, None]), b_p, 0.0)
        else:
            distance = columns_before(o_q - i_near * BT, BT)
            b_p = gl.where(within(distance, gl.maximum(o_q - b_left + 1, 0)[:, None]), b_p, 0.0)
    b_dp = warpgroup_mma_wait(0, [b_dp])
    b_ds = (b_p * (b_dp - b_delta[:, None])).to(sh_k.dtype)
    b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, sums, 2))
    b_dq = warpgroup_mma(b_ds, sh_k, b_dq, is_async=True)
    # what stands among the waited for is not overwritten before
    b_dq, b_ds = warpgroup_mma_wait(0, [b_dq, b_ds])
    return b_list, b_dq


@cached_launch
@gluon.jit
def _kept_attention_backward_queries(
    q, k, v, o, do, lse, dlse, terms, dq, ranks, lists, cu_seqlens,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq and terms of a tile of queries and a head a program."""
    i_b, i_h, i_hk, i_t = tile_of_queries(tiles, HQ, H)
    i_n = 0
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        i_n, start, queries, first_row = locate_chunk(i_t, TQ, BT, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BT
        keys = queries
    if i_t * BT < queries:
        rows: gl.constexpr = row_layout(V, gl.num_warps())
        scores: gl.constexpr = mma_layout(BT, gl.num_warps())
        sums: gl.constexpr = mma_layout(K, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        rows_k: gl.constexpr = gl.SliceLayout(1, row_layout(K, gl.num_warps()))
        rows_v: gl.constexpr = gl.SliceLayout(1, rows)
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        first = i_t * BT + keys - queries
        last = gl.minimum(first + BT, keys) - 1
        near, full, end, stop = local_tiles(first, last, window, keys, BT, UNIT, WINDOW)
        p_list, begin, whole, count = far_tiles(
            ranks, lists, i_b, i_hk // (H // HM), i_n, start, first, last, window, U, HM, BT, UNIT, WINDOW
        )
        far = gl.cdiv(count, BT)
        total = far + stop - near
        sh_q = gl.allocate_shared_memory(q.dtype.element_ty, [BT, K], shared)
        sh_do = gl.allocate_shared_memory(q.dtype.element_ty, [BT, V], shared)
        # places that Triton tells apart: in a ring products and copies would wait for each other
        even_s = allocate_tiles(q.dtype.element_ty, BT, K, V)
        odd_s = allocate_tiles(q.dtype.element_ty, BT, K, V)
        async_copy_tile(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        async_copy_tile(sh_do, do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BT, queries, s_dt)
        async_copy.commit_group()
        given = ((p_k, p_v), (p_list, begin, far, count), (keys, near, full, end, total))
        b_list = read_list(p_list, 0, count, BT, UNIT, rows_k)
        b_list = bring_columns(even_s, i_t * 0, b_list, given, s_kt, s_vt, UNIT)

        o_row = (i_b * HQ + i_h) * TQ + start
        o_t = i_t * BT + gl.arange(0, BT, rows_v)
        o_d = gl.arange(0, V, gl.SliceLayout(0, rows))
        p_o = o + ((i_b * TQ + start) * HQ + i_h) * V + o_t.to(gl.int64)[:, None] * (HQ * V) + o_d[None, :]
        b_o = gl.load(p_o, mask=(o_t < queries)[:, None], other=0.0).to(gl.float32)
        wait_async_copies(1)
        b_delta = gl.sum(b_o * sh_do.load(rows).to(gl.float32), 1)
        if dlse is not None:
            b_delta -= gl.load(dlse + o_row + o_t, mask=o_t < queries, other=0.0)
        b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_lse = gl.load(lse + o_row + i_t * BT + o_m, mask=i_t * BT + o_m < queries, other=0.0) * LOG2_E
        store_terms(
            terms + (o_row + i_t * BT) * TERMS, b_lse, b_delta, queries - i_t * BT, scale * LOG2_E
        )  # fmt: skip

        b_dq = gl.zeros([BT, K], gl.float32, sums)
        of_queries = (sh_q, sh_do, b_lse, b_delta, first + o_m, whole, window, scale)
        for i in range(0, total - 1, 2):
            b_list, b_dq = meet_columns(
                i, b_list, b_dq, even_s, odd_s, given, of_queries, s_kt, s_vt, UNIT, WINDOW
            )  # fmt: skip
            b_list, b_dq = meet_columns(
                i + 1, b_list, b_dq, odd_s, even_s, given, of_queries, s_kt, s_vt, UNIT, WINDOW
            )  # fmt: skip
        if total % 2 == 1:
            b_list, b_dq = meet_columns(
                total - 1, b_list, b_dq, even_s, odd_s, given, of_queries, s_kt, s_vt, UNIT, WINDOW
            )  # fmt: skip
        # through shared memory, so that a thread stores 16 bytes at once
        wait_async_copies(0)
        sh_q.store((b_dq * scale).to(dq.dtype.element_ty))
        barrier()
        p_dq = dq + ((i_b * TQ + start + i_t * BT) * HQ + i_h) * K
        store_rows(p_dq, sh_q, HQ * K, queries - i_t * BT, gl.num_warps())


def backward_queries(q, k, v, o, do, lse, dlse, terms, dq, ranks, lists, cu_seqlens, *, unit, window, scale) -> None:
    """Write dq, and the terms of queries for the kernel of keys."""
    tiles = chunk_slots(1, q.shape[1], TILE, cu_seqlens)
    _kept_attention_backward_queries[(tiles * q.shape[2] * q.shape[0],)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, terms=terms, dq=dq, ranks=ranks, lists=lists,
        cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v, d=do),
        **sizes(q, k, ranks, cu_seqlens), tiles=tiles, window=window or 0, scale=scale,
        **constants(q, v, unit, window, cu_seqlens),
        maxnreg=tuning.registers_of_many(tiles * q.shape[2] * q.shape[0], 168) if q.shape[3] == 64 else None,
    )  # fmt: skip
