"""The forward kernel for Hopper, in Gluon: 16-bit heads of 64 or 128.

The softmax is relative to the greatest scores of the first tile (`tile/hopper_softmax.py`): tiles come the last one
first. The next keys and values are copied beside a tile's products and its softmax, to a second place, or where there
is one to that which was read last.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import sizes, strides
from tokenmix_core.ops.softmax_attention.hopper import TILE, constants
from tokenmix_core.ops.softmax_attention.tiles import key_tiles, tile_from_last, tile_of_queries
from tokenmix_core.tile.hopper import (
    async_copy_tile,
    barrier,
    locate_chunk,
    mma_layout,
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
from tokenmix_core.tile.masks import visible


@cached_launch
@gluon.jit
def _forward(
    q, k, v, o, lse, cu_seqlens, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """A tile of queries and a head a program."""
    i_b, i_h, i_hk, i_t = tile_of_queries(tiles, HQ, H)
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        _, start, queries, first_row = locate_chunk(i_t, TQ, BT, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BT
        keys = queries
    if i_t * BT < queries:
        scores: gl.constexpr = mma_layout(BT, gl.num_warps())
        sums: gl.constexpr = mma_layout(D, gl.num_warps())
        row: gl.constexpr = gl.SliceLayout(1, scores)
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        dtype: gl.constexpr = q.dtype.element_ty
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        first = i_t * BT + keys - queries
        last = gl.minimum(first + BT, keys) - 1
        far_sinks, near, full, end, stop = key_tiles(first, last, keys, window, sinks, BT, CAUSAL, WINDOW)
        # between the sinks' tiles and the window's
        hidden = near - far_sinks
        count = far_sinks + stop - near
        sh_q = gl.allocate_shared_memory(dtype, [BT, D], shared)
        sh_k = gl.allocate_shared_memory(dtype, [PLACES, BT, D], shared)
        sh_v = gl.allocate_shared_memory(dtype, [PLACES, BT, D], shared)
        async_copy_tile(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)

        o_m = gl.arange(0, BT, row)
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        b_o = gl.zeros([BT, D], gl.float32, sums)
        b_l = gl.zeros([BT], gl.float32, row)
        b_shift = gl.zeros([BT], gl.float32, row)
        # one round, and another one with maxima of all tiles where its sums ask for that
        rounds = count * 0 + 1
        all_maxima = count * 0
        if needs_running_max(dtype):
            all_maxima += 1
        while rounds == 1:
            i_k = tile_from_last(0, count, far_sinks, hidden)
            async_copy_tile(sh_k.index(0), p_k, i_k * BT, keys, s_kt, THREAD_RELATIVE=D == 128)
            if PLACES == 1:
                async_copy.commit_group()
            async_copy_tile(sh_v.index(0), p_v, i_k * BT, keys, s_vt, THREAD_RELATIVE=D == 128)
            async_copy.commit_group()
            b_o = gl.zeros([BT, D], gl.float32, sums)
            b_shift = gl.zeros([BT], gl.float32, row)
            b_m = gl.full([BT], float("-inf"), gl.float32, row)
            b_sums = quad_row_sums(zeros)
            for i in range(count):
                # of keys and values, or of keys, whose values are on their way
                wait_async_copies(2 - PLACES)
                b_s = warpgroup_mma(sh_q, sh_k.index(i % PLACES).permute((1, 0)), zeros, use_acc=False, is_async=True)
                i_next = tile_from_last(i + 1, count, far_sinks, hidden)
                if PLACES == 2:
                    async_copy_tile(
                        sh_k.index((i + 1) % 2), p_k, i_next * BT, keys, s_kt, i + 1 < count, THREAD_RELATIVE=D == 128
                    )
                    async_copy_tile(
                        sh_v.index((i + 1) % 2), p_v, i_next * BT, keys, s_vt, i + 1 < count, THREAD_RELATIVE=D == 128
                    )
                    async_copy.commit_group()
                b_s = warpgroup_mma_wait(0, [b_s])
                if PLACES == 1:
                    # a place is written again when every warp's product has read it
                    barrier()
                    async_copy_tile(
                        sh_k.index(0), p_k, i_next * BT, keys, s_kt, i + 1 < count, THREAD_RELATIVE=D == 128
                    )
                    async_copy.commit_group()
                if (i_k < full) | (i_k >= end):
                    o_k = gl.arange(0, BT, gl.SliceLayout(0, scores))[None, :]
                    distance = (first - i_k * BT + o_m)[:, None] - o_k
                    m_s = visible(distance, i_k * BT + o_k, keys, window, sinks, CAUSAL, WINDOW)
                    b_s = gl.where(m_s, b_s, float("-inf"))
                if (i == 0) | (all_maxima == 1):
                    b_m, b_shift, b_shrink = update_row_max(b_s, b_m, scale)
                    b_sums *= expand_to_quads(b_shrink, zeros)
                    b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, sums))[:, None]
                b_p = gl.exp2(b_s * scale - b_shift[:, None])
                b_sums += quad_row_sums(b_p)
                b_left = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, sums, 2))
                if PLACES == 1:
                    wait_async_copies(1)
                b_o = warpgroup_mma(b_left, sh_v.index(i % PLACES), b_o, is_async=True)
                # what stands among the waited for is not overwritten before
                b_o, b_left = warpgroup_mma_wait(0, [b_o, b_left])
                if PLACES == 1:
                    barrier()
                    async_copy_tile(
                        sh_v.index(0), p_v, i_next * BT, keys, s_vt, i + 1 < count, THREAD_RELATIVE=D == 128
                    )
                    async_copy.commit_group()
                i_k = i_next
            b_l = gl.convert_layout(gl.sum(b_sums, 1), row)
            rounds = gl.where(sums_in_range(b_l) | (all_maxima == 1), 0, 1)
            all_maxima = rounds
            # tiles are written again when every warp's products have read them
            wait_async_copies(0)

        b_norm, b_lse = finalize(b_shift, b_l)
        o_row = (i_b * HQ + i_h) * TQ + start + i_t * BT
        gl.store(lse + o_row + o_m, b_lse, mask=i_t * BT + o_m < queries)
        # through shared memory, so that a thread stores 16 bytes at once
        sh_q.store((b_o * gl.convert_layout(b_norm, gl.SliceLayout(1, sums))[:, None]).to(dtype))
        barrier()
        p_o = o + (i_b * TQ + start + i_t * BT) * HQ * D + i_h * D
        store_rows(p_o, sh_q, HQ * D, queries - i_t * BT, gl.num_warps())


def forward(q, k, v, o, lse, cu_seqlens, mask, scale) -> None:
    """Write o and the log-sum-exp."""
    B, TQ, HQ, D = q.shape
    tiles = chunk_slots(1, TQ, TILE, cu_seqlens)
    places, registers = tuning.attention_places(D, tiles * HQ * B)
    _forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v), **sizes(q, k, cu_seqlens, mask),
        tiles=tiles, scale=scale * math.log2(math.e), BT=TILE, PLACES=places, **constants(q, cu_seqlens, mask),
        maxnreg=registers,
    )  # fmt: skip
