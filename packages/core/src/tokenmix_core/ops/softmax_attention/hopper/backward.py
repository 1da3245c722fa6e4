"""Backward attention on Hopper: 16-bit heads of 64 or 128, any mask, all or selected queries; one warpgroup per CTA.

    dQ kernel     Q, dO, delta, lse resident; stages: K, V (two buffers)
      iteration   wait K_i, V_i → S = Q K_iᵀ and dP = dO V_iᵀ in flight together (WGMMA); cp.async K, V of i + 1
                  wait S → P = exp2(S − lse), mask; wait dP → dS = P ∘ (dP − delta); dQ += dS K_i
      also        delta = rowsum(dO ∘ O) − dlse, bias columns of lse and delta → global, for the dK/dV kernel
    dK/dV kernel  K, V resident; stages: Q, dO, bias columns (two buffers); loops over the GQA group's query tiles
      iteration   Sᵀ = bias + K Q_iᵀ and dPᵀ = bias + V dO_iᵀ in flight together; cp.async tile i + 1
                  wait Sᵀ → Pᵀ = exp2(Sᵀ), mask; dV += Pᵀ dO_i; wait dPᵀ → dSᵀ = Pᵀ ∘ dPᵀ; dK += dSᵀ Q_i
    epilogue      accumulator → smem → global

The arithmetic is that of `backward.py`; `bias_columns.py` explains the bias columns. The two stages of a pipeline are
separate allocations: Triton assumes that indexed stages of one allocation overlap, and would make MMAs and copies wait
for each other.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma_wait

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.gluon.hopper import LOG2_E
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.masks import visible
from tokenmix_core.kernels.tuning import register_limit
from tokenmix_core.ops.softmax_attention.hopper import TILE, constants
from tokenmix_core.ops.softmax_attention.hopper.backward_tiles import (
    Heads,
    Keys,
    KeyStage,
    Masking,
    Queries,
    QuerySpan,
    allocate_keys,
    allocate_queries,
    async_copy_queries,
    dkdv_step,
    listed,
    minus_columns,
    mma_dq,
    mma_scores,
)
from tokenmix_core.ops.softmax_attention.hopper.bias_columns import BIAS_COLUMNS, PARTS, bias_selector, store_bias
from tokenmix_core.ops.softmax_attention.hopper.query_tile import load_delta, locate_query_tile, store_tile
from tokenmix_core.ops.softmax_attention.kv_tiles import key_tiles, query_tiles, tile_of_queries
from tokenmix_core.ops.softmax_attention.launch_args import sizes, strides
from tokenmix_core.ops.softmax_attention.query_selection import list_offset, list_tiles
from tokenmix_core.ops.softmax_attention.steps import Rows, VisibleTo


class KeySpan(NamedTuple):
    """The KV tiles that a query tile visits (see `key_tiles`), `count` in all.

    `keys` is the number of keys of the sequence, `gap` the number of skipped tiles between sinks and window.
    """

    keys: gl.tensor
    sink_tiles: gl.tensor
    gap: gl.tensor
    full_min: gl.tensor
    full_max: gl.tensor
    count: gl.tensor
    window: gl.tensor
    sinks: gl.tensor


@gluon.jit
def holds_selected(selected, first, rows, BT: gl.constexpr):
    """True if one of the rows `first` … `first + BT − 1` is selected."""
    o_t = first + gl.arange(0, BT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(gl.load(selected + o_t, mask=o_t < rows, other=0).to(gl.int32), 0) != 0


@gluon.jit
def store_zeros(p_x, first, rows, stride, BT: gl.constexpr, D: gl.constexpr):
    """Store zeros in the rows `first` … `first + BT − 1` of a matrix, as far as these rows exist."""
    layout: gl.constexpr = hopper.row_layout(D, gl.num_warps())
    o_t = first + gl.arange(0, BT, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, D, gl.SliceLayout(0, layout))
    p_x += o_t.to(gl.int64)[:, None] * stride + o_d[None, :]
    gl.store(p_x, gl.zeros([BT, D], p_x.dtype.element_ty, layout), mask=(o_t < rows)[:, None])


@gluon.jit
def dq_step(
    i, i_k, b_dq, stage: KeyStage, next_stage: KeyStage, kv, given: Queries, span: KeySpan,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Accumulate dQ over the i-th visited KV tile, `i_k`, which is in `stage`; prefetch the next tile to `next_stage`.

    Returns:
        the index of the next tile, and dQ without the factor scale.
    """
    k, v = kv
    k_s, v_s = hopper.opaque_tile(stage.k), hopper.opaque_tile(stage.v)
    BT: gl.constexpr = k_s.shape[0]
    hopper.wait_async_copies(0)
    b_s, b_dp = mma_scores(given, k_s, v_s)
    i_next = i + 1 + gl.where(i + 1 < span.sink_tiles, 0, span.gap)
    # after the last tile there is nothing to prefetch, so copy 0 rows
    left = gl.where(i + 1 < span.count, span.keys, 0)
    hopper.async_copy_tile(next_stage.k, k.pointer, i_next * BT, left, k.stride, THREAD_RELATIVE=True)
    hopper.async_copy_tile(next_stage.v, v.pointer, i_next * BT, left, v.stride, THREAD_RELATIVE=True)
    async_copy.commit_group()
    b_s = warpgroup_mma_wait(1, [b_s])
    b_p = gl.exp2(b_s * (given.scale * LOG2_E) - given.b_lse[:, None])
    if (i_k < span.full_min) | (i_k >= span.full_max):
        o_k = gl.arange(0, BT, gl.SliceLayout(0, hopper.mma_layout(BT, gl.num_warps())))[None, :]
        distance = minus_columns(given.o_q - i_k * BT, BT)
        m_s = visible(distance, i_k * BT + o_k, span.keys, span.window, span.sinks, CAUSAL, WINDOW)
        b_p = gl.where(m_s, b_p, 0.0)
    return i_next, mma_dq(b_p, b_dp, given, k_s, b_dq)


@cached_launch
@gluon.jit
def _backward_queries(
    q, k, v, o, do, lse, dlse, delta, bias, dq, cu_seqlens, selected,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """Compute dQ, delta and, unless `bias` is None, bias columns of one query tile of one head per program.

    A tile without selected queries is skipped; FILL: write zeros to its dQ.
    """
    tile = locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BT, PACKED)
    i_b, i_h, i_hk, _, i_t, _, start, queries, keys = tile
    o_head = (i_b * TQ + start) * HQ * D + i_h * D
    wanted = i_t * BT < queries
    if selected is not None:
        wanted = holds_selected(selected + i_b * TQ + start, i_t * BT, queries, BT)
        if FILL and not wanted:
            store_zeros(dq + o_head, i_t * BT, queries, HQ * D, BT, D)
    if wanted:
        scores: gl.constexpr = hopper.mma_layout(BT, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        k_rows = Rows(k + i_b * s_kb + start * s_kt + i_hk * s_kh, s_kt)
        v_rows = Rows(v + i_b * s_vb + start * s_vt + i_hk * s_vh, s_vt)
        first = i_t * BT + keys - queries
        last = gl.minimum(first + BT, keys) - 1
        sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BT, CAUSAL, WINDOW)
        gap = n_min - sink_tiles
        q_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        do_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        stage_0 = allocate_keys(q.dtype.element_ty, BT, D, D)
        stage_1 = allocate_keys(q.dtype.element_ty, BT, D, D)
        hopper.async_copy_tile(q_s, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        hopper.async_copy_tile(do_s, do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BT, queries, s_dt)
        async_copy.commit_group()
        i_k = gl.where(sink_tiles > 0, 0, gap)
        hopper.async_copy_tile(stage_0.k, k_rows.pointer, i_k * BT, keys, s_kt)
        hopper.async_copy_tile(stage_0.v, v_rows.pointer, i_k * BT, keys, s_vt)
        async_copy.commit_group()

        o_row = (i_b * HQ + i_h) * TQ + start
        b_delta, o_t = load_delta(o + o_head, HQ * D, do_s, dlse, o_row, i_t * BT, queries)
        gl.store(delta + o_row + o_t, b_delta, mask=o_t < queries)
        b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_lse = gl.load(lse + o_row + i_t * BT + o_m, mask=i_t * BT + o_m < queries, other=0.0) * LOG2_E

        b_dq = gl.zeros([BT, D], gl.float32, hopper.mma_layout(D, gl.num_warps()))
        if bias is not None:
            p_bias = bias + (o_row + i_t * BT) * BIAS_COLUMNS
            store_bias(p_bias, b_lse, b_delta, queries - i_t * BT, scale * LOG2_E)
        count = sink_tiles + n_max - n_min
        span = KeySpan(keys, sink_tiles, gap, full_min, full_max, count, window, sinks)
        given = Queries(q_s, do_s, b_lse, b_delta, first + o_m, scale)
        for i in range(0, count - 1, 2):
            i_k, b_dq = dq_step(i, i_k, b_dq, stage_0, stage_1, (k_rows, v_rows), given, span, CAUSAL, WINDOW)
            i_k, b_dq = dq_step(i + 1, i_k, b_dq, stage_1, stage_0, (k_rows, v_rows), given, span, CAUSAL, WINDOW)
        if count % 2 == 1:
            i_k, b_dq = dq_step(count - 1, i_k, b_dq, stage_0, stage_1, (k_rows, v_rows), given, span, CAUSAL, WINDOW)
        hopper.wait_async_copies(0)
        p_dq = dq + o_head + (i_t * BT).to(gl.int64) * (HQ * D)
        store_tile(p_dq, q_s, b_dq * scale, HQ * D, queries - i_t * BT)


@cached_launch
@gluon.jit
def _backward_keys(
    q, k, v, do, bias, dk, dv, cu_seqlens, ranks, order,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr, D: gl.constexpr, BT: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one KV tile of one key head per program."""
    pid = gl.program_id(0)
    i_t = pid % tiles
    i_hk = (pid // tiles % H).to(gl.int64)
    i_b = (pid // tiles // H).to(gl.int64)
    i_n = 0
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        i_n, start, queries, first_row = hopper.locate_chunk(i_t, TQ, BT, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BT
        keys = queries
    if i_t * BT < keys:
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        shift = keys - queries
        first = i_t * BT
        last = gl.minimum(first + BT, keys) - 1
        m_min, full_min, full_max, m_max = query_tiles(first, last, queries, shift, window, sinks, BT, CAUSAL, WINDOW)
        if order is not None:
            # convert query tile indices to positions in the list of query tiles that hold a selected query
            offset = list_offset(i_b, i_n, start, gl.cdiv(TQ, BT), BT, PACKED)
            order += offset
            m_min = gl.load(ranks + offset + m_min)
            full_min = gl.load(ranks + offset + full_min)
            full_max = gl.load(ranks + offset + full_max)
            m_max = gl.load(ranks + offset + m_max)
        count = (m_max - m_min) * (HQ // H)
        t_q = listed(order, m_min, count > 0)
        k_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        v_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, D], shared)
        stage_0 = allocate_queries(q.dtype.element_ty, BT, D, D)
        stage_1 = allocate_queries(q.dtype.element_ty, BT, D, D)
        # first query head of the key head's group
        i_h = i_hk * (HQ // H)
        heads = Heads(
            Rows(q + i_b * s_qb + start * s_qt + i_h * s_qh, s_qt),
            Rows(do + i_b * s_db + start * s_dt + i_h * s_dh, s_dt),
            Rows(bias + ((i_b * HQ + i_h) * TQ + start) * BIAS_COLUMNS, BIAS_COLUMNS),
            (s_qh, s_dh, TQ * BIAS_COLUMNS),
        )
        hopper.async_copy_tile(k_s, k + i_b * s_kb + start * s_kt + i_hk * s_kh, first, keys, s_kt)
        hopper.async_copy_tile(v_s, v + i_b * s_vb + start * s_vt + i_hk * s_vh, first, keys, s_vt)
        cursor = (m_min, m_min * 0, t_q)
        async_copy_queries(stage_0, heads, m_min * 0, t_q * BT, queries)

        adds_lse, adds_delta = bias_selector(0, BT), bias_selector(PARTS, BT)
        o_k = first + gl.arange(0, BT, gl.SliceLayout(1, hopper.mma_layout(BT, gl.num_warps())))
        given = Keys(k_s, v_s, adds_lse, adds_delta, o_k, scale)
        mask = VisibleTo(o_k, shift, keys, window, sinks)
        span = QuerySpan(queries, m_min, full_min, full_max, m_max, count, order, mask)
        zeros = gl.zeros([BT, D], gl.float32, hopper.mma_layout(D, gl.num_warps()))
        sums = (zeros, zeros)
        for i in range(0, count - 1, 2):
            cursor, sums = dkdv_step(
                i, cursor, sums, stage_0, stage_1, heads, given, span, Masking(CAUSAL, WINDOW, False)
            )  # fmt: skip
            cursor, sums = dkdv_step(
                i + 1, cursor, sums, stage_1, stage_0, heads, given, span, Masking(CAUSAL, WINDOW, False)
            )  # fmt: skip
        if count % 2 == 1:
            cursor, sums = dkdv_step(
                count - 1, cursor, sums, stage_0, stage_1, heads, given, span, Masking(CAUSAL, WINDOW, False)
            )  # fmt: skip
        b_dk, b_dv = sums
        hopper.wait_async_copies(0)
        k_s.store((b_dk * scale).to(dk.dtype.element_ty))
        v_s.store(b_dv.to(dv.dtype.element_ty))
        hopper.barrier()
        o_x = (i_b * TK + start + first) * H * D + i_hk * D
        hopper.store_rows(dk + o_x, k_s, H * D, keys - first, gl.num_warps())
        hopper.store_rows(dv + o_x, v_s, H * D, keys - first, gl.num_warps())


def backward_queries(q, k, v, o, do, lse, dlse, delta, bias, dq, cu_seqlens, mask, scale, selected, fill=True) -> None:
    """Launch the dQ kernel, which writes dq, delta and, if given, `bias`: columns of lse and delta for `backward_keys`.

    `fill` decides whether the kernel writes dq of query tiles without selected queries.
    """
    B, TQ, HQ, _ = q.shape
    tiles = chunk_slots(1, TQ, TILE, cu_seqlens)
    _backward_queries[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, delta=delta, bias=bias, dq=dq, cu_seqlens=cu_seqlens,
        selected=selected,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BT=TILE, **constants(q, cu_seqlens, mask), FILL=fill,
        maxnreg=register_limit(tiles * HQ * B, 128) if q.shape[3] == 64 else None,
    )  # fmt: skip


def backward_keys(q, k, v, do, bias, dk, dv, cu_seqlens, mask, scale, selected) -> None:
    """Launch the dK/dV kernel, which writes dk and dv and reads the bias columns that `backward_queries` wrote."""
    ranks, order = (None, None) if selected is None else list_tiles(selected, cu_seqlens, TILE)
    B, TK, H, _ = k.shape
    tiles = chunk_slots(1, TK, TILE, cu_seqlens)
    _backward_keys[(tiles * H * B,)](
        q=q, k=k, v=v, do=do, bias=bias, dk=dk, dv=dv, cu_seqlens=cu_seqlens, ranks=ranks, order=order,
        **strides(q=q, k=k, v=v, d=do), **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
        BT=TILE, **constants(q, cu_seqlens, mask),
        maxnreg=register_limit(tiles * H * B, 168) if q.shape[3] == 64 else None,
    )  # fmt: skip
