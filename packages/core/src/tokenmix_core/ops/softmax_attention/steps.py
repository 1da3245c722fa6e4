"""One loop step of each portable attention kernel, and the named tuples that are its arguments.

Dense attention reads contiguous KV tiles and masks them by distance. Sparse attention (`Config.LISTED`) reads keys at
given positions: each tile holds either listed keys (retained keys, gathered by a list of their positions) or local
keys, and the mask treats the two differently.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tokenmix_core.kernels.triton.decay import LOG2_E
from tokenmix_core.kernels.triton.masks import visible, visible_columns
from tokenmix_core.kernels.triton.softmax import online_softmax
from tokenmix_core.kernels.triton.varlen import locate_chunk
from tokenmix_core.ops.softmax_attention.kv_tiles import add_dot, load_rows, load_tile, store_tile


class Config(NamedTuple):
    """Compile-time constants: head sizes, widths of their tiles, MMA precision, mask, and whether keys are listed.

    Pass a `Config(…)` expression to device functions: assigning it to a variable would turn its fields into tensors.
    """

    K: tl.constexpr
    V: tl.constexpr
    BK: tl.constexpr
    BV: tl.constexpr
    PRECISION: tl.constexpr
    CAUSAL: tl.constexpr = False
    WINDOW: tl.constexpr = False
    LISTED: tl.constexpr = False


class QueryTile(NamedTuple):
    """The query tile of a program: BM queries of one head of one sequence.

    Attributes:
        i_b: batch row, int64.
        i_h: query head, int64.
        i_hk: key head, int64.
        i_n: sequence of a packed batch, else 0.
        i_t: index of the tile in its sequence.
        first_row: first query of the tile, past the last query of the sequence if the tile is unused.
        start: first token of the sequence in its batch row, int64.
        queries: number of queries of the sequence.
        keys: number of keys of the sequence.
    """

    i_b: tl.tensor
    i_h: tl.tensor
    i_hk: tl.tensor
    i_n: tl.tensor
    i_t: tl.tensor
    first_row: tl.tensor
    start: tl.tensor
    queries: tl.tensor
    keys: tl.tensor


class Rows(NamedTuple):
    """A matrix in global memory: the pointer to its first row, and the stride between rows."""

    pointer: tl.tensor
    stride: tl.tensor


class KeyRows(NamedTuple):
    """K and V of one head and sequence, and the number of keys."""

    k: Rows
    v: Rows
    keys: tl.tensor


class Queries(NamedTuple):
    """A query tile: Q, dO, lse in base 2, and delta."""

    b_q: tl.tensor
    b_do: tl.tensor
    b_lse: tl.tensor
    b_delta: tl.tensor


class QueryRows(NamedTuple):
    """Q, dO, lse and delta of one head and sequence, and the number of queries."""

    q: Rows
    do: Rows
    lse: tl.tensor
    delta: tl.tensor
    queries: tl.tensor


class Visible(NamedTuple):
    """Dense mask of the queries at positions `o_q`; `window` and `sinks` are arguments of `visible`."""

    o_q: tl.tensor
    window: tl.tensor
    sinks: tl.tensor


class VisibleColumns(NamedTuple):
    """Mask of queries at positions `o_q` over a tile of gathered keys; its fields are those of `visible_columns`."""

    o_q: tl.tensor
    b_left: tl.tensor
    listed: tl.tensor
    p_until: tl.tensor
    s_ut: tl.tensor


class VisibleTo(NamedTuple):
    """Dense mask of the queries that see the keys at positions `o_k`; query i is at position i + shift."""

    o_k: tl.tensor
    shift: tl.tensor
    keys: tl.tensor
    window: tl.tensor
    sinks: tl.tensor


class ColumnsVisibleTo(NamedTuple):
    """Mask of the keys at `o_k`: queries `o_k` … `b_end − 1` see a key; from query `b_away` on it counts as listed.

    `b_away` is None unless `dkdv_step` sums the gradient of `keep`.
    """

    o_k: tl.tensor
    shift: tl.tensor
    b_away: tl.tensor
    b_end: tl.tensor


@triton.jit
def locate_query_tile(indices, TQ, TK, N, cu_seqlens, BM: tl.constexpr, PACKED: tl.constexpr):
    """Return the `QueryTile` of `indices`: batch row, query head, key head, and tile in the batch row."""
    i_b, i_h, i_hk, i_t = indices
    i_n = 0
    start = i_b * 0
    queries = TQ
    keys = TK
    first_row = i_t * BM
    if PACKED:
        i_n, start, queries, first_row = locate_chunk(i_t, TQ, BM, N, cu_seqlens, PACKED)
        i_t = first_row // BM
        keys = queries
    return QueryTile(i_b, i_h, i_hk, i_n, i_t, first_row, start, queries, keys)


@triton.jit
def load_keys(x: Rows, at, keys, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CHECK: tl.constexpr, LISTED):
    """Load a tile of K or V: if `LISTED`, the rows at positions `at`; else BN rows, the first of which is row `at`.

    CHECK: whether rows from `keys` on, which do not exist, may occur and are then 0.
    """
    if LISTED:
        return load_rows(x.pointer, at, keys, x.stride, D, BD, CHECK)
    else:
        return load_tile(x.pointer, at, keys, x.stride, D, BN, BD, CHECK)


@triton.jit
def mask_of(mask, at, keys, BN: tl.constexpr, config: Config):
    """Return the mask of a tile: whether each query sees each key at `at`, by `Visible` or `VisibleColumns`."""
    if config.LISTED:
        return visible_columns(mask.o_q, mask.b_left, at, mask.listed, mask.p_until, mask.s_ut, keys)
    else:
        o_k = at + tl.arange(0, BN)
        distance = mask.o_q[:, None] - o_k[None, :]
        return visible(distance, o_k[None, :], keys, mask.window, mask.sinks, config.CAUSAL, config.WINDOW)


@triton.jit
def attention_step(state, b_q, kv: KeyRows, at, mask, scale, config: Config, BN: tl.constexpr, MASKED: tl.constexpr):
    """One online-softmax step: add the KV tile at `at` (see `load_keys`) to accumulator, row maxima and row sums.

    MASKED: whether the mask may hide some keys of the tile from some queries.
    """
    b_o, b_m, b_l = state
    b_k = load_keys(kv.k, at, kv.keys, config.K, config.BK, BN, MASKED, config.LISTED)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=config.PRECISION)
    if MASKED:
        b_s = tl.where(mask_of(mask, at, kv.keys, BN, config), b_s, float("-inf"))
    b_p, b_shrink, b_m, b_l = online_softmax(b_s, b_m, b_l, scale, MASKED)
    b_v = load_keys(kv.v, at, kv.keys, config.V, config.BV, BN, MASKED, config.LISTED)
    b_o = add_dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None], config.PRECISION)
    return b_o, b_m, b_l


@triton.jit
def store_outputs(o, lse, tile: QueryTile, b_o, b_norm, b_lse, TQ, HQ, config: Config, BM: tl.constexpr):
    """Multiply the accumulator `b_o` by `b_norm`, the reciprocal row sums; store O and lse of a query tile."""
    s_ot = HQ * config.V
    p_o = o + (tile.i_b * TQ + tile.start) * s_ot + tile.i_h * config.V
    store_tile(p_o, b_o * b_norm[:, None], tile.i_t * BM, tile.queries, s_ot, config.V, BM, config.BV)
    o_t = tile.i_t * BM + tl.arange(0, BM)
    tl.store(lse + (tile.i_b * HQ + tile.i_h) * TQ + tile.start + o_t, b_lse, mask=o_t < tile.queries)


@triton.jit
def load_statistics(o, vectors, tile: QueryTile, b_do, TQ, HQ, config: Config, BM: tl.constexpr):
    """Load lse of a query tile; compute and store its delta = rowsum(dO ∘ O) − dlse.

    `vectors` are lse, dlse or None, and delta, `[B, HQ, TQ]`.

    Returns:
        lse in base 2, and delta.
    """
    lse, dlse, delta = vectors
    o_t = tile.i_t * BM + tl.arange(0, BM)
    o_row = (tile.i_b * HQ + tile.i_h) * TQ + tile.start
    b_lse = tl.load(lse + o_row + o_t, mask=o_t < tile.queries, other=0.0) * LOG2_E
    s_ot = HQ * config.V
    p_o = o + (tile.i_b * TQ + tile.start) * HQ * config.V + tile.i_h * config.V
    b_o = load_tile(p_o, tile.i_t * BM, tile.queries, s_ot, config.V, BM, config.BV, True)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if dlse is not None:
        b_delta -= tl.load(dlse + o_row + o_t, mask=o_t < tile.queries, other=0.0)
    tl.store(delta + o_row + o_t, b_delta, mask=o_t < tile.queries)
    return b_lse, b_delta


@triton.jit
def dq_step(b_dq, given: Queries, kv: KeyRows, at, mask, scale, config: Config, BN: tl.constexpr, MASKED: tl.constexpr):
    """Add the terms of the KV tile at `at` (see `load_keys`) to dQ; MASKED as for `attention_step`."""
    b_k = load_keys(kv.k, at, kv.keys, config.K, config.BK, BN, MASKED, config.LISTED)
    b_v = load_keys(kv.v, at, kv.keys, config.V, config.BV, BN, MASKED, config.LISTED)
    b_p = tl.exp2(tl.dot(given.b_q, tl.trans(b_k), input_precision=config.PRECISION) * scale - given.b_lse[:, None])
    if MASKED:
        b_p = tl.where(mask_of(mask, at, kv.keys, BN, config), b_p, 0.0)
    b_dp = tl.dot(given.b_do, tl.trans(b_v), input_precision=config.PRECISION)
    b_ds = b_p * (b_dp - given.b_delta[:, None])
    return add_dot(b_ds.to(b_k.dtype), b_k, b_dq, config.PRECISION)


@triton.jit
def dkdv_step(sums, kv, given: QueryRows, i_q, mask, scale, config: Config, BM: tl.constexpr, MASKED: tl.constexpr):
    """Add the terms of query tile `i_q` of a head to dK and dV, the first two of `sums`; `kv` are tiles of K and V.

    For listed keys the third of `sums` is the gradient of `keep`, the factors that select keys: dS summed over the
    queries that see a key as a listed one.
    """
    b_k, b_v = kv
    o_q = i_q * BM + tl.arange(0, BM)
    m_q = o_q < given.queries
    b_q = load_tile(given.q.pointer, i_q * BM, given.queries, given.q.stride, config.K, BM, config.BK, MASKED)
    b_do = load_tile(given.do.pointer, i_q * BM, given.queries, given.do.stride, config.V, BM, config.BV, MASKED)
    b_lse = tl.load(given.lse + o_q, mask=m_q, other=0.0) * LOG2_E
    b_delta = tl.load(given.delta + o_q, mask=m_q, other=0.0)
    b_pt = tl.exp2(tl.dot(b_k, tl.trans(b_q), input_precision=config.PRECISION) * scale - b_lse[None, :])
    o_k = mask.o_k[:, None]
    if MASKED:
        if config.LISTED:
            m_s = (o_q[None, :] + mask.shift >= o_k) & (o_q[None, :] + mask.shift < mask.b_end[:, None])
        else:
            distance = o_q[None, :] + mask.shift - o_k
            m_s = visible(distance, o_k, mask.keys, mask.window, mask.sinks, config.CAUSAL, config.WINDOW)
        b_pt = tl.where(m_s & m_q[None, :], b_pt, 0.0)
    b_dv = add_dot(b_pt.to(b_do.dtype), b_do, sums[1], config.PRECISION)
    b_dpt = tl.dot(b_v, tl.trans(b_do), input_precision=config.PRECISION)
    b_dst = b_pt * (b_dpt - b_delta[None, :])
    if config.LISTED:
        b_dm = sums[2]
        if mask.b_away is not None:
            b_dm += tl.sum(tl.where(o_q[None, :] + mask.shift >= mask.b_away[:, None], b_dst, 0.0), 1)
        return add_dot(b_dst.to(b_q.dtype), b_q, sums[0], config.PRECISION), b_dv, b_dm
    else:
        return add_dot(b_dst.to(b_q.dtype), b_q, sums[0], config.PRECISION), b_dv
