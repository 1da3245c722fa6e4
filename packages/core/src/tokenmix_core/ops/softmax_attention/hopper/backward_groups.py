"""dk and dv for Hopper by groups of warps: two sum a tile of keys each, one brings the queries that they meet.

The arithmetic is that of `backward.py`. A group's exponentials run beside a product of its own and beside the other
group's products, and a tile's last product waits for the next tile's scores, to be queued with them. Heads of 128; of
chosen queries `hopper/backward.py` knows.
"""

from __future__ import annotations

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
from tokenmix_core.ops.softmax_attention.tiles import query_tiles
from tokenmix_core.tile.hopper import (
    LOG2_E,
    allocate_barriers,
    await_tile,
    begin_vector_copy,
    fetch_rows,
    locate_chunk,
    product_layout,
    store_rows,
)

# queries that meet a program's keys at once
QUERIES = 64
# tiles of queries that are in shared memory or on their way there
PLACES = 4


# What masks are made of lies in shared memory: a loop has no registers for it.


@gluon.jit
def numbers(count: gl.constexpr):
    """0, 1, …: the places of a tile's columns."""
    places_s = gl.allocate_shared_memory(gl.int32, [count], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    places_s.store(gl.arange(0, count, gl.BlockedLayout([1], [32], [4], [0])).to(gl.int32))
    return places_s


@gluon.jit
def seen_by_keys(position, groups: gl.constexpr, queries, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """The first query that sees each of the keys from `position` on, counted as queries, and the one behind the last.

    Shared memory `[2 · groups, 64]`: those first of a group's 64 keys, those behind the last, and so on. Of keys behind
    the last one nothing is said.
    """
    limits_s = gl.allocate_shared_memory(gl.int32, [2 * groups, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(groups):
        o_k = position + i * 64 + gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
        low = o_k if CAUSAL else o_k * 0
        high = o_k * 0 + queries
        if WINDOW:
            high = gl.minimum(high, o_k + window)
        limits_s.index(2 * i).store(low.to(gl.int32))
        limits_s.index(2 * i + 1).store(high.to(gl.int32))
    return limits_s


@gluon.jit
def weights(b_s, b_lse, i, bounds, masks, scale, GROUP: gl.constexpr):
    """Weights of a group's keys for the i-th tile's queries, from their scores."""
    full, end = bounds
    places_s, limits_s = masks
    columns: gl.constexpr = b_s.shape[1]
    scores: gl.constexpr = product_layout(columns, 4)
    b_p = gl.exp2(b_s * (scale * LOG2_E) - b_lse)
    if (i < full) | (i >= end):
        o_c = (i * columns + places_s.load(gl.SliceLayout(0, scores)))[None, :]
        low = limits_s.index(2 * GROUP).load(gl.SliceLayout(1, scores))[:, None]
        high = limits_s.index(2 * GROUP + 1).load(gl.SliceLayout(1, scores))[:, None]
        b_p = gl.where((o_c >= low) & (o_c < high), b_p, 0.0)
    return b_p


@gluon.jit
def copy_queries(
    pointers, tiles, barriers, span, s_qh, s_dh, TQ, HEADS: gl.constexpr,
    s_qt: gl.constexpr, s_dt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr,
):  # fmt: skip
    """Bring the keys and values, then each head's tiles of queries and of do as soon as their places are free."""
    p_k, p_v, p_q, p_do, p_lse, p_delta = pointers
    k_s, v_s, q_s, do_s, lse_s, delta_s = tiles
    asked, queries_full, queries_empty, do_full, do_empty = barriers
    keys, queries, near, stop, count = span
    BM: gl.constexpr = q_s.shape[1]
    groups: gl.constexpr = k_s.shape[0]
    places: gl.constexpr = q_s.shape[0]
    for i in gl.static_range(groups):
        fetch_rows(k_s.index(i), p_k + i * 64 * s_kt, s_kt, keys - i * 64, 4)
        fetch_rows(v_s.index(i), p_v + i * 64 * s_vt, s_vt, keys - i * 64, 4)
    async_copy.mbarrier_arrive(asked.index(0), increment_count=False)
    i_q = near
    for i in range(count):
        here = i % places
        before = (i // places + 1) & 1
        first = i_q * BM
        mbarrier.wait(queries_empty.index(here), before)
        fetch_rows(q_s.index(here), p_q + first.to(gl.int64) * s_qt, s_qt, queries - first, 4)
        begin_vector_copy(lse_s.index(here), p_lse, first, queries)
        async_copy.mbarrier_arrive(queries_full.index(here), increment_count=False)
        mbarrier.wait(do_empty.index(here), before)
        fetch_rows(do_s.index(here), p_do + first.to(gl.int64) * s_dt, s_dt, queries - first, 4)
        begin_vector_copy(delta_s.index(here), p_delta, first, queries)
        async_copy.mbarrier_arrive(do_full.index(here), increment_count=False)
        i_q = i_q + 1
        if HEADS > 1:  # noqa: SIM102
            if i_q == stop:
                # on to the next head
                i_q = near
                p_q += s_qh
                p_do += s_dh
                p_lse += TQ
                p_delta += TQ


@gluon.jit
def kept_here(b_x):
    """The same 16-bit numbers, which the compiler computes before what follows, and not where they are used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)


@gluon.jit
def pass_by(barriers, i, count, places: gl.constexpr):
    """Leave `count` tiles from the i-th on, which this group does not see, to the others."""
    _, queries_full, queries_empty, do_full, do_empty = barriers
    for j in range(i, i + count):
        # not before it is there: else the reading of the tile that was there before would seem to have ended
        mbarrier.wait(queries_full.index(j % places), (j // places) & 1)
        mbarrier.arrive(queries_empty.index(j % places))
        mbarrier.wait(do_full.index(j % places), (j // places) & 1)
        mbarrier.arrive(do_empty.index(j % places))


@gluon.jit
def sum_queries(
    pointers, tiles, barriers, span, bounds, masks, scale,
    GROUP: gl.constexpr, HEADS: gl.constexpr, s_ot: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, those of a group of the program's tile."""
    p_dk, p_dv = pointers
    k_s, v_s, q_s, do_s, lse_s, delta_s = tiles
    asked, queries_full, queries_empty, do_full, do_empty = barriers
    keys, near, stop, skipped, left_over = span
    dtype: gl.constexpr = k_s.dtype
    places: gl.constexpr = q_s.shape[0]
    BM: gl.constexpr = q_s.shape[1]
    D: gl.constexpr = q_s.shape[2]
    scores: gl.constexpr = product_layout(BM, 4)
    sums: gl.constexpr = product_layout(D, 4)
    column: gl.constexpr = gl.SliceLayout(0, scores)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    FIRST: gl.constexpr = GROUP * 64
    s_k, s_v = k_s.index(GROUP), v_s.index(GROUP)
    b_dk = gl.zeros([64, D], gl.float32, sums)
    b_dv = gl.zeros([64, D], gl.float32, sums)
    zeros = gl.zeros([64, BM], gl.float32, scores)
    mbarrier.wait(asked.index(0), 0)
    i = skipped * 0
    for _ in range(HEADS):
        pass_by(barriers, i, skipped, places)
        i = i + skipped
        here = i % places
        mbarrier.wait(queries_full.index(here), (i // places) & 1)
        mbarrier.wait(do_full.index(here), (i // places) & 1)
        fence_async_shared()
        b_st = warpgroup_mma(s_k, q_s.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_delta = zeros - delta_s.index(here).load(column)[None, :]
        b_dpt = warpgroup_mma(s_v, do_s.index(here).permute((1, 0)), b_delta, is_async=True)
        b_lse = lse_s.index(here).load(column) * LOG2_E
        b_st = warpgroup_mma_wait(1, [b_st])
        b_pt = weights(b_st, b_lse[None, :], near, bounds, masks, scale, GROUP)
        b_left = gl.convert_layout(b_pt.to(dtype), left)
        b_sum = warpgroup_mma(b_left, do_s.index(here), b_dv, is_async=True)
        b_dpt = warpgroup_mma_wait(1, [b_dpt])
        b_dst = gl.convert_layout(kept_here((b_pt * b_dpt).to(dtype)), left)
        # this wait keeps the assembler from putting the next one before the sums
        await_tile(queries_full, i + 1, i + gl.where(near + 1 < stop, 2, 1), places)
        b_dv, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
        mbarrier.arrive(do_empty.index(here))
        for i_q in range(near + 1, stop):
            before = i % places
            i = i + 1
            here = i % places
            fence_async_shared()
            b_sum = warpgroup_mma(b_dst, q_s.index(before), b_dk, is_async=True)
            b_st = warpgroup_mma(s_k, q_s.index(here).permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_dk, b_dst = warpgroup_mma_wait(1, [b_sum, b_dst])
            mbarrier.arrive(queries_empty.index(before))
            mbarrier.wait(do_full.index(here), (i // places) & 1)
            fence_async_shared()
            b_delta = zeros - delta_s.index(here).load(column)[None, :]
            b_dpt = warpgroup_mma(s_v, do_s.index(here).permute((1, 0)), b_delta, is_async=True)
            b_lse = lse_s.index(here).load(column) * LOG2_E
            b_st = warpgroup_mma_wait(1, [b_st])
            b_pt = weights(b_st, b_lse[None, :], i_q, bounds, masks, scale, GROUP)
            b_left = gl.convert_layout(b_pt.to(dtype), left)
            b_sum = warpgroup_mma(b_left, do_s.index(here), b_dv, is_async=True)
            b_dpt = warpgroup_mma_wait(1, [b_dpt])
            b_dst = gl.convert_layout(kept_here((b_pt * b_dpt).to(dtype)), left)
            await_tile(queries_full, i + 1, i + gl.where(i_q + 1 < stop, 2, 1), places)
            b_dv, b_left = warpgroup_mma_wait(0, [b_sum, b_left])
            mbarrier.arrive(do_empty.index(here))
        b_sum = warpgroup_mma(b_dst, q_s.index(i % places), b_dk, is_async=True)
        b_dk, b_dst = warpgroup_mma_wait(0, [b_sum, b_dst])
        mbarrier.arrive(queries_empty.index(i % places))
        pass_by(barriers, i + 1, left_over, places)
        i = i + 1 + left_over
    # through shared memory, in the place of this group's keys and values, so that a thread stores 16 bytes at once
    s_k.store((b_dk * scale).to(dtype))
    s_v.store(b_dv.to(dtype))
    store_rows(p_dk + FIRST * s_ot, s_k, s_ot, keys, 4)
    store_rows(p_dv + FIRST * s_ot, s_v, s_ot, keys, 4)


@gluon.jit
def group_tiles(
    first, keys, queries, near, stop, window, sinks, BM: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):
    """Of a program's tiles [near, stop) those that the group with the keys from `first` on meets, at least one.

    Returns:
        `(keys left, near, stop, tiles before, tiles behind)` and `(full, end)`: tiles in between need no mask.
    """
    shift = keys - queries
    last = gl.minimum(first + 64, keys) - 1
    own_near, full, end, own_stop = query_tiles(first, last, queries, shift, window, sinks, BM, CAUSAL, WINDOW)
    own_near = gl.minimum(gl.maximum(own_near, near), stop - 1)
    own_stop = gl.maximum(gl.minimum(own_stop, stop), own_near + 1)
    span = (keys - first, own_near, own_stop, own_near - near, stop - own_stop)
    return span, (full, end)


@cached_launch
@gluon.jit
def _backward_keys(
    q, k, v, do, lse, delta, dk, dv, cu_seqlens,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, HQ: gl.constexpr, H: gl.constexpr, N,
    tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr, D: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, PLACES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of BN keys and a key head a program."""
    pid = gl.program_id(0)
    i_t = pid % tiles
    i_hk = (pid // tiles % H).to(gl.int64)
    i_b = (pid // tiles // H).to(gl.int64)
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        _, start, queries, first_row = locate_chunk(i_t, TQ, BN, N, cu_seqlens, PACKED, 4)
        i_t = first_row // BN
        keys = queries
    if i_t * BN >= keys:
        return
    dtype: gl.constexpr = q.dtype.element_ty
    groups: gl.constexpr = BN // 64
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = i_t * BN
    last = gl.minimum(first + BN, keys) - 1
    shift = keys - queries
    near, _, _, stop = query_tiles(first, last, queries, shift, window, sinks, BM, CAUSAL, WINDOW)
    # keys that nobody sees meet a tile, too
    stop = gl.maximum(stop, near + 1)
    memory = (
        gl.allocate_shared_memory(dtype, [groups, 64, D], shared),
        gl.allocate_shared_memory(dtype, [groups, 64, D], shared),
        gl.allocate_shared_memory(dtype, [PLACES, BM, D], shared),
        gl.allocate_shared_memory(dtype, [PLACES, BM, D], shared),
        gl.allocate_shared_memory(gl.float32, [PLACES, BM], vector),
        gl.allocate_shared_memory(gl.float32, [PLACES, BM], vector),
    )
    # each of 128 threads tells of its copies, each group of what it has read
    barriers = (
        allocate_barriers(1, 128),
        allocate_barriers(PLACES, 128),
        allocate_barriers(PLACES, groups),
        allocate_barriers(PLACES, 128),
        allocate_barriers(PLACES, groups),
    )
    # of the head that is copied next, from the first of those that share keys on
    i_h = i_hk * (HQ // H)
    o_row = (i_b * HQ + i_h) * TQ + start
    o_x = ((i_b * TK + start + first) * H + i_hk) * D
    inputs = (
        k + i_b * s_kb + (start + first) * s_kt + i_hk * s_kh,
        v + i_b * s_vb + (start + first) * s_vt + i_hk * s_vh,
        q + i_b * s_qb + start * s_qt + i_h * s_qh,
        do + i_b * s_db + start * s_dt + i_h * s_dh,
        lse + o_row,
        delta + o_row,
    )
    outputs = (dk + o_x, dv + o_x)
    span = (keys - first, queries, near, stop, (stop - near) * (HQ // H))
    span_0, bounds_0 = group_tiles(first, keys, queries, near, stop, window, sinks, BM, CAUSAL, WINDOW)
    span_1, bounds_1 = group_tiles(first + 64, keys, queries, near, stop, window, sinks, BM, CAUSAL, WINDOW)
    s_ot: gl.constexpr = H * D
    heads: gl.constexpr = HQ // H
    masks = (numbers(BM), seen_by_keys(first - shift, groups, queries, window, CAUSAL, WINDOW))
    gl.warp_specialize(
        [
            (sum_queries, (outputs, memory, barriers, span_0, bounds_0, masks, scale, 0, heads, s_ot)),
            (sum_queries, (outputs, memory, barriers, span_1, bounds_1, masks, scale, 1, heads, s_ot)),
            (copy_queries, (inputs, memory, barriers, span, s_qh, s_dh, TQ, heads, s_qt, s_dt, s_kt, s_vt)),
        ],
        [4, 4], [240, 24],
    )  # fmt: skip


def backward_keys(q, k, v, do, lse, delta, dk, dv, cu_seqlens, mask, scale) -> None:
    """Write dk and dv of all keys, none of them a sink."""
    assert not mask.sinks, "keys that every query sees are summed elsewhere"
    B, TK, H, _ = k.shape
    tiles = chunk_slots(1, TK, ROWS, cu_seqlens)
    _backward_keys[(tiles * H * B,)](
        q=q, k=k, v=v, do=do, lse=lse, delta=delta, dk=dk, dv=dv, cu_seqlens=cu_seqlens,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BM=QUERIES, BN=ROWS, PLACES=PLACES, **constants(q, cu_seqlens, mask),
    )  # fmt: skip
