"""Triton kernels of the backward: delta = rowsum(dO ∘ O) − dlse and dq by query tiles, then dk and dv by KV tiles.

Probabilities are recomputed from the log-sum-exp. The dK/dV kernel computes Sᵀ = K Qᵀ by a separate MMA instead of
transposing S = Q Kᵀ: Triton 3.6 compiles the transposition of a rounded S, as an MMA's operand, wrongly for Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import LOG2_E
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.softmax_attention.bias_columns import BIAS_COLUMNS, store_bias
from tokenmix_core.ops.softmax_attention.kv_tiles import (
    key_tiles,
    load_tile,
    masked_tile,
    query_tiles,
    store_tile,
    tile_of_queries,
)
from tokenmix_core.ops.softmax_attention.launch_args import constants, dense_rows, sink_step, sizes, strides
from tokenmix_core.ops.softmax_attention.listed_keys.backward import first_keys_backward
from tokenmix_core.ops.softmax_attention.plan import Form, limit, plan
from tokenmix_core.ops.softmax_attention.query_selection import list_offset, list_tiles, listed, selected_rows
from tokenmix_core.ops.softmax_attention.steps import (
    Config,
    KeyRows,
    Queries,
    QueryRows,
    Rows,
    Visible,
    VisibleTo,
    dkdv_step,
    dq_step,
    load_statistics,
    locate_query_tile,
)
from tokenmix_core.ops.softmax_attention.types import Mask


@cached_launch(loop_tiles=("BN",))
@triton.jit
def _attention_backward_queries(
    q, k, v, o, do, lse, dlse, delta, bias, dq, cu_seqlens, selected,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh,
    TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Compute dq, delta and, unless `bias` is None, bias columns of one query tile of one head per program.

    `bias_columns.py` explains bias columns. Sinks are read in one step of BS keys, or in whole tiles if BS is 0. FILL:
    whether to write zeros to dq for a tile without selected queries.
    """
    tile = locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BM, PACKED)
    i_b, i_h, i_hk, _, i_t, first_row, start, queries, keys = tile
    if PACKED:  # noqa: SIM102
        if first_row >= queries:
            return
    if selected is not None:
        m_s = selected_rows(selected, i_b * TQ + start, i_t * BM, queries, BM)
        if tl.max(m_s.to(tl.int32)) == 0:
            if FILL:
                p_dq = dq + (i_b * TQ + start) * HQ * K + i_h * K
                store_tile(p_dq, tl.zeros([BM, BK], tl.float32), i_t * BM, queries, HQ * K, K, BM, BK)
            return
    k_rows = Rows(k + i_b * s_kb + start * s_kt + i_hk * s_kh, s_kt)
    v_rows = Rows(v + i_b * s_vb + start * s_vt + i_hk * s_vh, s_vt)
    kv = KeyRows(k_rows, v_rows, keys)
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)
    b_do = load_tile(do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BM, queries, s_dt, V, BM, BV, True)
    b_lse, b_delta = load_statistics(
        o, (lse, dlse, delta), tile, b_do, TQ, HQ, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BM
    )  # fmt: skip
    given = Queries(b_q, b_do, b_lse, b_delta)
    if bias is not None:
        o_t = i_t * BM + tl.arange(0, BM)
        o_row = (i_b * HQ + i_h) * TQ + start
        store_bias(bias, o_row + o_t, b_lse, b_delta, o_t < queries, scale * LOG2_E)

    first = i_t * BM + keys - queries
    last = tl.minimum(first + BM, keys) - 1
    mask = Visible(first + tl.arange(0, BM), window, sinks)
    b_dq = tl.zeros([BM, BK], tl.float32)
    sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BN, CAUSAL, WINDOW)
    if BS:
        if sink_tiles > 0:
            b_dq = dq_step(
                b_dq, given, kv, 0, mask, scale * LOG2_E, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BS, True
            )
        sink_tiles = 0
    for i_k in range(full_min, full_max):
        b_dq = dq_step(
            b_dq, given, kv, i_k * BN, mask, scale * LOG2_E, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BN, False
        )
    for i in range(0, sink_tiles + full_min - n_min + n_max - full_max):
        i_k = masked_tile(i, sink_tiles, n_min, full_min, full_max)
        b_dq = dq_step(
            b_dq, given, kv, i_k * BN, mask, scale * LOG2_E, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BN, True
        )
    store_tile(dq + (i_b * TQ + start) * HQ * K + i_h * K, b_dq * scale, i_t * BM, queries, HQ * K, K, BM, BK)


@cached_launch
@triton.jit
def _attention_backward_keys(
    q, k, v, do, lse, delta, dk, dv, cu_seqlens, ranks, order,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh,
    TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of one KV tile of one key head per program."""
    # start with the tiles of the first keys: the most queries see them, and these long programs must not start last
    pid = tl.program_id(0)
    i_t = pid % tiles
    i_hk = (pid // tiles % H).to(tl.int64)
    i_b = (pid // tiles // H).to(tl.int64)
    start = i_b * 0
    i_n = 0
    queries = TQ
    keys = TK
    if PACKED:
        i_n, start, queries, first_row = locate_chunk(i_t, TQ, BN, N, cu_seqlens, PACKED)
        keys = queries
        if first_row >= queries:
            return
        i_t = first_row // BN
    shift = keys - queries
    first = i_t * BN
    last = tl.minimum(first + BN, keys) - 1
    o_k = first + tl.arange(0, BN)
    b_k = load_tile(k + i_b * s_kb + start * s_kt + i_hk * s_kh, first, keys, s_kt, K, BN, BK, True)
    b_v = load_tile(v + i_b * s_vb + start * s_vt + i_hk * s_vh, first, keys, s_vt, V, BN, BV, True)
    b_dk = tl.zeros([BN, BK], tl.float32)
    b_dv = tl.zeros([BN, BV], tl.float32)
    m_min, full_min, full_max, m_max = query_tiles(first, last, queries, shift, window, sinks, BM, CAUSAL, WINDOW)
    if order is not None:
        # convert query tile indices to positions in the list of query tiles that hold a selected query
        offset = list_offset(i_b, i_n, start, tl.cdiv(TQ, BM), BM, PACKED)
        order += offset
        m_min = tl.load(ranks + offset + m_min)
        full_min = tl.load(ranks + offset + full_min)
        full_max = tl.load(ranks + offset + full_max)
        m_max = tl.load(ranks + offset + m_max)
    mask = VisibleTo(o_k, shift, keys, window, sinks)
    for i_h in range(i_hk * (HQ // H), (i_hk + 1) * (HQ // H)):
        q_rows = Rows(q + i_b * s_qb + start * s_qt + i_h * s_qh, s_qt)
        do_rows = Rows(do + i_b * s_db + start * s_dt + i_h * s_dh, s_dt)
        o_row = (i_b * HQ + i_h) * TQ + start
        given = QueryRows(q_rows, do_rows, lse + o_row, delta + o_row, queries)
        for i_q in range(full_min, full_max):
            b_dk, b_dv = dkdv_step(
                (b_dk, b_dv), (b_k, b_v), given, listed(order, i_q), mask, scale * LOG2_E,
                Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BM, False,
            )  # fmt: skip
        for i in range(0, full_min - m_min + m_max - full_max):
            i_q = masked_tile(i, 0, m_min, full_min, full_max)
            b_dk, b_dv = dkdv_step(
                (b_dk, b_dv), (b_k, b_v), given, listed(order, i_q), mask, scale * LOG2_E,
                Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BM, True,
            )  # fmt: skip
    store_tile(dk + (i_b * TK + start) * H * K + i_hk * K, b_dk * scale, first, keys, H * K, K, BN, BK)
    store_tile(dv + (i_b * TK + start) * H * V + i_hk * V, b_dv, first, keys, H * V, V, BN, BV)


def attention_backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask: Mask, scale, selected=None, fill=True, impl=None):
    """Return dq, dk and dv from the gradients of o and of the log-sum-exp (`dlse`, None for zero).

    The other arguments are the arguments of `attention_forward` and its results, o and lse.
    """
    q, k, v, do = (dense_rows(x) for x in (q, k, v, do))
    if limit(q, k, v) is None and limit(q, k, v, do) is not None:
        # autograd determines the layout of do: copy do if only its layout prevents Gluon kernels
        do = do.clone(memory_format=torch.contiguous_format)
    (B, TQ, HQ, _), (TK, H) = q.shape, k.shape[1:3]
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    # the dQ kernel stores delta or bias columns for the dK/dV kernel, but skips query tiles without a selected query.
    # A query tile of the dK/dV kernel must therefore lie within one query tile of the dQ kernel
    delta = torch.empty_like(lse)
    by = plan(q, k, v, mask, impl, do, cu_seqlens=cu_seqlens, chosen=selected is not None, scale=scale)
    bias = lse.new_empty(*lse.shape, BIAS_COLUMNS.value, dtype=torch.bfloat16) if by.keys is Form.ONE else None
    given = dict(q=q, k=k, v=v, do=do, lse=lse, delta=delta, cu_seqlens=cu_seqlens)

    if isinstance(by.queries, Form):
        from tokenmix_core.ops.softmax_attention.hopper.backward import backward_queries

        backward_queries(
            **given, bias=bias, o=o, dlse=dlse, dq=dq, mask=mask, scale=scale, selected=selected, fill=fill
        )  # fmt: skip
    else:
        tiles = chunk_slots(1, TQ, by.queries.BM, cu_seqlens)
        _attention_backward_queries[(tiles * HQ * B,)](
            **given, bias=bias, o=o, dlse=dlse, dq=dq, selected=selected, **strides(q=q, k=k, v=v, d=do),
            **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale,
            **constants(q, v, cu_seqlens, mask, by.queries), BS=sink_step(q, mask, by.queries.BN),
            FILL=fill,
        )  # fmt: skip
    # without `selected`, the dK/dV kernel treats sinks as ordinary keys of the window, and `first_keys_backward`
    # overwrites their rows of the gradients: all queries see sinks, so with a window their KV tile would end long after
    # all other tiles
    sinks = mask.sinks if selected is None else 0
    mask = mask._replace(sinks=mask.sinks - sinks)
    if by.keys is Form.ONE:
        from tokenmix_core.ops.softmax_attention.hopper.backward import backward_keys

        backward_keys(
            q=q, k=k, v=v, do=do, bias=bias, dk=dk, dv=dv, cu_seqlens=cu_seqlens, mask=mask, scale=scale,
            selected=selected,
        )  # fmt: skip
    else:
        tiles = chunk_slots(1, TK, by.keys.BN, cu_seqlens)
        ranks, order = (None, None) if selected is None else list_tiles(selected, cu_seqlens, by.keys.BM)
        _attention_backward_keys[(tiles * H * B,)](
            **given, dk=dk, dv=dv, ranks=ranks, order=order, **strides(q=q, k=k, v=v, d=do),
            **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale, **constants(q, v, cu_seqlens, mask, by.keys),
        )  # fmt: skip
    if sinks:
        first_keys_backward(**given, dk=dk, dv=dv, count=sinks, window=mask.window, scale=scale)
    return dq, dk, dv
