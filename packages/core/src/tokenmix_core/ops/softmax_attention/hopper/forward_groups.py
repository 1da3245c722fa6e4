"""The forward kernel for Hopper by groups of warps: two take 64 queries each, one brings the keys that they share.

The arithmetic is that of `hopper/forward.py`. A group's softmax runs beside its own product of the values before, and
beside the other group's products; copies wait for nobody but the readers of a place. Where a group has to begin again
the others do, too. Heads of 128.
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
from tokenmix_core.ops.softmax_attention.tiles import key_tiles, tile_from_last, tile_of_queries
from tokenmix_core.tile.hopper import (
    allocate_mbarriers,
    async_copy_rows,
    locate_chunk,
    mma_layout,
    store_rows,
    wait_full,
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

# tiles of keys that are in shared memory or on their way there
PLACES = gl.constexpr(2)
# keys that meet a program's queries at once
KEYS = 128


@gluon.jit
def one_more_round(verdict, told):
    """Tell whether a group asks for a second round, as soon as each has said so."""
    mbarrier.wait(told.index(0), 0)
    return gl.max(verdict.load(gl.BlockedLayout([1], [32], [4], [0])), 0) > 0


@gluon.jit
def bring_keys(n, pointers, tiles, barriers, span, s_kt: gl.constexpr, s_vt: gl.constexpr):
    """Bring each tile of keys and of values, behind n others, as soon as what was in its place has been read."""
    _, p_k, p_v = pointers
    _, k_s, v_s, _ = tiles
    _, keys_full, keys_empty, values_full, values_empty, _ = barriers
    _, keys, far_sinks, hidden, count = span
    BN: gl.constexpr = k_s.shape[1]
    for i in range(n, n + count):
        here = i % PLACES
        before = (i // PLACES + 1) & 1
        first = tile_from_last(i - n, count, far_sinks, hidden) * BN
        mbarrier.wait(keys_empty.index(here), before)
        async_copy_rows(k_s.index(here), p_k + first.to(gl.int64) * s_kt, s_kt, keys - first, 4)
        async_copy.mbarrier_arrive(keys_full.index(here), increment_count=False)
        mbarrier.wait(values_empty.index(here), before)
        async_copy_rows(v_s.index(here), p_v + first.to(gl.int64) * s_vt, s_vt, keys - first, 4)
        async_copy.mbarrier_arrive(values_full.index(here), increment_count=False)


@gluon.jit
def copy_keys(pointers, tiles, barriers, span, s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr):
    """Bring the queries, and what they meet, once or twice."""
    sh_q, _, _, verdict = tiles
    asked, _, _, _, _, told = barriers
    queries, _, _, _, count = span
    groups: gl.constexpr = sh_q.shape[0]
    for group in gl.static_range(groups):
        async_copy_rows(sh_q.index(group), pointers[0] + group * 64 * s_qt, s_qt, queries - group * 64, 4)
    async_copy.mbarrier_arrive(asked.index(0), increment_count=False)
    bring_keys(0, pointers, tiles, barriers, span, s_kt, s_vt)
    if not needs_running_max(sh_q.dtype):  # noqa: SIM102
        if one_more_round(verdict, told):
            bring_keys(count, pointers, tiles, barriers, span, s_kt, s_vt)


@gluon.jit
def mask_tile(b_s, i_k, o_q, bounds, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of a tile, −∞ where a query does not see a key."""
    keys, full, end, window, sinks = bounds
    BN: gl.constexpr = b_s.shape[1]
    if (i_k < full) | (i_k >= end):
        o_k = gl.arange(0, BN, gl.SliceLayout(0, mma_layout(BN, 4)))[None, :]
        distance = (o_q - i_k * BN)[:, None] - o_k
        m_s = visible(distance, i_k * BN + o_k, keys, window, sinks, CAUSAL, WINDOW)
        b_s = gl.where(m_s, b_s, float("-inf"))
    return b_s


@gluon.jit
def one_round(
    n, s_q, tiles, barriers, span, bounds, o_q, scale, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, EXACT: gl.constexpr
):
    """Sums of 64 queries over the tiles behind n others, relative to greatest scores, where `EXACT` of all tiles.

    Returns:
        outputs and, for each row, what was subtracted and the sum of weights.
    """
    _, k_s, v_s, _ = tiles
    _, keys_full, keys_empty, values_full, values_empty, _ = barriers
    _, _, far_sinks, hidden, count = span
    dtype: gl.constexpr = k_s.dtype
    BN: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    scores: gl.constexpr = mma_layout(BN, 4)
    sums: gl.constexpr = mma_layout(D, 4)
    row: gl.constexpr = gl.SliceLayout(1, scores)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    last = n + count - 1
    zeros = gl.zeros([64, BN], gl.float32, scores)
    b_o = gl.zeros([64, D], gl.float32, sums)
    wait_full(keys_full, n, last + 1, PLACES)
    fence_async_shared()
    b_s = warpgroup_mma(s_q, k_s.index(n % PLACES).permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, [b_s])
    mbarrier.arrive(keys_empty.index(n % PLACES))
    b_s = mask_tile(b_s, tile_from_last(0, count, far_sinks, hidden), o_q, bounds, CAUSAL, WINDOW)
    b_m, b_shift, b_shrink = update_row_max(b_s, gl.full([64], float("-inf"), gl.float32, row), scale)
    b_p = gl.exp2(b_s * scale - b_shift[:, None])
    b_sums = quad_row_sums(b_p)
    b_left = gl.convert_layout(b_p.to(dtype), left)
    wait_full(keys_full, n + 1, last + 1, PLACES)
    for i in range(n + 1, last + 1):
        here, before = i % PLACES, (i - 1) % PLACES
        fence_async_shared()
        b_s = warpgroup_mma(s_q, k_s.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # the values of the tile before, beside this tile's scores and softmax
        mbarrier.wait(values_full.index(before), ((i - 1) // PLACES) & 1)
        fence_async_shared()
        b_sum = warpgroup_mma(b_left, v_s.index(before), b_o, is_async=True)
        b_s = warpgroup_mma_wait(1, [b_s])
        mbarrier.arrive(keys_empty.index(here))
        b_s = mask_tile(b_s, tile_from_last(i - n, count, far_sinks, hidden), o_q, bounds, CAUSAL, WINDOW)
        if EXACT:
            b_m, b_shift, b_shrink = update_row_max(b_s, b_m, scale)
            b_sums *= expand_to_quads(b_shrink, zeros)
        b_p = gl.exp2(b_s * scale - b_shift[:, None])
        b_sums += quad_row_sums(b_p)
        b_weights = b_p.to(dtype)
        # this wait keeps the assembler from putting the next one before the softmax
        wait_full(keys_full, i + 1, last + 1, PLACES)
        b_o, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
        mbarrier.arrive(values_empty.index(before))
        if EXACT:
            b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, sums))[:, None]
        b_left = gl.convert_layout(b_weights, left)
    mbarrier.wait(values_full.index(last % PLACES), (last // PLACES) & 1)
    fence_async_shared()
    b_sum = warpgroup_mma(b_left, v_s.index(last % PLACES), b_o, is_async=True)
    b_o, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
    mbarrier.arrive(values_empty.index(last % PLACES))
    return b_o, b_shift, gl.convert_layout(gl.sum(b_sums, 1), row)


@gluon.jit
def attend(
    pointers, tiles, barriers, span, bounds, position, scale, GROUP: gl.constexpr, s_ot: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Outputs and log-sum-exps of 64 queries, those of a group of the program's tile."""
    p_o, p_lse = pointers
    sh_q, k_s, _, verdict = tiles
    asked, _, _, _, _, told = barriers
    queries, _, _, _, count = span
    dtype: gl.constexpr = k_s.dtype
    D: gl.constexpr = k_s.shape[2]
    sums: gl.constexpr = mma_layout(D, 4)
    row: gl.constexpr = gl.SliceLayout(1, mma_layout(k_s.shape[1], 4))
    s_q = sh_q.index(GROUP)
    FIRST: gl.constexpr = GROUP * 64
    o_m = FIRST + gl.arange(0, 64, row)
    o_q = position + o_m
    mbarrier.wait(asked.index(0), 0)
    b_o, b_shift, b_l = one_round(
        0, s_q, tiles, barriers, span, bounds, o_q, scale, CAUSAL, WINDOW, EXACT=needs_running_max(dtype)
    )
    if not needs_running_max(dtype):
        asks = gl.where(sums_in_range(b_l), 0, 1)
        verdict.slice(GROUP * 32, 32).store(gl.full([32], asks, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        mbarrier.arrive(told.index(0))
        if one_more_round(verdict, told):
            b_o, b_shift, b_l = one_round(
                count, s_q, tiles, barriers, span, bounds, o_q, scale, CAUSAL, WINDOW, EXACT=True
            )

    b_norm, b_lse = finalize(b_shift, b_l)
    gl.store(p_lse + o_m, b_lse, mask=o_m < queries)
    # through shared memory, in the place of this group's queries, so that a thread stores 16 bytes at once
    s_q.store((b_o * gl.convert_layout(b_norm, gl.SliceLayout(1, sums))[:, None]).to(dtype))
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
        allocate_mbarriers(1, 128),
        allocate_mbarriers(places, 128),
        allocate_mbarriers(places, groups),
        allocate_mbarriers(places, 128),
        allocate_mbarriers(places, groups),
        allocate_mbarriers(1, groups),
    )
    o_first = i_b * TQ + start + i_t * BM
    inputs = (
        q + i_b * s_qb + (start + i_t * BM) * s_qt + i_h * s_qh,
        k + i_b * s_kb + start * s_kt + i_hk * s_kh,
        v + i_b * s_vb + start * s_vt + i_hk * s_vh,
    )
    outputs = (o + (o_first * HQ + i_h) * D, lse + (i_b * HQ + i_h) * TQ + start + i_t * BM)
    verdict = gl.allocate_shared_memory(gl.int32, [groups * 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory = (sh_q, k_s, v_s, verdict)
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
