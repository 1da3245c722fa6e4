"""Forward attention over retained keys on Hopper: 16-bit heads of 64 or 128, one warpgroup per CTA.

    smem       Q [BM, K]; K, V [2, BN, ·]       columns of a CTA: listed tiles (gathered), then local tiles (contiguous)
    prologue   cp.async Q; K, V of the last tile; positions of the tile before
    iteration  wait K_i, V_i
               S = Q K_iᵀ (WGMMA)               meanwhile gather K, V of i − 1; load the positions of i − 2
               mask; P = exp2(S − shift); row sums
               O += P V_i (WGMMA)
    epilogue   O / l → smem → global; lse

As in dense attention (`softmax_attention/hopper/forward.py`), tiles are visited last to first. In bfloat16, the row
maxima of the first visited tile are the shift of all tiles (`kernels/gluon/online_softmax.py`).
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.gluon import online_softmax
from tokenmix_core.kernels.gluon.hopper import async_copy_tile, mma_layout, row_layout, wait_async_copies
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.softmax_attention.hopper.query_tile import locate_query_tile, store_tile
from tokenmix_core.ops.softmax_attention.launch_args import listed_sizes, strides
from tokenmix_core.ops.softmax_attention.types import KeyLists
from tokenmix_core.ops.sparse_attention import tuning
from tokenmix_core.ops.sparse_attention.hopper.tiles import KeyList, async_gather_rows, columns, seen
from tokenmix_core.ops.sparse_attention.tiles import find_listed, local_tiles, tile_of_queries


@cached_launch
@gluon.jit
def _kept_attention_forward(
    q, k, v, o, lse, ranks, lists, cu_seqlens,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Compute O and lse of one query tile of one head per program."""
    tile = locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BM, PACKED)
    i_b, i_h, i_hk, i_n, i_t, _, start, queries, keys = tile
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
        n_min, full_min, full_max, n_max = local_tiles(first, last, window, keys, BN, UNIT, WINDOW)
        row_of_lists = (i_b, i_hk // (H // HM), i_n, start)
        p_list, begin, unmasked, count = find_listed(
            ranks, lists, row_of_lists, first, last, window, (U, HM), UNIT, WINDOW
        )
        units = KeyList(p_list, begin, count)
        listed_tiles = gl.cdiv(count, BN)
        total = listed_tiles + n_max - n_min
        q_s = gl.allocate_shared_memory(dtype, [BM, K], shared)
        k_s = gl.allocate_shared_memory(dtype, [2, BN, K], shared)
        v_s = gl.allocate_shared_memory(dtype, [2, BN, V], shared)
        async_copy_tile(q_s, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt)

        o_m = gl.arange(0, BM, row)
        zeros = gl.zeros([BM, BN], gl.float32, scores)
        b_o = gl.zeros([BM, V], gl.float32, sums)
        b_l = gl.zeros([BM], gl.float32, row)
        b_shift = gl.zeros([BM], gl.float32, row)
        # `passes`: one pass over the keys, and a second one with a running maximum if row sums leave the safe range
        passes = total * 0 + 1
        running_max = total * 0
        if online_softmax.needs_running_max(dtype):
            running_max += 1
        while passes == 1:
            i = gl.maximum(total - 1, 0)
            async_gather_rows(k_s.index(0), p_k, columns(units, listed_tiles, i, n_min, BN, UNIT, rows_k), keys, s_kt)
            async_gather_rows(v_s.index(0), p_v, columns(units, listed_tiles, i, n_min, BN, UNIT, rows_v), keys, s_vt)
            async_copy.commit_group()
            o_next = columns(units, listed_tiles, gl.maximum(i - 1, 0), n_min, BN, UNIT, rows_k)
            b_o = gl.zeros([BM, V], gl.float32, sums)
            b_shift = gl.zeros([BM], gl.float32, row)
            b_m = gl.full([BM], float("-inf"), gl.float32, row)
            b_sums = online_softmax.quad_row_sums(zeros)
            for n in range(total):
                wait_async_copies(0)
                b_s = warpgroup_mma(q_s, k_s.index(n % 2).permute((1, 0)), zeros, use_acc=False, is_async=True)
                # after the last tile there is nothing to prefetch, so copy 0 rows
                left = gl.where(i > 0, keys, 0)
                async_gather_rows(k_s.index((n + 1) % 2), p_k, o_next, left, s_kt)
                o_rows = o_next
                if K != V:
                    o_rows = columns(units, listed_tiles, gl.maximum(i - 1, 0), n_min, BN, UNIT, rows_v)
                async_gather_rows(v_s.index((n + 1) % 2), p_v, o_rows, left, s_vt)
                async_copy.commit_group()
                # load the key positions of the tile after the next
                o_next = columns(units, listed_tiles, gl.maximum(i - 2, 0), n_min, BN, UNIT, rows_k)
                b_s = warpgroup_mma_wait(0, [b_s])
                i_k = n_min + i - listed_tiles
                if gl.where(i < listed_tiles, i >= unmasked // BN, (i_k < full_min) | (i_k >= full_max)):
                    o_k = columns(units, listed_tiles, i, n_min, BN, UNIT, gl.SliceLayout(0, scores))
                    b_s = gl.where(seen(first + o_m, o_k, i < listed_tiles, window, UNIT, WINDOW), b_s, float("-inf"))
                b_p, b_m, b_shift, b_sums, b_o = online_softmax.softmax_step(
                    b_s, b_m, b_shift, b_sums, b_o, scale, (n == 0) | (running_max == 1)
                )
                b_left = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, sums, 2))
                b_o = warpgroup_mma(b_left, v_s.index(n % 2), b_o, is_async=True)
                # listing b_left in deps keeps its registers live until the WGMMA has read them
                b_o, b_left = warpgroup_mma_wait(0, [b_o, b_left])
                i -= 1
            b_l = gl.convert_layout(gl.sum(b_sums, 1), row)
            passes = gl.where(online_softmax.sums_in_range(b_l) | (running_max == 1), 0, 1)
            running_max = passes
            # after this wait, and its barrier, all warps' MMAs have read the buffers that a second pass fills
            wait_async_copies(0)

        b_norm, b_lse = online_softmax.finalize(b_shift, b_l)
        gl.store(lse + (i_b * HQ + i_h) * TQ + start + i_t * BM + o_m, b_lse, mask=i_t * BM + o_m < queries)
        # O passes through an smem buffer of its own shape: Q's if K = V, else a buffer of V, since then BM = BN
        o_s = v_s.index(0)
        if K == V:
            o_s = q_s
        b_o *= gl.convert_layout(b_norm, gl.SliceLayout(1, sums))[:, None]
        p_o = o + (i_b * TQ + start + i_t * BM) * HQ * V + i_h * V
        store_tile(p_o, o_s, b_o, HQ * V, queries - i_t * BM)


def forward(q, k, v, o, lse, keys: KeyLists, scale) -> None:
    """Write o and the log-sum-exp."""
    (B, TQ, HQ, K), V = q.shape, v.shape[3]
    BM, BN, warps, _, registers = tuning.HOPPER_FORWARD[K, V]
    tiles = chunk_slots(1, TQ, BM, keys.cu_seqlens)
    _kept_attention_forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, ranks=keys.ranks, lists=keys.lists, cu_seqlens=keys.cu_seqlens,
        **strides(q=q, k=k, v=v), **listed_sizes(q, k, keys), tiles=tiles, scale=scale * math.log2(math.e), K=K, V=V,
        BM=BM, BN=BN, UNIT=keys.unit, WINDOW=keys.window is not None, PACKED=keys.cu_seqlens is not None,
        num_warps=warps, maxnreg=registers,
    )  # fmt: skip
