"""The forward kernel for Hopper, in Gluon: 16-bit heads of 64 or 128.

The order is that of attention's: tiles come the last one first, local before listed ones, the next keys and values are
copied beside a tile's products, and the softmax is relative to the greatest scores of the first tile
(`tile/hopper_softmax.py`). Where listed keys lie is read a tile before that.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import strides
from tokenmix_core.ops.sparse_attention.forward import sizes
from tokenmix_core.ops.sparse_attention.hopper.tiles import begin_gather, columns, seen
from tokenmix_core.ops.sparse_attention.tiles import far_tiles, local_tiles, tile_of_queries
from tokenmix_core.tile.hopper import (
    async_copy_tile,
    barrier,
    locate_chunk,
    mma_layout,
    row_layout,
    store_rows,
    wait_async_copies,
)
from tokenmix_core.tile.hopper_softmax import (
    expand_to_quads,
    finalize,
    needs_running_max,
    quad_row_sums,
    sums_in_range,
    update_row_max,
)


@cached_launch
@gluon.jit
def _kept_attention_forward(
    q, k, v, o, lse, ranks, lists, cu_seqlens,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """A tile of queries and a head a program."""
    i_b, i_h, i_hk, i_t = tile_of_queries(tiles, HQ, H)
    i_n = 0
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        i_n, start, queries, first_row = locate_chunk(i_t, TQ, BM, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BM
        keys = queries
    if i_t * BM < queries:
        scores: gl.constexpr = mma_layout(BN, gl.num_warps())
        sums: gl.constexpr = mma_layout(V, gl.num_warps())
        row: gl.constexpr = gl.SliceLayout(1, scores)
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        rows_k: gl.constexpr = gl.SliceLayout(1, row_layout(K, gl.num_warps()))
        rows_v: gl.constexpr = gl.SliceLayout(1, row_layout(V, gl.num_warps()))
        dtype: gl.constexpr = q.dtype.element_ty
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        first = i_t * BM + keys - queries
        last = gl.minimum(first + BM, keys) - 1
        near, full, end, stop = local_tiles(first, last, window, keys, BN, UNIT, WINDOW)
        p_list, begin, whole, count = far_tiles(
            ranks, lists, i_b, i_hk // (H // HM), i_n, start, first, last, window, U, HM, BN, UNIT, WINDOW
        )
        far = gl.cdiv(count, BN)
        total = far + stop - near
        sh_q = gl.allocate_shared_memory(dtype, [BM, K], shared)
        sh_k = gl.allocate_shared_memory(dtype, [2, BN, K], shared)
        sh_v = gl.allocate_shared_memory(dtype, [2, BN, V], shared)
        async_copy_tile(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt)

        o_m = gl.arange(0, BM, row)
        zeros = gl.zeros([BM, BN], gl.float32, scores)
        b_o = gl.zeros([BM, V], gl.float32, sums)
        b_l = gl.zeros([BM], gl.float32, row)
        b_shift = gl.zeros([BM], gl.float32, row)
        # one round, and another one with maxima of all tiles where its sums ask for that
        rounds = total * 0 + 1
        all_maxima = total * 0
        if needs_running_max(dtype):
            all_maxima += 1
        while rounds == 1:
            i = gl.maximum(total - 1, 0)
            begin_gather(sh_k.index(0), p_k, columns(p_list, begin, i, far, count, near, BN, UNIT, rows_k), keys, s_kt)
            begin_gather(sh_v.index(0), p_v, columns(p_list, begin, i, far, count, near, BN, UNIT, rows_v), keys, s_vt)
            async_copy.commit_group()
            o_next = columns(p_list, begin, gl.maximum(i - 1, 0), far, count, near, BN, UNIT, rows_k)
            b_o = gl.zeros([BM, V], gl.float32, sums)
            b_shift = gl.zeros([BM], gl.float32, row)
            b_m = gl.full([BM], float("-inf"), gl.float32, row)
            b_sums = quad_row_sums(zeros)
            for n in range(total):
                wait_async_copies(0)
                b_s = warpgroup_mma(sh_q, sh_k.index(n % 2).permute((1, 0)), zeros, use_acc=False, is_async=True)
                # nothing comes after the last tile
                left = gl.where(i > 0, keys, 0)
                begin_gather(sh_k.index((n + 1) % 2), p_k, o_next, left, s_kt)
                o_rows = o_next
                if K != V:
                    o_rows = columns(p_list, begin, gl.maximum(i - 1, 0), far, count, near, BN, UNIT, rows_v)
                begin_gather(sh_v.index((n + 1) % 2), p_v, o_rows, left, s_vt)
                async_copy.commit_group()
                # of the tile after the next
                o_next = columns(p_list, begin, gl.maximum(i - 2, 0), far, count, near, BN, UNIT, rows_k)
                b_s = warpgroup_mma_wait(0, [b_s])
                i_near = near + i - far
                if gl.where(i < far, i >= whole // BN, (i_near < full) | (i_near >= end)):
                    o_k = columns(p_list, begin, i, far, count, near, BN, UNIT, gl.SliceLayout(0, scores))
                    b_s = gl.where(seen(first + o_m, o_k, i < far, window, UNIT, WINDOW), b_s, float("-inf"))
                if (n == 0) | (all_maxima == 1):
                    b_m, b_shift, b_shrink = update_row_max(b_s, b_m, scale)
                    b_sums *= expand_to_quads(b_shrink, zeros)
                    b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, sums))[:, None]
                b_p = gl.exp2(b_s * scale - b_shift[:, None])
                b_sums += quad_row_sums(b_p)
                b_left = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, sums, 2))
                b_o = warpgroup_mma(b_left, sh_v.index(n % 2), b_o, is_async=True)
                # what stands among the waited for is not overwritten before
                b_o, b_left = warpgroup_mma_wait(0, [b_o, b_left])
                i -= 1
            b_l = gl.convert_layout(gl.sum(b_sums, 1), row)
            rounds = gl.where(sums_in_range(b_l) | (all_maxima == 1), 0, 1)
            all_maxima = rounds
            # tiles are written again when every warp's products have read them
            wait_async_copies(0)

        b_norm, b_lse = finalize(b_shift, b_l)
        gl.store(lse + (i_b * HQ + i_h) * TQ + start + i_t * BM + o_m, b_lse, mask=i_t * BM + o_m < queries)
        # through shared memory, so that a thread stores 16 bytes at once; BM is BN where K and V differ
        sh_o = sh_v.index(0)
        if K == V:
            sh_o = sh_q
        sh_o.store((b_o * gl.convert_layout(b_norm, gl.SliceLayout(1, sums))[:, None]).to(dtype))
        barrier()
        p_o = o + (i_b * TQ + start + i_t * BM) * HQ * V + i_h * V
        store_rows(p_o, sh_o, HQ * V, queries - i_t * BM, gl.num_warps())


def forward(q, k, v, o, lse, ranks, lists, cu_seqlens, *, unit, window, scale) -> None:
    """Write o and the log-sum-exp."""
    BM, BN, warps, _, registers = tuning.kept_attention_hopper(q.shape[3], v.shape[3])
    tiles = chunk_slots(1, q.shape[1], BM, cu_seqlens)
    _kept_attention_forward[(tiles * q.shape[2] * q.shape[0],)](
        q=q, k=k, v=v, o=o, lse=lse, ranks=ranks, lists=lists, cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v),
        **sizes(q, k, ranks, cu_seqlens),
        tiles=tiles, window=window or 0, scale=scale * math.log2(math.e), K=q.shape[3], V=v.shape[3], BM=BM, BN=BN,
        UNIT=unit, WINDOW=window is not None, PACKED=cu_seqlens is not None, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
