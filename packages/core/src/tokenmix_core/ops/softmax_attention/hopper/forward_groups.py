"""The forward kernel for Hopper by groups of warps: two take 64 queries each, one brings the keys that they share.

The arithmetic is that of `forward.py`. A group's softmax runs beside its own product of the values before, and beside
the other group's products; copies wait for nobody but the readers of a place. Heads of 128.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import sizes, strides
from tokenmix_core.ops.softmax_attention.hopper import ROWS, constants
from tokenmix_core.ops.softmax_attention.tiles import key_tiles, tile_of_queries
from tokenmix_core.tile.hopper import (
    allocate_barriers,
    await_tile,
    fetch_rows,
    locate_chunk,
    product_layout,
    store_rows,
)
from tokenmix_core.tile.masks import visible

# tiles of keys that are in shared memory or on their way there
PLACES = gl.constexpr(2)
# keys that meet a program's queries at once
KEYS = 128


@gluon.jit
def copy_keys(pointers, tiles, barriers, span, s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr):
    """Bring the queries, then each tile of keys and of values as soon as the one that was there has been read."""
    p_q, p_k, p_v = pointers
    sh_q, k_s, v_s = tiles
    asked, keys_full, keys_empty, values_full, values_empty = barriers
    queries, keys, far_sinks, hidden, count = span
    BN: gl.constexpr = k_s.shape[1]
    groups: gl.constexpr = sh_q.shape[0]
    for i in gl.static_range(groups):
        fetch_rows(sh_q.index(i), p_q + i * 64 * s_qt, s_qt, queries - i * 64, 4)
    async_copy.mbarrier_arrive(asked.index(0), increment_count=False)
    for i in range(count):
        here = i % PLACES
        before = (i // PLACES + 1) & 1
        first = (i + gl.where(i < far_sinks, 0, hidden)) * BN
        mbarrier.wait(keys_empty.index(here), before)
        fetch_rows(k_s.index(here), p_k + first.to(gl.int64) * s_kt, s_kt, keys - first, 4)
        async_copy.mbarrier_arrive(keys_full.index(here), increment_count=False)
        mbarrier.wait(values_empty.index(here), before)
        fetch_rows(v_s.index(here), p_v + first.to(gl.int64) * s_vt, s_vt, keys - first, 4)
        async_copy.mbarrier_arrive(values_full.index(here), increment_count=False)


@gluon.jit
def soften(b_s, b_m, b_l, i_k, o_q, bounds, scale, dtype: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Weights of a tile's keys, unnormalised, by what the sums so far shrink, and greatest scores and sums with it."""
    keys, full, end, window, sinks = bounds
    BN: gl.constexpr = b_s.shape[1]
    if (i_k < full) | (i_k >= end):
        o_k = i_k * BN + gl.arange(0, BN, gl.SliceLayout(0, product_layout(BN, 4)))
        m_s = visible(o_q[:, None], o_k[None, :], keys, window, sinks, CAUSAL, WINDOW)
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_top = gl.maximum(b_m, gl.max(b_s, 1))
    # −∞ while nothing was seen
    b_max = gl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = gl.exp2(b_s * scale - (b_max * scale)[:, None])
    # the difference first: exactly 1 where the maximum stays
    b_shrink = gl.exp2((b_m - b_max) * scale)
    return b_p.to(dtype), b_shrink, b_top, b_l * b_shrink + gl.sum(b_p, 1)


@gluon.jit
def attend(
    pointers, tiles, barriers, span, bounds, position, scale, GROUP: gl.constexpr, s_ot: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of 64 queries, those of a group of the program's tile."""
    p_o, p_lse = pointers
    sh_q, k_s, v_s = tiles
    asked, keys_full, keys_empty, values_full, values_empty = barriers
    queries, _, far_sinks, hidden, count = span
    dtype: gl.constexpr = k_s.dtype
    BN: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    scores: gl.constexpr = product_layout(BN, 4)
    sums: gl.constexpr = product_layout(D, 4)
    row: gl.constexpr = gl.SliceLayout(1, scores)
    row_o: gl.constexpr = gl.SliceLayout(1, sums)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    s_q = sh_q.index(GROUP)
    FIRST: gl.constexpr = GROUP * 64
    o_m = FIRST + gl.arange(0, 64, row)
    o_q = position + o_m
    b_o = gl.zeros([64, D], gl.float32, sums)
    b_m = gl.full([64], float("-inf"), gl.float32, row)
    b_l = gl.zeros([64], gl.float32, row)
    zeros = gl.zeros([64, BN], gl.float32, scores)
    mbarrier.wait(asked.index(0), 0)
    mbarrier.wait(keys_full.index(0), 0)
    fence_async_shared()
    b_s = warpgroup_mma(s_q, k_s.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, [b_s])
    mbarrier.arrive(keys_empty.index(0))
    i_k = gl.where(far_sinks > 0, 0, hidden)
    b_p, _, b_m, b_l = soften(b_s, b_m, b_l, i_k, o_q, bounds, scale, dtype, CAUSAL, WINDOW)
    b_left = gl.convert_layout(b_p, left)
    await_tile(keys_full, 1, count, PLACES)
    for i in range(1, count):
        here, before = i % PLACES, (i - 1) % PLACES
        fence_async_shared()
        b_s = warpgroup_mma(s_q, k_s.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # the values of the tile before, beside this tile's scores and softmax
        mbarrier.wait(values_full.index(before), ((i - 1) // PLACES) & 1)
        fence_async_shared()
        b_sum = warpgroup_mma(b_left, v_s.index(before), b_o, is_async=True)
        b_s = warpgroup_mma_wait(1, [b_s])
        mbarrier.arrive(keys_empty.index(here))
        i_k = i + gl.where(i < far_sinks, 0, hidden)
        b_p, b_shrink, b_m, b_l = soften(b_s, b_m, b_l, i_k, o_q, bounds, scale, dtype, CAUSAL, WINDOW)
        # this wait keeps the assembler from putting the next one before the softmax
        await_tile(keys_full, i + 1, count, PLACES)
        b_o, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
        mbarrier.arrive(values_empty.index(before))
        b_o = b_o * gl.convert_layout(b_shrink, row_o)[:, None]
        b_left = gl.convert_layout(b_p, left)
    before = (count - 1) % PLACES
    mbarrier.wait(values_full.index(before), ((count - 1) // PLACES) & 1)
    fence_async_shared()
    b_sum = warpgroup_mma(b_left, v_s.index(before), b_o, is_async=True)
    b_o, b_left = warpgroup_mma_wait(0, [b_sum, b_left])

    blind = b_l == 0.0
    b_l = gl.where(blind, 1.0, b_l)
    b_lse = gl.where(blind, float("-inf"), (b_m * scale + gl.log2(b_l)) * 0.6931471805599453)
    gl.store(p_lse + o_m, b_lse, mask=o_m < queries)
    b_norm = gl.convert_layout(1.0 / b_l, row_o)
    # through shared memory, in the place of this group's queries, so that a thread stores 16 bytes at once
    s_q.store((b_o * b_norm[:, None]).to(dtype))
    store_rows(p_o + FIRST * s_ot, s_q, s_ot, queries - FIRST, 4)


@cached_launch
@gluon.jit
def _forward(
    q, k, v, o, lse, cu_seqlens, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, HQ: gl.constexpr, H: gl.constexpr, N,
    tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A tile of BM queries and a head a program."""
    i_b, i_h, i_hk, i_t = tile_of_queries(tiles, HQ, H)
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        _, start, queries, first_row = locate_chunk(i_t, TQ, BM, N, cu_seqlens, PACKED, 4)
        i_t = first_row // BM
        keys = queries
    if i_t * BM >= queries:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    groups: gl.constexpr = BM // 64
    places: gl.constexpr = PLACES
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    first = i_t * BM + keys - queries
    last = gl.minimum(first + BM, keys) - 1
    far_sinks, near, full, end, stop = key_tiles(first, last, keys, window, sinks, BN, CAUSAL, WINDOW)
    # between the sinks' tiles and the window's
    hidden = near - far_sinks
    # who sees nothing meets a tile, too
    count = gl.maximum(far_sinks + stop - near, 1)
    sh_q = gl.allocate_shared_memory(dtype, [groups, 64, D], shared)
    k_s = gl.allocate_shared_memory(dtype, [places, BN, D], shared)
    v_s = gl.allocate_shared_memory(dtype, [places, BN, D], shared)
    # each of 128 threads tells of its copies, each group of what it has read
    barriers = (
        allocate_barriers(1, 128),
        allocate_barriers(places, 128),
        allocate_barriers(places, groups),
        allocate_barriers(places, 128),
        allocate_barriers(places, groups),
    )
    o_first = i_b * TQ + start + i_t * BM
    inputs = (
        q + i_b * s_qb + (start + i_t * BM) * s_qt + i_h * s_qh,
        k + i_b * s_kb + start * s_kt + i_hk * s_kh,
        v + i_b * s_vb + start * s_vt + i_hk * s_vh,
    )
    outputs = (o + (o_first * HQ + i_h) * D, lse + (i_b * HQ + i_h) * TQ + start + i_t * BM)
    memory = (sh_q, k_s, v_s)
    span = (queries - i_t * BM, keys, far_sinks, hidden, count)
    bounds = (keys, full, end, window, sinks)
    s_ot: gl.constexpr = HQ * D
    gl.warp_specialize(
        [
            (attend, (outputs, memory, barriers, span, bounds, first, scale, 0, s_ot, CAUSAL, WINDOW)),
            (attend, (outputs, memory, barriers, span, bounds, first, scale, 1, s_ot, CAUSAL, WINDOW)),
            (copy_keys, (inputs, memory, barriers, span, s_qt, s_kt, s_vt)),
        ],
        [4, 4], [216, 72],
    )  # fmt: skip


def forward(q, k, v, o, lse, cu_seqlens, mask, scale) -> None:
    """Write o and the log-sum-exp."""
    B, TQ, HQ, _ = q.shape
    tiles = chunk_slots(1, TQ, ROWS, cu_seqlens)
    _forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, cu_seqlens=cu_seqlens, **strides(q=q, k=k, v=v), **sizes(q, k, cu_seqlens, mask),
        tiles=tiles, scale=scale * math.log2(math.e), BM=ROWS, BN=KEYS, **constants(q, cu_seqlens, mask),
    )  # fmt: skip
