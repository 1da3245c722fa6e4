"""The forward kernel of windows for Hopper, in Gluon: 16-bit heads of 64 or 128.

The arithmetic is that of `forward.py`. Keys and values have one buffer each: the next keys are copied while the softmax
and the values' product run, the next values beside the next scores. Three blocks then share a multiprocessor, and one's
exponentials run beside another's products.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import sizes, strides
from tokenmix_core.ops.softmax_attention.hopper import TILE, constants
from tokenmix_core.ops.softmax_attention.tiles import key_tiles, tile_of_queries
from tokenmix_core.tile.hopper import await_copies, barrier, begin_copy, locate_chunk, product_layout, store_rows
from tokenmix_core.tile.masks import visible

# by head size: as many as four and three blocks a multiprocessor leave a thread
REGISTERS = {64: 128, 128: 168}


@cached_launch
@gluon.jit
def _forward(
    q, k, v, o, lse, cu_seqlens, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
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
        count = far_sinks + stop - near
        sh_q = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        sh_k = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        sh_v = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        i_k = gl.where(far_sinks > 0, 0, hidden)
        begin_copy(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        begin_copy(sh_k, p_k, i_k * BT, keys, s_kt)
        async_copy.commit_group()
        begin_copy(sh_v, p_v, i_k * BT, keys, s_vt)
        async_copy.commit_group()

        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_o = gl.zeros([BT, D], gl.float32, sums)
        b_m = gl.full([BT], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
        b_l = gl.zeros([BT], gl.float32, gl.SliceLayout(1, scores))
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        for i in range(count):
            await_copies(1)
            b_s = warpgroup_mma(sh_q, sh_k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, [b_s])
            i_next = i + 1 + gl.where(i + 1 < far_sinks, 0, hidden)
            # nothing comes after the last tile
            left = gl.where(i + 1 < count, keys, 0)
            # a buffer is written again when every warp's product has read it
            barrier()
            begin_copy(sh_k, p_k, i_next * BT, left, s_kt)
            async_copy.commit_group()
            if (i_k < full) | (i_k >= end):
                o_k = i_k * BT + gl.arange(0, BT, gl.SliceLayout(0, scores))
                m_s = visible(first + o_m[:, None], o_k[None, :], keys, window, sinks, CAUSAL, WINDOW)
                b_s = gl.where(m_s, b_s, float("-inf"))
            b_top = gl.maximum(b_m, gl.max(b_s, 1))
            # −∞ while nothing was seen
            b_max = gl.where(b_top == float("-inf"), 0.0, b_top)
            b_p = gl.exp2(b_s * scale - (b_max * scale)[:, None])
            # the difference first: exactly 1 where the maximum stays
            b_shrink = gl.exp2((b_m - b_max) * scale)
            b_l = b_l * b_shrink + gl.sum(b_p, 1)
            b_m = b_top
            b_o = b_o * gl.convert_layout(b_shrink, gl.SliceLayout(1, sums))[:, None]
            b_left = gl.convert_layout(b_p.to(q.dtype.element_ty), gl.DotOperandLayout(0, sums, 2))
            await_copies(1)
            b_o = warpgroup_mma(b_left, sh_v, b_o, is_async=True)
            # what stands among the waited for is not overwritten before
            b_o, b_left = warpgroup_mma_wait(0, [b_o, b_left])
            barrier()
            begin_copy(sh_v, p_v, i_next * BT, left, s_vt)
            async_copy.commit_group()
            i_k = i_next

        blind = b_l == 0.0
        b_l = gl.where(blind, 1.0, b_l)
        b_lse = gl.where(blind, float("-inf"), (b_m * scale + gl.log2(b_l)) * 0.6931471805599453)
        o_row = (i_b * HQ + i_h) * TQ + start + i_t * BT
        gl.store(lse + o_row + o_m, b_lse, mask=i_t * BT + o_m < queries)
        b_norm = gl.convert_layout(1.0 / b_l, gl.SliceLayout(1, sums))
        # through shared memory, so that a thread stores 16 bytes at once
        await_copies(0)
        sh_q.store((b_o * b_norm[:, None]).to(o.dtype.element_ty))
        barrier()
        p_o = o + (i_b * TQ + start + i_t * BT) * HQ * D + i_h * D
        store_rows(p_o, sh_q, HQ * D, queries - i_t * BT, gl.num_warps())


def forward(q, k, v, o, lse, cu_seqlens, mask, scale) -> None:
    """Write o and the log-sum-exp."""
    B, TQ, HQ, D = q.shape
    tiles = chunk_slots(1, TQ, TILE, cu_seqlens)
    _forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v), **sizes(q, k, cu_seqlens, mask),
        tiles=tiles, scale=scale * math.log2(math.e), BT=TILE, **constants(q, cu_seqlens, mask), maxnreg=REGISTERS[D],
    )  # fmt: skip
