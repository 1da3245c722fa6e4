"""Kernels that select blocks: sum the probabilities over the heads of a group, then select the most probable blocks.

Each query always selects the first block, its own block and the one before its own; these are at the ends of a list.
The other selected blocks, at most `count` − 3, come from the **candidates**: blocks 1 … own − 2.

The kernels share an int32 buffer in which _QUERIES queries are interleaved. It has for each query the probabilities of
W blocks, then the S best blocks so far, then these blocks' probabilities. Probabilities are stored as the bits of a
float32, which sort like the values.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels import LOG2_E, cached_launch
from tokenmix_core.ops import block_size as width
from tokenmix_core.ops import dense_rows, load_tile, precision, strides
from tokenmix_lte.ops.selected_blocks.lists import sequence_of
from tokenmix_lte.ops.selected_blocks.plan import runs

# number of blocks in a tile of scores
_BLOCKS = 64
# rows (one head and query each) of a tile of scores, and number of warps, by bytes per element
_TILES = {2: (128, 4), 4: (32, 8)}
# number of queries whose probabilities for the same block are adjacent in memory
_QUERIES = tl.constexpr(8)
# number of probabilities that a warp holds at a time, and how many of them belong to one query
_WARP_ELEMENTS, _QUERY_ELEMENTS = 1024, 128
# limit of registers per thread: more programs then fit on an SM
_MAX_REGISTERS = 128
# first step of the search down from the greatest probability, in float32 bits: one eighth of a power of two
_FIRST_STEP = tl.constexpr(1 << 20)


@triton.jit
def _own_blocks(o_t, N, cu_seqlens, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return each query's own block in its sequence, and the index of the sequence's first block among all blocks."""
    if PACKED:
        b_n = sequence_of(o_t, N, cu_seqlens)
        b_begin = tl.load(cu_seqlens + b_n).to(tl.int32)
        b_own = (o_t - b_begin) // BLOCK
        b_slot = b_begin // BLOCK + b_n
    else:
        b_own = o_t // BLOCK
        b_slot = tl.zeros_like(b_own)
    return b_own, b_slot


@triton.jit
def _query_pointers(x, i_bh, t, T, W, BQ: tl.constexpr):
    """Return pointers to each of BQ queries' first element in x; the elements of a query have the stride _QUERIES."""
    if BQ > _QUERIES:
        o_q = t + tl.arange(0, BQ)
        o_tile, o_q = o_q // _QUERIES, o_q % _QUERIES
    else:
        o_tile, o_q = t // _QUERIES, t % _QUERIES + tl.arange(0, BQ)
    return x + (i_bh * tl.cdiv(T, _QUERIES) + o_tile) * W * _QUERIES + o_q


@cached_launch
@triton.jit
def _score_blocks(
    q, pooled, lse, attention, cu_seqlens, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_lb, s_lt, s_lh, T, U, H, N, W,
    tiles, parts, part, first, scale,
    G: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities of up to `part` blocks, none behind the last candidate, for BQ queries of one key head.

    Columns of a tile are GROUP heads × BQ queries, so that a thread holds all heads of the elements that it sums.
    """
    i_x = tl.program_id(0) // parts
    i_bh = (i_x // tiles).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    # start with the last queries, which have the most candidates: this shortens the tail of the kernel
    t = (tiles - 1 - i_x % tiles) * BQ
    o_q = t + tl.arange(0, BQ)
    b_own, b_slot = _own_blocks(first + tl.minimum(o_q, T - 1), N, cu_seqlens, BLOCK, PACKED)
    begin = tl.min(b_slot, 0) + tl.program_id(0) % parts * part
    end = tl.minimum(begin + part, tl.max(b_slot + b_own, 0) - 1)
    if begin < end:
        o_r = tl.arange(0, BQ * GROUP)
        o_t = t + o_r % BQ
        o_g = o_r // BQ
        m_r = (o_t < T) & (o_g < G)
        o_d = tl.arange(0, BK)
        p_q = q + i_b * s_qb + i_h * G * s_qh + o_t.to(tl.int64) * s_qt + o_g * s_qh
        b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < K)[None, :], other=0.0)
        p_lse = lse + i_b * s_lb + o_t.to(tl.int64) * s_lt + (i_h * G + o_g) * s_lh
        # lse = ∞ gives invalid rows a weight of 0
        b_lse = tl.load(p_lse, mask=m_r, other=float("inf")) * LOG2_E
        p_a = _query_pointers(attention, i_bh, t, T, W + 2 * S, BQ)
        for i in range(begin, end, BC):
            b_k = load_tile(pooled + i_b * s_kb + i_h * s_kh, i, U, s_kt, K, BC, BK, True)
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
            # this sum may overflow for blocks that a query does not see
            b_p = tl.sum(tl.reshape(tl.exp2(b_s - b_lse[None, :]), [BC, GROUP, BQ]), 1)
            b_p = tl.where(b_p < float("inf"), b_p, float("inf")).to(tl.int32, bitcast=True)
            o_c = i + tl.arange(0, BC)[:, None] - b_slot[None, :]
            m_p = (o_q < T)[None, :]
            if PACKED:
                m_p &= (o_c >= 0) & (o_c < W)
            tl.store(p_a[None, :] + o_c * _QUERIES, b_p, mask=m_p)


@triton.jit
def _greatest(b_x, b_count, b_need):
    """Find for each query a bound that at least `b_need` elements reach; return it and the number of these elements.

    If possible, exactly `b_need` elements reach the bound. If equal elements make this impossible, it is the greatest
    bound that at least `b_need` elements reach.

    Args:
        b_x: elements `[BQ, BW]`, at least 0, or −1 where there is none.
        b_count: number of elements that are not −1, `[BQ]`.
        b_need: at most `b_count`, `[BQ]`.
    """
    # binary search with the invariant that at least `b_need` elements reach `b_low`, and fewer reach `b_high`
    b_high = tl.max(b_x, 1) + 1
    b_low = tl.where(b_need > 0, 0, b_high)
    b_reach = tl.where(b_need > 0, b_count, 0)
    step = tl.full([], _FIRST_STEP, tl.int32)
    while tl.max(((b_reach > b_need) & (b_high - b_low > 1)).to(tl.int32), 0) > 0:
        b_mid = tl.maximum(b_low + (b_high - b_low) // 2, b_high - step)
        # counting sign bits takes fewer instructions than counting comparisons
        b_n = b_x.shape[1] + tl.sum((b_x - b_mid[:, None]) >> 31, 1)
        m_n = b_n >= b_need
        b_low = tl.where(m_n, b_mid, b_low)
        b_reach = tl.where(m_n, b_n, b_reach)
        b_high = tl.where(m_n, b_high, b_mid)
        step = tl.minimum(step, 1 << 29) * 2
    return b_low, b_reach


@cached_launch
@triton.jit
def _select_blocks(
    attention, blocks, cu_seqlens, s_b, T, H, N, W, tiles, first, count,
    BQ: tl.constexpr, BW: tl.constexpr, S: tl.constexpr, CARRIED: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write the lists of BQ queries of a key head: the candidates with the most attention, and the three fixed blocks.

    BW candidates are searched at a time; if there are more (CARRIED), the S best so far are searched with the next
    ones. A program is one warp, of whose lanes 32 / BQ hold one query.
    """
    L: tl.constexpr = 32 // BQ
    NEW: tl.constexpr = BW - S if CARRIED else BW
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    t = (tiles - 1 - tl.program_id(0) % tiles) * BQ
    o_q = t + tl.arange(0, BQ)
    m_q = o_q < T
    o_q = tl.minimum(o_q, T - 1)
    b_own, _ = _own_blocks(first + o_q, N, cu_seqlens, BLOCK, PACKED)
    # invalid rows get no candidates
    b_all = tl.where(m_q, tl.maximum(b_own - 2, 0), 0)
    b_most = tl.minimum(b_all, count - 3)
    p_a = _query_pointers(attention, i_bh, t, T, W + 2 * S, BQ)[:, None]
    p_b = p_a + W * _QUERIES
    o_w = tl.arange(0, BW)[None, :]
    for i in range(0, tl.max(b_all, 0), NEW):
        # number of candidates before this iteration and after it, and how many of them are to be selected
        b_before = tl.minimum(i, b_all)
        b_after = tl.minimum(i + NEW, b_all)
        b_found = tl.minimum(b_before, b_most)
        b_need = tl.minimum(b_after, b_most)
        o_c = 1 + i + o_w - (BW - NEW)
        m_c = o_c <= b_all[:, None]
        o_x = o_c
        if CARRIED:
            tl.debug_barrier()
            m_best = o_w < b_found[:, None]
            # `o_w < S` follows from `m_best`, but lets the compiler drop loads
            b_c = tl.load(p_b + o_w * _QUERIES, mask=m_best & (o_w < S), other=0)
            o_c = tl.where(o_w < S, b_c, o_c)
            m_c = tl.where(o_w < S, m_best, m_c)
            o_x = tl.where(o_w < S, W + S + o_w, o_x)
        b_x = tl.load(p_a + o_x * _QUERIES, mask=m_c, other=-1)
        b_bound, b_reach = _greatest(b_x, b_found + b_after - b_before, b_need)
        b_bound = b_bound[:, None]
        if tl.max(b_reach - b_need, 0) > 0:
            # of several blocks whose probability equals the bound, select the lower blocks
            b_above = tl.sum((b_x > b_bound).to(tl.int32), 1)
            b_first = tl.where(b_x == b_bound, W - o_c, -1)
            b_last, _ = _greatest(b_first, b_reach - b_above, b_need - b_above)
            b_x = tl.where((b_first >= 0) & (b_first < b_last[:, None]), -1, b_x)
        # compact the list: a lane stores its selected blocks after those of the previous lane
        m_best = b_x >= b_bound
        b_one = tl.reshape(m_best.to(tl.int32), [BQ, BW // L, L])
        b_lane = tl.sum(b_one, 1)
        b_index = tl.cumsum(b_one, 1) - b_one + (tl.cumsum(b_lane, 1) - b_lane)[:, None, :]
        p_best = p_b + tl.reshape(b_index, [BQ, BW]) * _QUERIES
        tl.store(p_best, o_c, mask=m_best)
        if CARRIED:
            tl.store(p_best + S * _QUERIES, b_x, mask=m_best)
    tl.debug_barrier()
    # sort the selected candidates and store them between the fixed blocks
    o_s = tl.arange(0, BS)[None, :]
    b_end = tl.minimum(b_own + 1, count)
    m_s = (o_s > 0) & (o_s <= b_most[:, None])
    b_c = tl.load(p_b + (o_s - 1) * _QUERIES, mask=m_s, other=0)
    b_last = tl.where(o_s < b_end[:, None], (b_own + 1 - b_end)[:, None] + o_s, 0x7FFFFFFF)
    b_c = tl.sort(tl.where(m_s | (o_s == 0), b_c, b_last))
    p_c = blocks + i_bh // H * s_b + (o_q.to(tl.int64) * H + i_bh % H) * count
    tl.store(p_c[:, None] + o_s, tl.where(o_s < b_end[:, None], b_c, -1), mask=m_q[:, None] & (o_s < count))


def select_blocks_kernel(q, pooled, lse, blocks, cu_seqlens, *, block_size, shift, scale) -> None:
    """Write the selected blocks `[B, TQ, H, count]`."""
    q, pooled = dense_rows(q), dense_rows(pooled)
    (B, TQ, HQ, K), (U, H), count = q.shape, pooled.shape[1:3], blocks.shape[3]
    group, S = next_power_of_2(HQ // H), next_power_of_2(max(1, count - 3))
    rows, warps = _TILES[q.element_size()]
    BQ = min(32, max(1, rows // group))
    side = _QUERIES.value

    def columns(queries: int) -> int:
        """Return the number of candidates of the last of `queries` queries, rounded up to whole tiles."""
        return cdiv(max(1, cdiv(shift + queries, block_size) - 2), _BLOCKS) * _BLOCKS

    for run in runs(TQ, B * H * (columns(TQ) + 2 * S) * 4):
        T, W = run.stop - run.start, columns(run.stop)
        b_q, b_lse, b_blocks = q[:, run], lse[:, run], blocks[:, run]
        # misaligned by 4 bytes on purpose: a 16-byte load would give a thread four adjacent queries and fewer entries
        # of each, so that more threads would take part in each query's reduction
        attention = blocks.new_empty(1 + B * H * cdiv(T, side) * side * (W + 2 * S))[1:]
        shared = dict(
            attention=attention, cu_seqlens=cu_seqlens, T=T, H=H, N=0 if cu_seqlens is None else len(cu_seqlens) - 1,
            W=W, first=shift + run.start, S=S, BLOCK=block_size, PACKED=cu_seqlens is not None,
        )  # fmt: skip
        tiles = cdiv(T, BQ)
        # if there are few tiles of queries, more programs share the blocks of a tile
        part = _BLOCKS * (8 if B * H * tiles >= 512 else 1)
        parts = cdiv(W, part)
        _score_blocks[(B * H * tiles * parts,)](
            **shared, q=b_q, pooled=pooled, lse=b_lse, **strides(q=b_q, k=pooled, l=b_lse), U=U, tiles=tiles,
            parts=parts, part=part, scale=scale * math.log2(math.e), G=HQ // H, GROUP=group, K=K, BQ=BQ, BC=_BLOCKS,
            BK=width(K), PRECISION=precision(q.dtype), num_warps=warps, num_stages=2,
        )  # fmt: skip
        carried = W > _QUERY_ELEMENTS
        wide = max(_QUERY_ELEMENTS, 2 * S) if carried else next_power_of_2(W)
        queries = min(side, max(1, _WARP_ELEMENTS // wide))
        tiles = cdiv(T, queries)
        _select_blocks[(B * H * tiles,)](
            **shared, blocks=b_blocks, s_b=b_blocks.stride(0), tiles=tiles, count=count, BQ=queries, BW=wide,
            CARRIED=carried, BS=next_power_of_2(count), num_warps=1, num_stages=1, maxnreg=_MAX_REGISTERS,
        )  # fmt: skip
