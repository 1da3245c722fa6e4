"""Triton kernel of dQ: delta = rowsum(dO ∘ O) − dlse, and dq over the tiles of keys that the forward pass visits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import LOG2_E
from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.softmax_attention import steps
from tokenmix_core.ops.softmax_attention.bias_columns import BIAS_COLUMNS
from tokenmix_core.ops.softmax_attention.kv_tiles import load_tile, masked_tile, store_tile
from tokenmix_core.ops.softmax_attention.launch_args import dense_rows, listed_constants, listed_sizes, strides
from tokenmix_core.ops.softmax_attention.plan import MIN_SCALE
from tokenmix_core.ops.softmax_attention.types import KeyLists
from tokenmix_core.ops.sparse_attention import tuning
from tokenmix_core.ops.sparse_attention.mask import left_of
from tokenmix_core.ops.sparse_attention.plan import takes_gluon
from tokenmix_core.ops.sparse_attention.tiles import columns, find_listed, local_tiles, tile_of_queries


@cached_launch(loop_tiles=("BN",))
@triton.jit
def _kept_attention_backward_queries(
    q, k, v, o, do, lse, dlse, delta, dq, ranks, lists, until, cu_seqlens,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh, s_ub, s_ut, s_uh,
    TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq and delta of one query tile of one head per program."""
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
    b_do = load_tile(do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BM, queries, s_dt, V, BM, BV, True)
    b_lse, b_delta = steps.load_statistics(
        o, (lse, dlse, delta), tile, b_do, TQ, HQ, steps.Config(K, V, BK, BV, PRECISION, LISTED=True), BM
    )  # fmt: skip
    given = steps.Queries(b_q, b_do, b_lse, b_delta)

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
    b_dq = tl.zeros([BM, BK], tl.float32)
    for i in range(0, unmasked + full_max - full_min):
        o_k = columns(p_list, begin, i, i < unmasked, count, (full_min + i - unmasked) * BN, BN, UNIT)
        mask = steps.VisibleColumns(o_q, b_left, i < unmasked, p_until, s_ut)
        b_dq = steps.dq_step(
            b_dq, given, kv, o_k, mask, scale * LOG2_E, steps.Config(K, V, BK, BV, PRECISION, LISTED=True), BN, False
        )
    rest = tl.cdiv(count, BN) - unmasked
    for i in range(0, rest + full_min - n_min + n_max - full_max):
        i_k = masked_tile(i - rest, 0, n_min, full_min, full_max)
        o_k = columns(p_list, begin, unmasked + i, i < rest, count, i_k * BN, BN, UNIT)
        mask = steps.VisibleColumns(o_q, b_left, i < rest, p_until, s_ut)
        b_dq = steps.dq_step(
            b_dq, given, kv, o_k, mask, scale * LOG2_E, steps.Config(K, V, BK, BV, PRECISION, LISTED=True), BN, True
        )
    store_tile(dq + (i_b * TQ + start) * HQ * K + i_h * K, b_dq * scale, i_t * BM, queries, HQ * K, K, BM, BK)


def kept_attention_backward_queries(
    q, k, v, o, do, lse, dlse, keys: KeyLists, scale, impl
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dq `[B, TQ, HQ, K]` and, for the dK/dV kernel, delta `[B, HQ, TQ]` (portable) or bias columns (Gluon)."""
    q, k, v, do = (dense_rows(x) for x in (q, k, v, do))
    dlse = None if dlse is None else dlse.contiguous()
    (B, TQ, HQ, K), V = q.shape, v.shape[3]
    dq = q.new_empty(q.shape)
    if scale >= MIN_SCALE and takes_gluon(impl, q, k, v, keys.until):
        from tokenmix_core.ops.sparse_attention.hopper.backward_queries import backward_queries

        bias = lse.new_empty(*lse.shape, BIAS_COLUMNS.value, dtype=torch.bfloat16)
        backward_queries(q, k, v, o, aligned(do), lse, dlse, bias, dq, keys, scale)
        return dq, None, bias
    delta = torch.empty_like(lse)
    tile = tuning.kept_attention("backward_queries", max(K, V), q.dtype, keys.unit)
    tiles = chunk_slots(1, TQ, tile.BM, keys.cu_seqlens)
    _kept_attention_backward_queries[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, delta=delta, dq=dq, ranks=keys.ranks, lists=keys.lists,
        until=keys.until, cu_seqlens=keys.cu_seqlens, **strides(q=q, k=k, v=v, d=do, u=keys.until),
        **listed_sizes(q, k, keys), tiles=tiles, scale=scale, **listed_constants(q, v, tile, keys),
    )  # fmt: skip
    return dq, delta, None
