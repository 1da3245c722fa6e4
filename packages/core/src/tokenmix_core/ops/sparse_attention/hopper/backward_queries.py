"""The backward kernel of queries for Hopper, in Gluon: delta = o · do − dlse, and dq, of 16-bit heads of 64 or 128.

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
from tokenmix_core.ops.sparse_attention.forward import sizes
from tokenmix_core.ops.sparse_attention.hopper import TILE, constants
from tokenmix_core.ops.sparse_attention.hopper.tiles import begin_gather, columns, seen
from tokenmix_core.ops.sparse_attention.tiles import far_tiles, local_tiles, tile_of_queries
from tokenmix_core.tile.hopper import (
    LOG2_E,
    await_copies,
    barrier,
    begin_copy,
    locate_chunk,
    product_layout,
    row_layout,
    store_rows,
)


@cached_launch
@gluon.jit
def _kept_attention_backward_queries(
    q, k, v, o, do, lse, dlse, delta, dq, ranks, lists, cu_seqlens,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dq and delta of a tile of queries and a head a program."""
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
        scores: gl.constexpr = product_layout(BT, gl.num_warps())
        sums: gl.constexpr = product_layout(K, gl.num_warps())
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
        sh_k = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, K], shared)
        sh_v = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, V], shared)
        begin_copy(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        begin_copy(sh_do, do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BT, queries, s_dt)
        async_copy.commit_group()
        begin_gather(sh_k.index(0), p_k, columns(p_list, begin, 0, far, count, near, BT, UNIT, rows_k), keys, s_kt)
        begin_gather(sh_v.index(0), p_v, columns(p_list, begin, 0, far, count, near, BT, UNIT, rows_v), keys, s_vt)
        async_copy.commit_group()

        o_row = (i_b * HQ + i_h) * TQ + start
        o_t = i_t * BT + gl.arange(0, BT, rows_v)
        o_d = gl.arange(0, V, gl.SliceLayout(0, rows))
        p_o = o + ((i_b * TQ + start) * HQ + i_h) * V + o_t.to(gl.int64)[:, None] * (HQ * V) + o_d[None, :]
        b_o = gl.load(p_o, mask=(o_t < queries)[:, None], other=0.0).to(gl.float32)
        await_copies(1)
        b_delta = gl.sum(b_o * sh_do.load(rows).to(gl.float32), 1)
        if dlse is not None:
            b_delta -= gl.load(dlse + o_row + o_t, mask=o_t < queries, other=0.0)
        gl.store(delta + o_row + o_t, b_delta, mask=o_t < queries)
        b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_lse = gl.load(lse + o_row + i_t * BT + o_m, mask=i_t * BT + o_m < queries, other=0.0) * LOG2_E

        b_dq = gl.zeros([BT, K], gl.float32, sums)
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        o_next = columns(p_list, begin, 1, far, count, near, BT, UNIT, rows_k)
        for i in range(total):
            await_copies(0)
            sh_ki = sh_k.index(i % 2)
            b_s = warpgroup_mma(sh_q, sh_ki.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_dp = warpgroup_mma(sh_do, sh_v.index(i % 2).permute((1, 0)), zeros, use_acc=False, is_async=True)
            # nothing comes after the last tile
            left = gl.where(i + 1 < total, keys, 0)
            begin_gather(sh_k.index((i + 1) % 2), p_k, o_next, left, s_kt)
            o_rows = o_next
            if K != V:
                o_rows = columns(p_list, begin, i + 1, far, count, near, BT, UNIT, rows_v)
            begin_gather(sh_v.index((i + 1) % 2), p_v, o_rows, left, s_vt)
            async_copy.commit_group()
            # of the tile after the next
            o_next = columns(p_list, begin, i + 2, far, count, near, BT, UNIT, rows_k)
            b_s = warpgroup_mma_wait(1, [b_s])
            b_p = gl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
            i_near = near + i - far
            if gl.where(i < far, i >= whole // BT, (i_near < full) | (i_near >= end)):
                o_k = columns(p_list, begin, i, far, count, near, BT, UNIT, gl.SliceLayout(0, scores))
                b_p = gl.where(seen(first + o_m, o_k, i < far, window, UNIT, WINDOW), b_p, 0.0)
            b_dp = warpgroup_mma_wait(0, [b_dp])
            b_ds = (b_p * (b_dp - b_delta[:, None])).to(q.dtype.element_ty)
            b_ds = gl.convert_layout(b_ds, gl.DotOperandLayout(0, sums, 2))
            b_dq = warpgroup_mma(b_ds, sh_ki, b_dq, is_async=True)
            # what stands among the waited for is not overwritten before
            b_dq, b_ds = warpgroup_mma_wait(0, [b_dq, b_ds])
        # through shared memory, so that a thread stores 16 bytes at once
        await_copies(0)
        sh_q.store((b_dq * scale).to(dq.dtype.element_ty))
        barrier()
        p_dq = dq + ((i_b * TQ + start + i_t * BT) * HQ + i_h) * K
        store_rows(p_dq, sh_q, HQ * K, queries - i_t * BT, gl.num_warps())


def backward_queries(q, k, v, o, do, lse, dlse, delta, dq, ranks, lists, cu_seqlens, *, unit, window, scale) -> None:
    """Write dq, and delta for the kernel of keys."""
    tiles = chunk_slots(1, q.shape[1], TILE, cu_seqlens)
    _kept_attention_backward_queries[(tiles * q.shape[2] * q.shape[0],)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, delta=delta, dq=dq, ranks=ranks, lists=lists,
        cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v, d=do),
        **sizes(q, k, ranks, cu_seqlens), tiles=tiles, window=window or 0, scale=scale,
        **constants(q, v, unit, window, cu_seqlens),
        maxnreg=tuning.registers_of_many(tiles * q.shape[2] * q.shape[0], 168) if q.shape[3] == 64 else None,
    )  # fmt: skip
