"""Warp-specialised forward attention on Hopper: heads of 128, long sequences, 128 queries per CTA.

    warpgroup  0, 1 consumers: 64 queries each          2 producer: cp.async of Q, K and V
    smem       Q [2, 64, D]; K, V [NUM_STAGES, BN, D]; per stage a full and an empty mbarrier for K and for V
    producer   for each KV tile, last to first:  wait K empty, copy K, arrive K full;  the same for V
    consumer   S_0 = Q K_0ᵀ; P_0 = exp2(S_0 − shift)
               for i = 1, 2, …:   S_i = Q K_iᵀ and O += P_{i−1} V_{i−1} in flight together (WGMMA)
                                  wait S_i → arrive K empty; mask; P_i = exp2(S_i − shift)
                                  wait O   → arrive V empty
               O += P V of the last tile; O / l → smem → global; lse
    A consumer whose sums leave the safe range asks all warpgroups for a second pass with a running maximum.

The arithmetic is that of `hopper/forward.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

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
from tokenmix_core.kernels.gluon import hopper, online_softmax
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.masks import visible
from tokenmix_core.ops.softmax_attention.hopper import ROWS, constants
from tokenmix_core.ops.softmax_attention.hopper.query_tile import locate_query_tile
from tokenmix_core.ops.softmax_attention.kv_tiles import key_tiles, tile_from_last, tile_of_queries
from tokenmix_core.ops.softmax_attention.launch_args import sizes, strides
from tokenmix_core.ops.softmax_attention.steps import Rows

NUM_STAGES = gl.constexpr(2)
# keys of a KV tile
KEYS = 128


class Buffers(NamedTuple):
    """Shared memory: Q of each consumer, the stages of K and V, and each consumer's request for a second pass."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    requests: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """mbarriers: Q is loaded; a stage of K or V is full or empty; consumers `decided` whether a second pass follows."""

    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    decided: gl.shared_memory_descriptor


class Span(NamedTuple):
    """The queries of a CTA, and the KV tiles that it visits.

    Attributes:
        queries: number of queries from the tile's first one to the end of the sequence.
        keys: number of keys of the sequence.
        sink_tiles: number of KV tiles that are visited only for their sinks.
        gap: number of skipped KV tiles between the tiles of the sinks and the tiles of the window.
        count: number of KV tiles to visit.
        full_min: first KV tile that needs no mask.
        full_max: first masked KV tile after the unmasked ones.
        window: number of keys of the window.
        sinks: number of sinks, or None.
    """

    queries: gl.tensor
    keys: gl.tensor
    sink_tiles: gl.tensor
    gap: gl.tensor
    count: gl.tensor
    full_min: gl.tensor
    full_max: gl.tensor
    window: gl.tensor
    sinks: gl.tensor


@gluon.jit
def wants_second_pass(requests, decided):
    """Wait until all consumers have decided; return True if one of them requests a second pass."""
    mbarrier.wait(decided.index(0), 0)
    return gl.max(requests.load(gl.BlockedLayout([1], [32], [4], [0])), 0) > 0


@gluon.jit
def produce_keys(n, k: Rows, v: Rows, buffers: Buffers, barriers: Barriers, span: Span):
    """Copy all K and V tiles, each as soon as its stage is empty; n: number of tiles copied in an earlier pass."""
    BN: gl.constexpr = buffers.k.shape[1]
    for i in range(n, n + span.count):
        stage = i % NUM_STAGES
        empty = hopper.parity(i, NUM_STAGES) ^ 1
        first = tile_from_last(i - n, span.count, span.sink_tiles, span.gap) * BN
        mbarrier.wait(barriers.k_empty.index(stage), empty)
        hopper.async_copy_rows(
            buffers.k.index(stage), k.pointer + first.to(gl.int64) * k.stride, k.stride, span.keys - first, 4
        )
        async_copy.mbarrier_arrive(barriers.k_full.index(stage), increment_count=False)
        mbarrier.wait(barriers.v_empty.index(stage), empty)
        hopper.async_copy_rows(
            buffers.v.index(stage), v.pointer + first.to(gl.int64) * v.stride, v.stride, span.keys - first, 4
        )
        async_copy.mbarrier_arrive(barriers.v_full.index(stage), increment_count=False)


@gluon.jit
def producer(q: Rows, k: Rows, v: Rows, buffers: Buffers, barriers: Barriers, span: Span):
    """Copy Q once, then all tiles of K and V, twice if there is a second pass over the keys."""
    consumers: gl.constexpr = buffers.q.shape[0]
    for i in gl.static_range(consumers):
        hopper.async_copy_rows(buffers.q.index(i), q.pointer + i * 64 * q.stride, q.stride, span.queries - i * 64, 4)
    async_copy.mbarrier_arrive(barriers.q_full.index(0), increment_count=False)
    produce_keys(0, k, v, buffers, barriers, span)
    if not online_softmax.needs_running_max(buffers.q.dtype):  # noqa: SIM102
        if wants_second_pass(buffers.requests, barriers.decided):
            produce_keys(span.count, k, v, buffers, barriers, span)


@gluon.jit
def mask_tile(b_s, i_k, o_q, span: Span, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Set the scores of KV tile `i_k` to −∞ where a query does not see a key."""
    BN: gl.constexpr = b_s.shape[1]
    if (i_k < span.full_min) | (i_k >= span.full_max):
        o_k = gl.arange(0, BN, gl.SliceLayout(0, hopper.mma_layout(BN, 4)))[None, :]
        distance = (o_q - i_k * BN)[:, None] - o_k
        m_s = visible(distance, i_k * BN + o_k, span.keys, span.window, span.sinks, CAUSAL, WINDOW)
        b_s = gl.where(m_s, b_s, float("-inf"))
    return b_s


@gluon.jit
def attention_pass(
    n, q_s, buffers: Buffers, barriers: Barriers, span: Span, o_q, scale, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    RUNNING_MAX: gl.constexpr,
):  # fmt: skip
    """Compute attention of 64 queries to all KV tiles; n is the number of tiles visited in an earlier pass.

    The shift is subtracted from a row's scores: their running maximum if RUNNING_MAX, else the maximum over the first
    tile.

    Returns:
        the unnormalised output and, for each row, the shift and the sum of weights.
    """
    k_s, v_s = buffers.k, buffers.v
    _, k_full, k_empty, v_full, v_empty, _ = barriers
    _, _, sink_tiles, gap, count, _, _, _, _ = span
    dtype: gl.constexpr = k_s.dtype
    BN: gl.constexpr = k_s.shape[1]
    D: gl.constexpr = k_s.shape[2]
    scores: gl.constexpr = hopper.mma_layout(BN, 4)
    sums: gl.constexpr = hopper.mma_layout(D, 4)
    row: gl.constexpr = gl.SliceLayout(1, scores)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    last = n + count - 1
    zeros = gl.zeros([64, BN], gl.float32, scores)
    b_o = gl.zeros([64, D], gl.float32, sums)
    hopper.wait_full(k_full, n, last + 1, NUM_STAGES)
    fence_async_shared()
    b_s = warpgroup_mma(q_s, k_s.index(n % NUM_STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, [b_s])
    mbarrier.arrive(k_empty.index(n % NUM_STAGES))
    b_s = mask_tile(b_s, tile_from_last(0, count, sink_tiles, gap), o_q, span, CAUSAL, WINDOW)
    b_m, b_shift, b_shrink = online_softmax.update_row_max(b_s, gl.full([64], float("-inf"), gl.float32, row), scale)
    b_p = gl.exp2(b_s * scale - b_shift[:, None])
    b_sums = online_softmax.quad_row_sums(b_p)
    b_left = gl.convert_layout(b_p.to(dtype), left)
    hopper.wait_full(k_full, n + 1, last + 1, NUM_STAGES)
    for i in range(n + 1, last + 1):
        stage, previous = i % NUM_STAGES, (i - 1) % NUM_STAGES
        fence_async_shared()
        b_s = warpgroup_mma(q_s, k_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        # start P V of the previous tile, so that it overlaps with S and the softmax of this tile
        mbarrier.wait(v_full.index(previous), hopper.parity(i - 1, NUM_STAGES))
        fence_async_shared()
        b_sum = warpgroup_mma(b_left, v_s.index(previous), b_o, is_async=True)
        b_s = warpgroup_mma_wait(1, [b_s])
        mbarrier.arrive(k_empty.index(stage))
        b_s = mask_tile(b_s, tile_from_last(i - n, count, sink_tiles, gap), o_q, span, CAUSAL, WINDOW)
        if RUNNING_MAX:
            b_m, b_shift, b_shrink = online_softmax.update_row_max(b_s, b_m, scale)
            b_sums *= online_softmax.expand_to_quads(b_shrink, zeros)
        b_p = gl.exp2(b_s * scale - b_shift[:, None])
        b_sums += online_softmax.quad_row_sums(b_p)
        b_weights = b_p.to(dtype)
        # this wait for the next K tile stops ptxas from moving the wait for P V above the softmax
        hopper.wait_full(k_full, i + 1, last + 1, NUM_STAGES)
        b_o, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
        mbarrier.arrive(v_empty.index(previous))
        if RUNNING_MAX:
            b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, sums))[:, None]
        b_left = gl.convert_layout(b_weights, left)
    mbarrier.wait(v_full.index(last % NUM_STAGES), hopper.parity(last, NUM_STAGES))
    fence_async_shared()
    b_sum = warpgroup_mma(b_left, v_s.index(last % NUM_STAGES), b_o, is_async=True)
    b_o, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
    mbarrier.arrive(v_empty.index(last % NUM_STAGES))
    return b_o, b_shift, gl.convert_layout(gl.sum(b_sums, 1), row)


@gluon.jit
def consumer(
    o: Rows, p_lse, buffers: Buffers, barriers: Barriers, span: Span, position, scale, CONSUMER: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Compute and store O and lse of one consumer's 64 queries, from `position` + 64 · CONSUMER on."""
    dtype: gl.constexpr = buffers.k.dtype
    D: gl.constexpr = buffers.k.shape[2]
    sums: gl.constexpr = hopper.mma_layout(D, 4)
    row: gl.constexpr = gl.SliceLayout(1, hopper.mma_layout(buffers.k.shape[1], 4))
    q_s = buffers.q.index(CONSUMER)
    FIRST: gl.constexpr = CONSUMER * 64
    o_m = FIRST + gl.arange(0, 64, row)
    o_q = position + o_m
    mbarrier.wait(barriers.q_full.index(0), 0)
    b_o, b_shift, b_l = attention_pass(
        0, q_s, buffers, barriers, span, o_q, scale, CAUSAL, WINDOW, RUNNING_MAX=online_softmax.needs_running_max(dtype)
    )
    if not online_softmax.needs_running_max(dtype):
        request = gl.where(online_softmax.sums_in_range(b_l), 0, 1)
        line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        buffers.requests.slice(CONSUMER * 32, 32).store(gl.full([32], request, gl.int32, line))
        mbarrier.arrive(barriers.decided.index(0))
        if wants_second_pass(buffers.requests, barriers.decided):
            b_o, b_shift, b_l = attention_pass(
                span.count, q_s, buffers, barriers, span, o_q, scale, CAUSAL, WINDOW, RUNNING_MAX=True
            )

    b_norm, b_lse = online_softmax.finalize(b_shift, b_l)
    gl.store(p_lse + o_m, b_lse, mask=o_m < span.queries)
    # O passes through this consumer's Q buffer, so that a thread stores 16 bytes at once
    q_s.store((b_o * gl.convert_layout(b_norm, gl.SliceLayout(1, sums))[:, None]).to(dtype))
    hopper.store_rows(o.pointer + FIRST * o.stride, q_s, o.stride, span.queries - FIRST, 4)


@cached_launch
@gluon.jit
def _forward(
    q, k, v, o, lse, cu_seqlens, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, TQ, TK, HQ: gl.constexpr, H: gl.constexpr, N,
    tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute O and lse of BM queries of one head per program."""
    tile = locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BM, PACKED)
    i_b, i_h, i_hk, _, i_t, _, start, queries, keys = tile
    if i_t * BM >= queries:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    consumers: gl.constexpr = BM // 64
    stages: gl.constexpr = NUM_STAGES
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    first = i_t * BM + keys - queries
    last = gl.minimum(first + BM, keys) - 1
    sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BN, CAUSAL, WINDOW)
    # visit at least one tile, so that queries without visible keys visit a tile in which all scores are masked
    count = gl.maximum(sink_tiles + n_max - n_min, 1)
    q_s = gl.allocate_shared_memory(dtype, [consumers, 64, D], shared)
    k_s = gl.allocate_shared_memory(dtype, [stages, BN, D], shared)
    v_s = gl.allocate_shared_memory(dtype, [stages, BN, D], shared)
    # arrival counts: the producer's 128 threads at full barriers, one arrival per consumer at empty barriers
    barriers = Barriers(
        hopper.allocate_mbarriers(1, 128),
        hopper.allocate_mbarriers(stages, 128),
        hopper.allocate_mbarriers(stages, consumers),
        hopper.allocate_mbarriers(stages, 128),
        hopper.allocate_mbarriers(stages, consumers),
        hopper.allocate_mbarriers(1, consumers),
    )
    o_first = i_b * TQ + start + i_t * BM
    q_rows = Rows(q + i_b * s_qb + (start + i_t * BM) * s_qt + i_h * s_qh, s_qt)
    k_rows = Rows(k + i_b * s_kb + start * s_kt + i_hk * s_kh, s_kt)
    v_rows = Rows(v + i_b * s_vb + start * s_vt + i_hk * s_vh, s_vt)
    s_ot: gl.constexpr = HQ * D
    o_rows = Rows(o + (o_first * HQ + i_h) * D, s_ot)
    p_lse = lse + (i_b * HQ + i_h) * TQ + start + i_t * BM
    requests = gl.allocate_shared_memory(gl.int32, [consumers * 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = Buffers(q_s, k_s, v_s, requests)
    gap = n_min - sink_tiles
    span = Span(queries - i_t * BM, keys, sink_tiles, gap, count, full_min, full_max, window, sinks)
    gl.warp_specialize(
        [
            (consumer, (o_rows, p_lse, buffers, barriers, span, first, scale, 0, CAUSAL, WINDOW)),
            (consumer, (o_rows, p_lse, buffers, barriers, span, first, scale, 1, CAUSAL, WINDOW)),
            (producer, (q_rows, k_rows, v_rows, buffers, barriers, span)),
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
