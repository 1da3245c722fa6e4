"""The backward kernels: dq by tiles of queries; a list of the tiles that count; dk and dv by tiles of keys along it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.attention.backward import meet_keys, meet_queries
from tokenmix_core.ops.attention.forward import block_size, dense_rows, precision
from tokenmix_core.ops.attention.tiles import key_tiles, load_tile, query_tiles, store_tile
from tokenmix_core.tile.masks import locate_tile
from tokenmix_core.tile.sequences import sequence_span


@triton.jit
def selected_backward_queries_kernel(
    q, k, v, selected, o, do, lse, delta, dq, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh,
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
    o_row = (i_b * HQ + i_h) * TQ + start
    m_t = tl.load(selected + i_b * TQ + start + o_t, mask=o_t < queries, other=0) != 0
    p_dq = dq + (i_b * TQ + start) * HQ * K + i_h * K
    b_dq = tl.zeros([BM, BK], tl.float32)
    if tl.max(m_t.to(tl.int32)) == 0:
        store_tile(p_dq, b_dq, i_t * BM, queries, HQ * K, K, BM, BK)
        tl.store(delta + o_row + o_t, tl.zeros([BM], tl.float32), mask=o_t < queries)
        return

    log2e: tl.constexpr = 1.4426950408889634
    p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
    p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)
    b_do = load_tile(do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BM, queries, s_dt, V, BM, BV, True)
    b_lse = tl.load(lse + o_row + o_t, mask=o_t < queries, other=float("inf")) * log2e
    b_o = load_tile(o + (i_b * TQ + start) * HQ * V + i_h * V, i_t * BM, queries, HQ * V, V, BM, BV, True)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(delta + o_row + o_t, b_delta, mask=o_t < queries)
    first = i_t * BM + keys - queries
    o_q = first + tl.arange(0, BM)
    _, _, full, end, stop = key_tiles(first, tl.minimum(first + BM, keys) - 1, keys, 0, 0, BN, True, False)
    for i_k in range(full, end):
        b_dq = meet_keys(
            b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, 0, 0, scale * log2e,
            K, V, BN, BK, BV, True, False, False, PRECISION,
        )  # fmt: skip
    for i_k in range(end, stop):
        b_dq = meet_keys(
            b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, s_kt, s_vt, i_k, o_q, keys, 0, 0, scale * log2e,
            K, V, BN, BK, BV, True, False, True, PRECISION,
        )  # fmt: skip
    store_tile(p_dq, b_dq * scale, i_t * BM, queries, HQ * K, K, BM, BK)


@triton.jit
def first_slot(i_b, i_n, start, tiles, BM: tl.constexpr, PACKED: tl.constexpr):
    """Where the list of sequence `i_n` begins: it has room for its tiles and one more."""
    slot = i_b * (tiles + 1)
    if PACKED:
        slot = start // BM + 2 * i_n
    return slot


@triton.jit
def list_tiles_kernel(
    selected, ranks, order, cu_seqlens, TQ, tiles, BM: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr
):
    """For each sequence the tiles of queries with a selected one, in order, and how many lie before each tile."""
    i_n = tl.program_id(0)
    start, length = sequence_span(i_n, TQ, cu_seqlens, PACKED)
    slot = first_slot(i_n.to(tl.int64), i_n, start, tiles, BM, PACKED)
    count = 0
    for i in range(0, tl.cdiv(length, BM) + 1, BT):
        o_i = i + tl.arange(0, BT)
        o_t = o_i[:, None] * BM + tl.arange(0, BM)[None, :]
        b_any = tl.max(tl.load(selected + start + o_t, mask=o_t < length, other=0).to(tl.int32), 1)
        b_any = (b_any != 0).to(tl.int32)
        b_rank = count + tl.cumsum(b_any, 0) - b_any
        tl.store(ranks + slot + o_i, b_rank, mask=o_i <= tl.cdiv(length, BM))
        tl.store(order + slot + b_rank, o_i, mask=b_any != 0)
        count += tl.sum(b_any)


@triton.jit
def selected_backward_keys_kernel(
    q, k, v, do, lse, delta, ranks, order, dk, dv, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh,
    TQ, TK, HQ, H, N, tiles, query_slots, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i_t = pid % tiles
    i_hk = (pid // tiles % H).to(tl.int64)
    i_b = (pid // tiles // H).to(tl.int64)
    start = i_b * 0
    i_n = 0
    queries = TQ
    keys = TK
    if PACKED:
        i_n, i_t, start, queries = locate_tile(cu_seqlens, N, i_t, BN)
        keys = queries
        if i_t * BN >= keys:
            return
    log2e: tl.constexpr = 1.4426950408889634
    shift = keys - queries
    first = i_t * BN
    last = tl.minimum(first + BN, keys) - 1
    o_k = first + tl.arange(0, BN)
    b_k = load_tile(k + i_b * s_kb + start * s_kt + i_hk * s_kh, first, keys, s_kt, K, BN, BK, True)
    b_v = load_tile(v + i_b * s_vb + start * s_vt + i_hk * s_vh, first, keys, s_vt, V, BN, BV, True)
    b_dk = tl.zeros([BN, BK], tl.float32)
    b_dv = tl.zeros([BN, BV], tl.float32)
    near, full, end, stop = query_tiles(first, last, queries, shift, 0, 0, BM, True, False)
    slot = first_slot(i_b, i_n, start, query_slots, BM, PACKED)
    ranks += slot
    order += slot
    near = tl.load(ranks + near)
    full = tl.load(ranks + full)
    end = tl.load(ranks + end)
    stop = tl.load(ranks + stop)
    for i_h in range(i_hk * (HQ // H), (i_hk + 1) * (HQ // H)):
        p_q = q + i_b * s_qb + start * s_qt + i_h * s_qh
        p_do = do + i_b * s_db + start * s_dt + i_h * s_dh
        o_row = (i_b * HQ + i_h) * TQ + start
        for i in range(full, end):
            b_dk, b_dv = meet_queries(
                b_dk, b_dv, b_k, b_v, p_q, p_do, lse + o_row, delta + o_row, s_qt, s_dt, tl.load(order + i), o_k,
                queries, shift, keys, 0, 0, scale * log2e, K, V, BM, BK, BV, True, False, False, PRECISION,
            )  # fmt: skip
        for i in range(0, full - near + stop - end):
            i_q = tl.load(order + tl.where(near + i < full, near + i, end + near + i - full))
            b_dk, b_dv = meet_queries(
                b_dk, b_dv, b_k, b_v, p_q, p_do, lse + o_row, delta + o_row, s_qt, s_dt, i_q, o_k,
                queries, shift, keys, 0, 0, scale * log2e, K, V, BM, BK, BV, True, False, True, PRECISION,
            )  # fmt: skip
    store_tile(dk + (i_b * TK + start) * H * K + i_hk * K, b_dk * scale, first, keys, H * K, K, BN, BK)
    store_tile(dv + (i_b * TK + start) * H * V + i_hk * V, b_dv, first, keys, H * V, V, BN, BV)


def selected_backward(q, k, v, selected, o, lse, do, cu_seqlens, scale):
    """dq, dk and dv from the gradient of o."""
    q, k, v, do = (dense_rows(x) for x in (q, k, v, do))
    (B, TQ, HQ, K), (_, TK, H, V) = q.shape, v.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    packed = cu_seqlens is not None
    N = len(cu_seqlens) - 1 if packed else 0
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])

    # the kernel of dq leaves delta for the kernel of dk and dv
    BM, BN, warps, stages = tuning.attention("backward_queries", max(K, V), q.dtype)
    tiles = TQ // BM + N if packed else cdiv(TQ, BM)
    selected_backward_queries_kernel[(tiles * HQ * B,)](
        q, k, v, selected, o, do, lse, delta, dq, cu_seqlens, *strides, TQ, TK, HQ, H, N, tiles, scale,
        K, V, BM, BN, block_size(K), block_size(V), packed, precision(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    BM, BN, warps, stages = tuning.attention("backward_keys", max(K, V), q.dtype)
    query_tiles = cdiv(TQ, BM)
    slots = TQ // BM + 2 * N if packed else B * (query_tiles + 1)
    ranks, order = torch.empty(2, slots, dtype=torch.int32, device=q.device)
    list_tiles_kernel[(N if packed else B,)](selected, ranks, order, cu_seqlens, TQ, query_tiles, BM, packed, 64)
    tiles = TK // BN + N if packed else cdiv(TK, BN)
    selected_backward_keys_kernel[(tiles * H * B,)](
        q, k, v, do, lse, delta, ranks, order, dk, dv, cu_seqlens, *strides,
        TQ, TK, HQ, H, N, tiles, query_tiles, scale,
        K, V, BM, BN, block_size(K), block_size(V), packed, precision(q.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dq, dk, dv
