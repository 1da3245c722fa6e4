"""Forward attention on Hopper: 16-bit heads of 64 or 128, one warpgroup per CTA that copies and computes.

    smem       Q [BT, D]; K, V [NUM_STAGES, BT, D]        registers  S, P [BT, BT]; O [BT, D]; row stats [BT]
    prologue   cp.async Q, K_n, V_n                        KV tiles n, n − 1, …, 0: the queries' own keys first
    iteration  wait K_i, V_i
               S = Q K_iᵀ (WGMMA)                          meanwhile cp.async K, V of i − 1 → the other stage
               mask; P = exp2(S − shift); row sums
               O += P V_i (WGMMA)
    epilogue   O / l → smem → global; lse
    NUM_STAGES = 1: K of i − 1 is prefetched after S, V after P V, into the buffer just read: 3 CTAs per SM at D = 128.

In bfloat16, the row maxima of the first tile are the shift of all tiles; a CTA whose sums leave the safe range runs
again with a running maximum. In float16, the only pass has a running maximum (`kernels/gluon/online_softmax.py`).
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.gluon import online_softmax
from tokenmix_core.kernels.gluon.hopper import async_copy_tile, barrier, mma_layout, wait_async_copies
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.masks import visible
from tokenmix_core.ops.softmax_attention import tuning
from tokenmix_core.ops.softmax_attention.hopper import TILE, constants
from tokenmix_core.ops.softmax_attention.hopper.query_tile import locate_query_tile, store_tile
from tokenmix_core.ops.softmax_attention.kv_tiles import key_tiles, tile_from_last, tile_of_queries
from tokenmix_core.ops.softmax_attention.launch_args import sizes, strides


@cached_launch
@gluon.jit
def _forward(
    q, k, v, o, lse, cu_seqlens, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Compute O and lse of one query tile of one head per program."""
    tile = locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BT, PACKED)
    i_b, i_h, i_hk, _, i_t, _, start, queries, keys = tile
    if i_t * BT < queries:
        scores: gl.constexpr = mma_layout(BT, gl.num_warps())
        sums: gl.constexpr = mma_layout(D, gl.num_warps())
        row: gl.constexpr = gl.SliceLayout(1, scores)
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        dtype: gl.constexpr = q.dtype.element_ty
        relative: gl.constexpr = D == 128
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        first = i_t * BT + keys - queries
        last = gl.minimum(first + BT, keys) - 1
        sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BT, CAUSAL, WINDOW)
        # number of KV tiles between those of the sinks and those of the window
        gap = n_min - sink_tiles
        count = sink_tiles + n_max - n_min
        q_s = gl.allocate_shared_memory(dtype, [BT, D], shared)
        k_s = gl.allocate_shared_memory(dtype, [NUM_STAGES, BT, D], shared)
        v_s = gl.allocate_shared_memory(dtype, [NUM_STAGES, BT, D], shared)
        async_copy_tile(q_s, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)

        o_m = gl.arange(0, BT, row)
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        b_o = gl.zeros([BT, D], gl.float32, sums)
        b_l = gl.zeros([BT], gl.float32, row)
        b_shift = gl.zeros([BT], gl.float32, row)
        # `passes`: one pass over the keys; in bfloat16 a second one with a running maximum if sums leave the safe range
        passes = count * 0 + 1
        running_max = count * 0
        if online_softmax.needs_running_max(dtype):
            running_max += 1
        while passes == 1:
            i_k = tile_from_last(0, count, sink_tiles, gap)
            async_copy_tile(k_s.index(0), p_k, i_k * BT, keys, s_kt, THREAD_RELATIVE=relative)
            if NUM_STAGES == 1:
                async_copy.commit_group()
            async_copy_tile(v_s.index(0), p_v, i_k * BT, keys, s_vt, THREAD_RELATIVE=relative)
            async_copy.commit_group()
            b_o = gl.zeros([BT, D], gl.float32, sums)
            b_shift = gl.zeros([BT], gl.float32, row)
            b_m = gl.full([BT], float("-inf"), gl.float32, row)
            b_sums = online_softmax.quad_row_sums(zeros)
            for i in range(count):
                # with one stage, wait for K only: the copy of V stays in flight
                wait_async_copies(2 - NUM_STAGES)
                b_s = warpgroup_mma(
                    q_s, k_s.index(i % NUM_STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True
                )  # fmt: skip
                i_next = tile_from_last(i + 1, count, sink_tiles, gap)
                if NUM_STAGES == 2:
                    next_k, next_v = k_s.index((i + 1) % 2), v_s.index((i + 1) % 2)
                    async_copy_tile(next_k, p_k, i_next * BT, keys, s_kt, i + 1 < count, THREAD_RELATIVE=relative)
                    async_copy_tile(next_v, p_v, i_next * BT, keys, s_vt, i + 1 < count, THREAD_RELATIVE=relative)
                    async_copy.commit_group()
                b_s = warpgroup_mma_wait(0, [b_s])
                if NUM_STAGES == 1:
                    # after this barrier all warps' MMAs have read the buffer
                    barrier()
                    async_copy_tile(k_s.index(0), p_k, i_next * BT, keys, s_kt, i + 1 < count, THREAD_RELATIVE=relative)
                    async_copy.commit_group()
                if (i_k < full_min) | (i_k >= full_max):
                    o_k = gl.arange(0, BT, gl.SliceLayout(0, scores))[None, :]
                    distance = (first - i_k * BT + o_m)[:, None] - o_k
                    m_s = visible(distance, i_k * BT + o_k, keys, window, sinks, CAUSAL, WINDOW)
                    b_s = gl.where(m_s, b_s, float("-inf"))
                b_p, b_m, b_shift, b_sums, b_o = online_softmax.softmax_step(
                    b_s, b_m, b_shift, b_sums, b_o, scale, (i == 0) | (running_max == 1)
                )
                b_left = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, sums, 2))
                if NUM_STAGES == 1:
                    wait_async_copies(1)
                b_o = warpgroup_mma(b_left, v_s.index(i % NUM_STAGES), b_o, is_async=True)
                # listing b_left in deps keeps its registers live until the WGMMA has read them
                b_o, b_left = warpgroup_mma_wait(0, [b_o, b_left])
                if NUM_STAGES == 1:
                    barrier()
                    async_copy_tile(v_s.index(0), p_v, i_next * BT, keys, s_vt, i + 1 < count, THREAD_RELATIVE=relative)
                    async_copy.commit_group()
                i_k = i_next
            b_l = gl.convert_layout(gl.sum(b_sums, 1), row)
            passes = gl.where(online_softmax.sums_in_range(b_l) | (running_max == 1), 0, 1)
            running_max = passes
            # after this wait, and its barrier, all warps' MMAs have read the buffers that a second pass fills
            wait_async_copies(0)

        b_norm, b_lse = online_softmax.finalize(b_shift, b_l)
        o_row = (i_b * HQ + i_h) * TQ + start + i_t * BT
        gl.store(lse + o_row + o_m, b_lse, mask=i_t * BT + o_m < queries)
        b_o *= gl.convert_layout(b_norm, gl.SliceLayout(1, sums))[:, None]
        p_o = o + (i_b * TQ + start + i_t * BT) * HQ * D + i_h * D
        store_tile(p_o, q_s, b_o, HQ * D, queries - i_t * BT)


def forward(q, k, v, o, lse, cu_seqlens, mask, scale) -> None:
    """Write o and the log-sum-exp."""
    B, TQ, HQ, D = q.shape
    tiles = chunk_slots(1, TQ, TILE, cu_seqlens)
    stages, registers = tuning.hopper_forward(D, tiles * HQ * B)
    _forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v), **sizes(q, k, cu_seqlens, mask),
        tiles=tiles, scale=scale * math.log2(math.e), BT=TILE, NUM_STAGES=stages, **constants(q, cu_seqlens, mask),
        maxnreg=registers,
    )  # fmt: skip
