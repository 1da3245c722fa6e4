"""The forward kernel: FlashAttention, a query tile per program, online softmax over KV tiles."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.masks import visible
from tokenmix_core.kernels.triton.softmax import finish_softmax, online_softmax
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.softmax_attention.kv_tiles import (
    add_dot,
    key_tiles,
    load_tile,
    masked_tile,
    store_tile,
    tile_of_queries,
)
from tokenmix_core.ops.softmax_attention.launch_args import constants, dense_rows, sink_step, sizes, strides
from tokenmix_core.ops.softmax_attention.plan import Form, plan
from tokenmix_core.ops.softmax_attention.query_selection import selected_rows
from tokenmix_core.ops.softmax_attention.types import Mask


@triton.jit
def attention_step(
    b_o, b_m, b_l, b_q, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One online-softmax step: update the accumulator, row maxima and row sums by KV tile `i_k`."""
    b_k = load_tile(p_k, i_k * BN, keys, s_kt, K, BN, BK, MASKED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if MASKED:
        o_k = i_k * BN + tl.arange(0, BN)
        distance = o_q[:, None] - o_k[None, :]
        b_s = tl.where(visible(distance, o_k[None, :], keys, window, sinks, CAUSAL, WINDOW), b_s, float("-inf"))
    b_p, b_shrink, b_m, b_l = online_softmax(b_s, b_m, b_l, scale, MASKED)
    b_v = load_tile(p_v, i_k * BN, keys, s_vt, V, BN, BV, MASKED)
    b_o = add_dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None], PRECISION)
    return b_o, b_m, b_l


@cached_launch
@triton.jit
def _attention_forward(
    q, k, v, o, lse, cu_seqlens, selected,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
    TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Compute O and lse of one query tile of one head; sinks take a step of BS keys, or whole tiles if BS is 0."""
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
                p_o = o + (i_b * TQ + start) * HQ * V + i_h * V
                store_tile(p_o, tl.zeros([BM, BV], tl.float32), i_t * BM, queries, HQ * V, V, BM, BV)
                p_lse = lse + (i_b * HQ + i_h) * TQ + start + i_t * BM + tl.arange(0, BM)
                tl.store(p_lse, tl.full([BM], float("inf"), tl.float32), mask=i_t * BM + tl.arange(0, BM) < queries)
            return
    p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
    p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)

    first = i_t * BM + keys - queries
    last = tl.minimum(first + BM, keys) - 1
    o_q = first + tl.arange(0, BM)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BV], tl.float32)
    sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BN, CAUSAL, WINDOW)
    if BS:
        if sink_tiles > 0:
            b_o, b_m, b_l = attention_step(
                b_o, b_m, b_l, b_q, p_k, p_v, s_kt, s_vt, 0, o_q, keys, window, sinks, scale,
                K, V, BS, BK, BV, CAUSAL, WINDOW, True, PRECISION,
            )  # fmt: skip
        sink_tiles = 0
    for i_k in range(full_min, full_max):
        b_o, b_m, b_l = attention_step(
            b_o, b_m, b_l, b_q, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, window, sinks, scale,
            K, V, BN, BK, BV, CAUSAL, WINDOW, False, PRECISION,
        )  # fmt: skip
    for i in range(0, sink_tiles + full_min - n_min + n_max - full_max):
        b_o, b_m, b_l = attention_step(
            b_o, b_m, b_l, b_q, p_k, p_v, s_kt, s_vt, masked_tile(i, sink_tiles, n_min, full_min, full_max), o_q, keys,
            window, sinks, scale, K, V, BN, BK, BV, CAUSAL, WINDOW, True, PRECISION,
        )  # fmt: skip

    b_norm, b_lse = finish_softmax(b_m, b_l, scale)
    if selected is not None:
        # probabilities recomputed from +∞ are 0: these rows drop out of all gradients
        b_norm = tl.where(m_s, b_norm, 0.0)
        b_lse = tl.where(m_s, b_lse, float("inf"))
    s_ot = HQ * V
    store_tile(o + (i_b * TQ + start) * s_ot + i_h * V, b_o * b_norm[:, None], i_t * BM, queries, s_ot, V, BM, BV)
    o_t = i_t * BM + tl.arange(0, BM)
    tl.store(lse + (i_b * HQ + i_h) * TQ + start + o_t, b_lse, mask=o_t < queries)


def attention_forward(q, k, v, cu_seqlens, mask: Mask, scale, selected=None, fill=True, impl=None):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`.

    Queries outside the mask `selected [B, TQ]` get 0 and +∞. Tiles without a selected query are skipped, and written
    only with `fill`.
    """
    q, k, v = (dense_rows(x) for x in (q, k, v))
    (B, TQ, HQ, _), V = q.shape, v.shape[3]
    o, lse = q.new_empty(B, TQ, HQ, V), q.new_empty(B, HQ, TQ, dtype=torch.float32)
    tile = plan(q, k, v, mask, impl, cu_seqlens=cu_seqlens, chosen=selected is not None).forward
    if isinstance(tile, Form):
        if tile is Form.GROUPS:
            from tokenmix_core.ops.softmax_attention.hopper.forward_ws import forward
        else:
            from tokenmix_core.ops.softmax_attention.hopper.forward import forward

        forward(q=q, k=k, v=v, o=o, lse=lse, cu_seqlens=cu_seqlens, mask=mask, scale=scale)
        return o, lse
    tiles = chunk_slots(1, TQ, tile.BM, cu_seqlens)
    _attention_forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, cu_seqlens=cu_seqlens, selected=selected, **strides(q=q, k=k, v=v),
        **sizes(q, k, cu_seqlens, mask), tiles=tiles, scale=scale * math.log2(math.e),
        **constants(q, v, cu_seqlens, mask, tile), BS=sink_step(q, mask, tile.BN), FILL=fill,
    )  # fmt: skip
    return o, lse
