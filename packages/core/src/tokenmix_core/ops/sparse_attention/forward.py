"""Triton forward kernel: a query tile attends to its local keys and to listed (retained) keys before them."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.softmax import finish_softmax
from tokenmix_core.ops.softmax_attention import steps
from tokenmix_core.ops.softmax_attention.kv_tiles import load_tile, masked_tile
from tokenmix_core.ops.softmax_attention.launch_args import dense_rows, listed_constants, listed_sizes, strides
from tokenmix_core.ops.softmax_attention.types import KeyLists
from tokenmix_core.ops.sparse_attention import tuning
from tokenmix_core.ops.sparse_attention.mask import left_of
from tokenmix_core.ops.sparse_attention.plan import takes_gluon
from tokenmix_core.ops.sparse_attention.tiles import columns, find_listed, local_tiles, tile_of_queries


@cached_launch(loop_tiles=("BN",))
@triton.jit
def _kept_attention_forward(
    q, k, v, o, lse, ranks, lists, until, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_ub, s_ut, s_uh,
    TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute O and lse of one query tile of one head per program."""
    tile = steps.locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BM, PACKED)
    i_b, i_h, i_hk, i_n, i_t, first_row, start, queries, keys = tile
    if PACKED:  # noqa: SIM102
        if first_row >= queries:
            return
    k_rows = steps.Rows(k + i_b * s_kb + start * s_kt + i_hk * s_kh, s_kt)
    v_rows = steps.Rows(v + i_b * s_vb + start * s_vt + i_hk * s_vh, s_vt)
    kv = steps.KeyRows(k_rows, v_rows, keys)
    p_until = until
    if until is not None:
        p_until = until + i_b * s_ub + start * s_ut + i_hk * s_uh
    b_q = load_tile(q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BM, queries, s_qt, K, BM, BK, True)

    first = i_t * BM + keys - queries
    last = tl.minimum(first + BM, keys) - 1
    o_q = first + tl.arange(0, BM)
    b_left = left_of(o_q, window, UNIT, WINDOW)
    n_min, full_min, full_max, n_max = local_tiles(first, last, window, keys, BN, UNIT, WINDOW)
    p_list, begin, whole, count = find_listed(
        ranks, lists, (i_b, i_hk // (H // HM), i_n, start), first, last, window, (U, HM), UNIT, WINDOW
    )
    # number of tiles of listed keys that need no mask
    unmasked = whole // BN
    if until is not None:
        unmasked = 0
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BV], tl.float32)
    for i in range(0, unmasked + full_max - full_min):
        o_k = columns(p_list, begin, i, i < unmasked, count, (full_min + i - unmasked) * BN, BN, UNIT)
        mask = steps.VisibleColumns(o_q, b_left, i < unmasked, p_until, s_ut)
        b_o, b_m, b_l = steps.attention_step(
            (b_o, b_m, b_l), b_q, kv, o_k, mask, scale, steps.Config(K, V, BK, BV, PRECISION, LISTED=True), BN, False
        )
    rest = tl.cdiv(count, BN) - unmasked
    for i in range(0, rest + full_min - n_min + n_max - full_max):
        i_k = masked_tile(i - rest, 0, n_min, full_min, full_max)
        o_k = columns(p_list, begin, unmasked + i, i < rest, count, i_k * BN, BN, UNIT)
        mask = steps.VisibleColumns(o_q, b_left, i < rest, p_until, s_ut)
        b_o, b_m, b_l = steps.attention_step(
            (b_o, b_m, b_l), b_q, kv, o_k, mask, scale, steps.Config(K, V, BK, BV, PRECISION, LISTED=True), BN, True
        )

    b_norm, b_lse = finish_softmax(b_m, b_l, scale)
    steps.store_outputs(
        o, lse, tile, b_o, b_norm, b_lse, TQ, HQ, steps.Config(K, V, BK, BV, PRECISION, LISTED=True), BM
    )


def kept_attention_forward(q, k, v, o, lse, keys: KeyLists, scale, impl) -> None:
    """Write o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]` of attention over local keys and the listed `keys`."""
    q, k, v = (dense_rows(x) for x in (q, k, v))
    if takes_gluon(impl, q, k, v, keys.until):
        from tokenmix_core.ops.sparse_attention.hopper.forward import forward

        forward(q, k, v, o, lse, keys, scale)
        return
    (B, TQ, HQ, K), V = q.shape, v.shape[3]
    tile = tuning.kept_attention("forward", max(K, V), q.dtype, keys.unit)
    tiles = chunk_slots(1, TQ, tile.BM, keys.cu_seqlens)
    _kept_attention_forward[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, lse=lse, ranks=keys.ranks, lists=keys.lists, until=keys.until, cu_seqlens=keys.cu_seqlens,
        **strides(q=q, k=k, v=v, u=keys.until), **listed_sizes(q, k, keys), tiles=tiles,
        scale=scale * math.log2(math.e), **listed_constants(q, v, tile, keys),
    )  # fmt: skip
