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
    await_copies,
    barrier,
    begin_copy,
    locate_chunk,
    placed_anew,
    product_layout,
    store_rows,
)
from tokenmix_core.tile.hopper_softmax import (
    bounded,
    finish,
    for_threads,
    raise_greatest,
    takes_all_maxima,
    thread_sums,
)
from tokenmix_core.tile.masks import visible


@gluon.jit
def bring_keys(tile_s, pointers, i_k, keys, wanted, s_kt: gl.constexpr, s_vt: gl.constexpr, PLACES: gl.constexpr):
    """Begin to copy a tile of keys and values; from a single place each is waited for by itself."""
    BT: gl.constexpr = tile_s[0].shape[0]
    begin_copy(tile_s[0], pointers[0], i_k * BT, keys, s_kt, wanted)
    if PLACES == 1:
        async_copy.commit_group()
    begin_copy(tile_s[1], pointers[1], i_k * BT, keys, s_vt, wanted)
    async_copy.commit_group()


@gluon.jit
def meet_keys(
    i, i_k, sums, here_s, next_s, given, s_kt: gl.constexpr, s_vt: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Add the i-th tile of keys, which is in `here_s`, to a program's sums; the next one is brought to `next_s`.

    Returns:
        the next tile, and the sums: outputs, weights by thread, greatest scores, and what is subtracted.
    """
    b_o, b_sums, b_m, b_shift = sums
    sh_q, pointers, span, o_q, all_maxima, window, sinks, scale = given
    keys, far_sinks, hidden, full, end, count = span
    sh_k, sh_v = here_s
    dtype: gl.constexpr = sh_k.dtype
    BT: gl.constexpr = sh_k.shape[0]
    scores: gl.constexpr = product_layout(BT, gl.num_warps())
    outputs: gl.constexpr = product_layout(sh_k.shape[1], gl.num_warps())
    zeros = gl.zeros([BT, BT], gl.float32, scores)
    # of keys and values, or of keys, whose values are on their way
    await_copies(2 - PLACES)
    b_s = warpgroup_mma(placed_anew(sh_q), placed_anew(sh_k).permute((1, 0)), zeros, use_acc=False, is_async=True)
    i_next = tile_from_last(i + 1, count, far_sinks, hidden)
    if PLACES == 2:
        bring_keys(next_s, pointers, i_next, keys, i + 1 < count, s_kt, s_vt, PLACES)
    b_s = warpgroup_mma_wait(0, [b_s])
    if PLACES == 1:
        # a place is written again when every warp's product has read it
        barrier()
        begin_copy(sh_k, pointers[0], i_next * BT, keys, s_kt, i + 1 < count)
        async_copy.commit_group()
    if (i_k < full) | (i_k >= end):
        # a thread's columns are constants away from its first
        o_k = gl.arange(0, BT, gl.SliceLayout(0, scores))[None, :]
        distance = (o_q - i_k * BT)[:, None] - o_k % 8 - o_k // 8 * 8
        m_s = visible(distance, i_k * BT + o_k, keys, window, sinks, CAUSAL, WINDOW)
        b_s = gl.where(m_s, b_s, float("-inf"))
    if (i == 0) | (all_maxima == 1):
        b_m, b_shift, b_shrink = raise_greatest(b_s, b_m, scale)
        b_sums *= for_threads(b_shrink, zeros)
        b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, outputs))[:, None]
    b_p = gl.exp2(b_s * scale - b_shift[:, None])
    b_sums += thread_sums(b_p)
    b_left = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, outputs, 2))
    if PLACES == 1:
        await_copies(1)
    b_o = warpgroup_mma(b_left, placed_anew(sh_v), b_o, is_async=True)
    # what stands among the waited for is not overwritten before
    b_o, b_left = warpgroup_mma_wait(0, [b_o, b_left])
    if PLACES == 1:
        barrier()
        begin_copy(sh_v, pointers[1], i_next * BT, keys, s_vt, i + 1 < count)
        async_copy.commit_group()
    return i_next, (b_o, b_sums, b_m, b_shift)


@gluon.jit
def allocate_keys(dtype: gl.constexpr, BT: gl.constexpr, D: gl.constexpr):
    """Shared memory for a tile of keys and of values."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    return gl.allocate_shared_memory(dtype, [BT, D], shared), gl.allocate_shared_memory(dtype, [BT, D], shared)


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
        scores: gl.constexpr = product_layout(BT, gl.num_warps())
        sums: gl.constexpr = product_layout(D, gl.num_warps())
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
        # places that Triton tells apart: in a ring products and copies would wait for each other
        even_s = allocate_keys(dtype, BT, D)
        odd_s = even_s
        if PLACES == 2:
            odd_s = allocate_keys(dtype, BT, D)
        begin_copy(sh_q, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)

        o_m = gl.arange(0, BT, row)
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        b_o = gl.zeros([BT, D], gl.float32, sums)
        b_l = gl.zeros([BT], gl.float32, row)
        b_shift = gl.zeros([BT], gl.float32, row)
        # one round, and another one with maxima of all tiles where its sums ask for that
        rounds = count * 0 + 1
        all_maxima = count * 0
        if takes_all_maxima(dtype):
            all_maxima += 1
        while rounds == 1:
            i_k = tile_from_last(0, count, far_sinks, hidden)
            bring_keys(even_s, (p_k, p_v), i_k, keys, None, s_kt, s_vt, PLACES)
            span = (keys, far_sinks, hidden, full, end, count)
            given = (sh_q, (p_k, p_v), span, first + o_m, all_maxima, window, sinks, scale)
            sums_o = (
                gl.zeros([BT, D], gl.float32, sums),
                thread_sums(zeros),
                gl.full([BT], float("-inf"), gl.float32, row),
                gl.zeros([BT], gl.float32, row),
            )
            if PLACES == 2:
                for i in range(0, count - 1, 2):
                    i_k, sums_o = meet_keys(
                        i, i_k, sums_o, even_s, odd_s, given, s_kt, s_vt, CAUSAL, WINDOW, PLACES
                    )  # fmt: skip
                    i_k, sums_o = meet_keys(
                        i + 1, i_k, sums_o, odd_s, even_s, given, s_kt, s_vt, CAUSAL, WINDOW, PLACES
                    )  # fmt: skip
                if count % 2 == 1:
                    i_k, sums_o = meet_keys(
                        count - 1, i_k, sums_o, even_s, odd_s, given, s_kt, s_vt, CAUSAL, WINDOW, PLACES
                    )  # fmt: skip
            else:
                for i in range(count):
                    i_k, sums_o = meet_keys(
                        i, i_k, sums_o, even_s, odd_s, given, s_kt, s_vt, CAUSAL, WINDOW, PLACES
                    )  # fmt: skip
            b_o, b_sums, _, b_shift = sums_o
            b_l = gl.convert_layout(gl.sum(b_sums, 1), row)
            rounds = gl.where(bounded(b_l) | (all_maxima == 1), 0, 1)
            all_maxima = rounds
            # tiles are written again when every warp's products have read them
            await_copies(0)

        b_norm, b_lse = finish(b_shift, b_l)
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
