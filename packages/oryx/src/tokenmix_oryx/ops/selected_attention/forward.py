"""The forward kernel: a tile of queries meets its keys tile by tile, or ends at once when none of it is selected."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.attention.forward import block_size, dense_rows, meet_keys, precision
from tokenmix_core.ops.attention.tiles import key_tiles, load_tile, store_tile
from tokenmix_core.tile.masks import locate_tile
from tokenmix_core.tile.softmax import finish_softmax


@triton.jit
def selected_forward_kernel(
    q, k, v, selected, o, lse, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
    TQ, TK, HQ, H, N, tiles, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_t = tiles - 1 - pid % tiles
    i_h = (pid // tiles % HQ).to(tl.int64)
    i_b = (pid // tiles // HQ).to(tl.int64)
    i_hk = i_h // (HQ // H)
    start = i_b * 0
    queries = TQ
    keys = TK
    if PACKED:
        _, i_t, start, queries = locate_tile(cu_seqlens, N, i_t, BM)
        keys = queries
        if i_t * BM >= queries:
            return
    o_t = i_t * BM + tl.arange(0, BM)
    m_t = tl.load(selected + i_b * TQ + start + o_t, mask=o_t < queries, other=0) != 0
    p_o = o + (i_b * TQ + start) * HQ * V + i_h * V
    p_lse = lse + (i_b * HQ + i_h) * TQ + start
    b_o = tl.zeros([BM, BV], tl.float32)
    if tl.max(m_t.to(tl.int32)) == 0:
        store_tile(p_o, b_o, i_t * BM, queries, HQ * V, V, BM, BV)
        tl.store(p_lse + o_t, tl.full([BM], float("inf"), tl.float32), mask=o_t < queries)
        return

    p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
    p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)
    first = i_t * BM + keys - queries
    o_q = first + tl.arange(0, BM)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    _, _, full, end, stop = key_tiles(first, tl.minimum(first + BM, keys) - 1, keys, 0, 0, BN, True, False)
    for i_k in range(full, end):
        b_o, b_m, b_l = meet_keys(
            b_o, b_m, b_l, b_q, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, 0, 0, scale,
            K, V, BN, BK, BV, True, False, False, PRECISION,
        )  # fmt: skip
    for i_k in range(end, stop):
        b_o, b_m, b_l = meet_keys(
            b_o, b_m, b_l, b_q, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, 0, 0, scale,
            K, V, BN, BK, BV, True, False, True, PRECISION,
        )  # fmt: skip
    b_norm, b_lse = finish_softmax(b_m, b_l, scale)
    b_o = tl.where(m_t[:, None], b_o * b_norm[:, None], 0.0)
    store_tile(p_o, b_o, i_t * BM, queries, HQ * V, V, BM, BV)
    # probabilities recomputed from +∞ are 0: the rows drop out of every gradient
    tl.store(p_lse + o_t, tl.where(m_t, b_lse, float("inf")), mask=o_t < queries)


def selected_forward(q, k, v, selected, cu_seqlens, scale):
    """o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`."""
    q, k, v = (dense_rows(x) for x in (q, k, v))
    (B, TQ, HQ, K), (_, TK, H, V) = q.shape, v.shape
    o, lse = q.new_empty(B, TQ, HQ, V), q.new_empty(B, HQ, TQ, dtype=torch.float32)
    BM, BN, warps, stages = tuning.attention("forward", max(K, V), q.dtype)
    N = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    tiles = cdiv(TQ, BM) if cu_seqlens is None else TQ // BM + N
    selected_forward_kernel[(tiles * HQ * B,)](
        q, k, v, selected, o, lse, cu_seqlens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        TQ, TK, HQ, H, N, tiles, scale * math.log2(math.e),
        K, V, BM, BN, block_size(K), block_size(V), cu_seqlens is not None,
        precision(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, lse
