"""The forward kernel: FlashAttention, a query tile per program, online softmax over KV tiles."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.softmax import finish_softmax
from tokenmix_core.ops.softmax_attention.kv_tiles import key_tiles, load_tile, masked_tile, store_tile, tile_of_queries
from tokenmix_core.ops.softmax_attention.launch_args import constants, dense_rows, sink_step, sizes, strides
from tokenmix_core.ops.softmax_attention.plan import Form, plan
from tokenmix_core.ops.softmax_attention.query_selection import selected_rows
from tokenmix_core.ops.softmax_attention.steps import (
    Config,
    KeyRows,
    Rows,
    Visible,
    attention_step,
    locate_query_tile,
    store_outputs,
)
from tokenmix_core.ops.softmax_attention.types import Mask


@cached_launch(loop_tiles=("BN",))
@triton.jit
def _attention_forward(
    q, k, v, o, lse, cu_seqlens, selected,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
    TQ, TK, HQ, H, N, tiles, window, sinks, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Compute O and lse of one query tile of one head; read sinks in one step of BS keys, or in tiles if BS is 0.

    FILL: whether to write O = 0 and lse = ∞ for a tile without selected queries.
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
                p_o = o + (i_b * TQ + start) * HQ * V + i_h * V
                store_tile(p_o, tl.zeros([BM, BV], tl.float32), i_t * BM, queries, HQ * V, V, BM, BV)
                p_lse = lse + (i_b * HQ + i_h) * TQ + start + i_t * BM + tl.arange(0, BM)
                tl.store(p_lse, tl.full([BM], float("inf"), tl.float32), mask=i_t * BM + tl.arange(0, BM) < queries)
            return
    k_rows = Rows(k + i_b * s_kb + start * s_kt + i_hk * s_kh, s_kt)
    v_rows = Rows(v + i_b * s_vb + start * s_vt + i_hk * s_vh, s_vt)
    kv = KeyRows(k_rows, v_rows, keys)
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)

    first = i_t * BM + keys - queries
    last = tl.minimum(first + BM, keys) - 1
    mask = Visible(first + tl.arange(0, BM), window, sinks)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BV], tl.float32)
    sink_tiles, n_min, full_min, full_max, n_max = key_tiles(first, last, keys, window, sinks, BN, CAUSAL, WINDOW)
    if BS:
        if sink_tiles > 0:
            b_o, b_m, b_l = attention_step(
                (b_o, b_m, b_l), b_q, kv, 0, mask, scale, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BS, True
            )
        sink_tiles = 0
    for i_k in range(full_min, full_max):
        b_o, b_m, b_l = attention_step(
            (b_o, b_m, b_l), b_q, kv, i_k * BN, mask, scale, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BN, False
        )
    for i in range(0, sink_tiles + full_min - n_min + n_max - full_max):
        i_k = masked_tile(i, sink_tiles, n_min, full_min, full_max)
        b_o, b_m, b_l = attention_step(
            (b_o, b_m, b_l), b_q, kv, i_k * BN, mask, scale, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BN, True
        )

    b_norm, b_lse = finish_softmax(b_m, b_l, scale)
    if selected is not None:
        # queries that are not selected get lse = +∞, so that the backward pass recomputes their probabilities as 0
        b_norm = tl.where(m_s, b_norm, 0.0)
        b_lse = tl.where(m_s, b_lse, float("inf"))
    store_outputs(o, lse, tile, b_o, b_norm, b_lse, TQ, HQ, Config(K, V, BK, BV, PRECISION, CAUSAL, WINDOW), BM)


def attention_forward(q, k, v, cu_seqlens, mask: Mask, scale, selected=None, fill=True, impl=None):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`.

    Queries that the mask `selected [B, TQ]` excludes get o = 0 and lse = +∞. Query tiles without a selected query are
    skipped: their outputs are set to these values if `fill`, else left uninitialised.
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
