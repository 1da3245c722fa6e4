"""The backward kernels: delta = rowsum(dO ∘ O) − dlse and dq by query tiles, then dk and dv by KV tiles.

Probabilities are recomputed from the log-sum-exp. The dK/dV kernel computes Sᵀ = K Qᵀ by an MMA of its own: transposing
the rounded S for the next MMA miscompiles on Hopper under Triton 3.6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import LOG2_E
from tokenmix_core.kernels.triton.masks import visible
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.softmax_attention.bias_columns import BIAS_COLUMNS, store_bias
from tokenmix_core.ops.softmax_attention.kv_tiles import (
    add_dot,
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
from tokenmix_core.ops.softmax_attention.types import Mask


@triton.jit
def dq_step(
    b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate dq over KV tile `i_k`."""
    b_k = load_tile(p_k, i_k * BN, keys, s_kt, K, BN, BK, MASKED)
    b_v = load_tile(p_v, i_k * BN, keys, s_vt, V, BN, BV, MASKED)
    b_p = tl.exp2(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale - b_lse[:, None])
    if MASKED:
        o_k = i_k * BN + tl.arange(0, BN)
        distance = o_q[:, None] - o_k[None, :]
        b_p = tl.where(visible(distance, o_k[None, :], keys, window, sinks, CAUSAL, WINDOW), b_p, 0.0)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = b_p * (b_dp - b_delta[:, None])
    return add_dot(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)


@cached_launch
@triton.jit
def _attention_backward_queries(
    q, k, v, o, do, lse, dlse, delta, bias, dq, cu_seqlens, selected,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh,
    TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    THROUGH_LSE: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Compute dq, delta and, unless `bias` is None, bias columns of one query tile of one head; sinks as forward."""
    i_b, i_h, i_hk, i_t = tile_of_queries(tiles, HQ, H)
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        _, start, queries, first_row = locate_chunk(i_t, TQ, BM, N, cu_seqlens, PACKED)
        keys = queries
        if first_row >= queries:
            return
        i_t = first_row // BM
    if selected is not None:
        m_s = selected_rows(selected, i_b * TQ + start, i_t * BM, queries, BM)
        if tl.max(m_s.to(tl.int32)) == 0:
            if FILL:
                p_dq = dq + (i_b * TQ + start) * HQ * K + i_h * K
                store_tile(p_dq, tl.zeros([BM, BK], tl.float32), i_t * BM, queries, HQ * K, K, BM, BK)
            return
    p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
    p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)
    b_do = load_tile(do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BM, queries, s_dt, V, BM, BV, True)
    o_t = i_t * BM + tl.arange(0, BM)
    o_row = (i_b * HQ + i_h) * TQ + start
    b_lse = tl.load(lse + o_row + o_t, mask=o_t < queries, other=0.0) * LOG2_E
    b_o = load_tile(o + (i_b * TQ + start) * HQ * V + i_h * V, i_t * BM, queries, HQ * V, V, BM, BV, True)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if THROUGH_LSE:
        b_delta -= tl.load(dlse + o_row + o_t, mask=o_t < queries, other=0.0)
    tl.store(delta + o_row + o_t, b_delta, mask=o_t < queries)
    if bias is not None:
        store_bias(bias, o_row + o_t, b_lse, b_delta, o_t < queries, scale * LOG2_E)

    first = i_t * BM + keys - queries
    last = tl.minimum(first + BM, keys) - 1
    o_q = first + tl.arange(0, BM)
    b_dq = tl.zeros([BM, BK], tl.float32)
    sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BN, CAUSAL, WINDOW)
    if BS:
        if sink_tiles > 0:
            b_dq = dq_step(
                b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, s_kt, s_vt, 0, o_q, keys, window, sinks, scale * LOG2_E,
                K, V, BS, BK, BV, CAUSAL, WINDOW, True, PRECISION,
            )  # fmt: skip
        sink_tiles = 0
    for i_k in range(full_min, full_max):
        b_dq = dq_step(
            b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, window, sinks, scale * LOG2_E,
            K, V, BN, BK, BV, CAUSAL, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in range(0, sink_tiles + full_min - n_min + n_max - full_max):
        b_dq = dq_step(
            b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, s_kt, s_vt,
            masked_tile(i, sink_tiles, n_min, full_min, full_max), o_q, keys, window, sinks, scale * LOG2_E,
            K, V, BN, BK, BV, CAUSAL, WINDOW, True, PRECISION,
        )  # fmt: skip
    store_tile(dq + (i_b * TQ + start) * HQ * K + i_h * K, b_dq * scale, i_t * BM, queries, HQ * K, K, BM, BK)


@triton.jit
def dkdv_step(
    b_dk, b_dv, b_k, b_v, p_q, p_do, p_lse, p_delta, s_qt, s_dt, i_q, o_k, queries, shift, keys, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate dk and dv over query tile `i_q`."""
    o_q = i_q * BM + tl.arange(0, BM)
    m_q = o_q < queries
    b_q = load_tile(p_q, i_q * BM, queries, s_qt, K, BM, BK, MASKED)
    b_do = load_tile(p_do, i_q * BM, queries, s_dt, V, BM, BV, MASKED)
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=0.0) * LOG2_E
    b_delta = tl.load(p_delta + o_q, mask=m_q, other=0.0)
    b_pt = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale - b_lse[None, :])
    if MASKED:
        distance = o_q[None, :] + shift - o_k[:, None]
        m_s = visible(distance, o_k[:, None], keys, window, sinks, CAUSAL, WINDOW)
        b_pt = tl.where(m_s & m_q[None, :], b_pt, 0.0)
    b_dv = add_dot(b_pt.to(b_do.dtype), b_do, b_dv, PRECISION)
    b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_dst = b_pt * (b_dpt - b_delta[None, :])
    b_dk = add_dot(b_dst.to(b_q.dtype), b_q, b_dk, PRECISION)
    return b_dk, b_dv


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
    # the first tiles, which most queries see, start first
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
        # from here on indices count the listed tiles, which hold a selected query
        offset = list_offset(i_b, i_n, start, tl.cdiv(TQ, BM), BM, PACKED)
        order += offset
        m_min = tl.load(ranks + offset + m_min)
        full_min = tl.load(ranks + offset + full_min)
        full_max = tl.load(ranks + offset + full_max)
        m_max = tl.load(ranks + offset + m_max)
    for i_h in range(i_hk * (HQ // H), (i_hk + 1) * (HQ // H)):
        p_q = q + i_b * s_qb + start * s_qt + i_h * s_qh
        p_do = do + i_b * s_db + start * s_dt + i_h * s_dh
        o_row = (i_b * HQ + i_h) * TQ + start
        for i_q in range(full_min, full_max):
            b_dk, b_dv = dkdv_step(
                b_dk, b_dv, b_k, b_v, p_q, p_do, lse + o_row, delta + o_row, s_qt, s_dt, listed(order, i_q), o_k,
                queries, shift, keys, window, sinks, scale * LOG2_E,
                K, V, BM, BK, BV, CAUSAL, WINDOW, False, PRECISION,
            )  # fmt: skip
        for i in range(0, full_min - m_min + m_max - full_max):
            b_dk, b_dv = dkdv_step(
                b_dk, b_dv, b_k, b_v, p_q, p_do, lse + o_row, delta + o_row, s_qt, s_dt,
                listed(order, masked_tile(i, 0, m_min, full_min, full_max)), o_k, queries, shift, keys,
                window, sinks, scale * LOG2_E, K, V, BM, BK, BV, CAUSAL, WINDOW, True, PRECISION,
            )  # fmt: skip
    store_tile(dk + (i_b * TK + start) * H * K + i_hk * K, b_dk * scale, first, keys, H * K, K, BN, BK)
    store_tile(dv + (i_b * TK + start) * H * V + i_hk * V, b_dv, first, keys, H * V, V, BN, BV)


def attention_backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask: Mask, scale, selected=None, fill=True, impl=None):
    """Return dq, dk and dv from the gradients of o and of the log-sum-exp (None: zero), as the forward pass."""
    q, k, v, do = (dense_rows(x) for x in (q, k, v, do))
    if limit(q, k, v) is None and limit(q, k, v, do) is not None:
        # callers do not choose the layout of a gradient: copy it for the kernels that take the other tensors
        do = do.clone(memory_format=torch.contiguous_format)
    (B, TQ, HQ, _), (TK, H) = q.shape, k.shape[1:3]
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    # the dQ kernel leaves delta, or bias columns, for the dK/dV kernel, with selected queries in visited tiles only: so
    # the second kernel's query tiles must lie within the first's
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
            THROUGH_LSE=dlse is not None, FILL=fill,
        )  # fmt: skip
    # all queries see a sink: with a window, its KV tile would be a long tail after all others
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
