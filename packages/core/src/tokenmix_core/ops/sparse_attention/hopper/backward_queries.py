"""dQ of attention over retained keys on Hopper: 16-bit heads of 64 or 128, one warpgroup per CTA.

smem       Q, dO; stages: K, V (two buffers)     columns of a CTA: listed tiles (gathered), then local tiles
prologue   cp.async Q, dO; K_0, V_0; delta = rowsum(dO ∘ O) − dlse; bias columns → global, for the dK/dV kernel
iteration  wait K_i, V_i
           S = Q K_iᵀ, dP = dO V_iᵀ in flight together (WGMMA)
           meanwhile gather or copy K, V of i + 1; load the list entries of i + 2
           wait S → P = exp2(S − lse), mask; wait dP → dS = P ∘ (dP − delta); dQ += dS K_i
epilogue   dQ → smem → global
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
from tokenmix_core.kernels.triton.masks import within
from tokenmix_core.kernels.tuning import register_limit
from tokenmix_core.ops.softmax_attention.hopper.backward_tiles import (
    KeyStage,
    Queries,
    allocate_keys,
    minus_columns,
    mma_dq,
    mma_scores,
)
from tokenmix_core.ops.softmax_attention.hopper.bias_columns import BIAS_COLUMNS, store_bias
from tokenmix_core.ops.softmax_attention.hopper.query_tile import load_delta, locate_query_tile
from tokenmix_core.ops.softmax_attention.launch_args import listed_sizes, strides
from tokenmix_core.ops.softmax_attention.steps import Rows
from tokenmix_core.ops.softmax_attention.types import KeyLists
from tokenmix_core.ops.sparse_attention.hopper import TILE, constants
from tokenmix_core.ops.sparse_attention.hopper.tiles import (
    KeyList,
    async_gather_rows,
    columns_read,
    listed_columns,
    read_list,
)
from tokenmix_core.ops.sparse_attention.mask import left_of
from tokenmix_core.ops.sparse_attention.tiles import find_listed, local_tiles, tile_of_queries


class Columns(NamedTuple):
    """The keys (columns) that a query tile reads: tiles of listed keys, then tiles of local keys.

    Attributes:
        k: rows of K of the sequence.
        v: rows of V of the sequence.
        units: list of retained units.
        listed_tiles: number of tiles of listed keys.
        unmasked: number of listed keys that all queries of the tile see.
        keys: number of keys of the sequence.
        n_min: first local tile.
        full_min: first local tile that needs no mask.
        full_max: first masked local tile after the unmasked ones.
        total: number of listed and local tiles together.
        window: number of keys of the window.
    """

    k: Rows
    v: Rows
    units: KeyList
    listed_tiles: gl.tensor
    unmasked: gl.tensor
    keys: gl.tensor
    n_min: gl.tensor
    full_min: gl.tensor
    full_max: gl.tensor
    total: gl.tensor
    window: gl.tensor


@gluon.jit
def async_copy_columns(stage: KeyStage, i, b_list, given: Columns, UNIT: gl.constexpr):
    """Start and commit async copies of the i-th tile of columns, whose list entries are `b_list`.

    Returns:
        the list entries of the next tile, loaded one iteration ahead of their use.
    """
    k, v, units, listed_tiles, _, keys, n_min, _, _, total, _ = given
    BT: gl.constexpr = stage.k.shape[0]
    rows_k: gl.constexpr = gl.SliceLayout(1, hopper.row_layout(stage.k.shape[1], gl.num_warps()))
    rows_v: gl.constexpr = gl.SliceLayout(1, hopper.row_layout(stage.v.shape[1], gl.num_warps()))
    if i < listed_tiles:
        b_values = b_list
        if UNIT == 1 and stage.k.shape[1] != stage.v.shape[1]:
            b_values = read_list(units, i * BT, BT, UNIT, rows_v)
        async_gather_rows(stage.k, k.pointer, columns_read(b_list, units, i * BT, BT, UNIT, rows_k), keys, k.stride)
        async_gather_rows(stage.v, v.pointer, columns_read(b_values, units, i * BT, BT, UNIT, rows_v), keys, v.stride)
        b_list = read_list(units, (i + 1) * BT, BT, UNIT, rows_k)
    else:
        # after the last tile there is nothing to prefetch, so copy 0 rows
        left = gl.where(i < total, keys, 0)
        first = (n_min + i - listed_tiles) * BT
        hopper.async_copy_tile(stage.k, k.pointer, first, left, k.stride, THREAD_RELATIVE=True)
        hopper.async_copy_tile(stage.v, v.pointer, first, left, v.stride, THREAD_RELATIVE=True)
    async_copy.commit_group()
    return b_list


@gluon.jit
def dq_step(
    i, b_list, b_dq, stage: KeyStage, next_stage: KeyStage, given: Columns, queries: Queries, UNIT: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Accumulate dQ over the i-th tile of columns, which is in `stage`; prefetch the next tile to `next_stage`.

    Returns:
        the list entries of the tile after the next, and dQ without the factor scale.
    """
    k_s, v_s = hopper.opaque_tile(stage.k), hopper.opaque_tile(stage.v)
    BT: gl.constexpr = k_s.shape[0]
    o_q = queries.o_q
    hopper.wait_async_copies(0)
    b_s, b_dp = mma_scores(queries, k_s, v_s)
    b_list = async_copy_columns(next_stage, i + 1, b_list, given, UNIT)
    b_s = warpgroup_mma_wait(1, [b_s])
    b_p = gl.exp2(b_s * (queries.scale * LOG2_E) - queries.b_lse[:, None])
    i_k = given.n_min + i - given.listed_tiles
    if gl.where(i < given.listed_tiles, i >= given.unmasked // BT, (i_k < given.full_min) | (i_k >= given.full_max)):
        b_left = left_of(o_q, given.window, UNIT, WINDOW)
        if i < given.listed_tiles:
            column: gl.constexpr = gl.SliceLayout(0, hopper.mma_layout(BT, gl.num_warps()))
            o_k = listed_columns(given.units, i * BT, BT, UNIT, column)
            b_p = gl.where(within(o_k[None, :], b_left[:, None]), b_p, 0.0)
        else:
            distance = minus_columns(o_q - i_k * BT, BT)
            b_p = gl.where(within(distance, gl.maximum(o_q - b_left + 1, 0)[:, None]), b_p, 0.0)
    return b_list, mma_dq(b_p, b_dp, queries, k_s, b_dq)


@cached_launch
@gluon.jit
def _kept_attention_backward_queries(
    q, k, v, o, do, lse, dlse, bias, dq, ranks, lists, cu_seqlens,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Compute dQ and `bias`, the columns of `bias_columns.py` with lse and delta, of one query tile of one head."""
    tile = locate_query_tile(tile_of_queries(tiles, HQ, H), TQ, TK, N, cu_seqlens, BT, PACKED)
    i_b, i_h, i_hk, i_n, i_t, _, start, queries, keys = tile
    if i_t * BT < queries:
        scores: gl.constexpr = hopper.mma_layout(BT, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        rows_k: gl.constexpr = gl.SliceLayout(1, hopper.row_layout(K, gl.num_warps()))
        k_rows = Rows(k + i_b * s_kb + start * s_kt + i_hk * s_kh, s_kt)
        v_rows = Rows(v + i_b * s_vb + start * s_vt + i_hk * s_vh, s_vt)
        first = i_t * BT + keys - queries
        last = gl.minimum(first + BT, keys) - 1
        n_min, full_min, full_max, n_max = local_tiles(first, last, window, keys, BT, UNIT, WINDOW)
        row_of_lists = (i_b, i_hk // (H // HM), i_n, start)
        p_list, begin, unmasked, count = find_listed(
            ranks, lists, row_of_lists, first, last, window, (U, HM), UNIT, WINDOW
        )
        units = KeyList(p_list, begin, count)
        listed_tiles = gl.cdiv(count, BT)
        total = listed_tiles + n_max - n_min
        q_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, K], shared)
        do_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, V], shared)
        stage_0 = allocate_keys(q.dtype.element_ty, BT, K, V)
        stage_1 = allocate_keys(q.dtype.element_ty, BT, K, V)
        hopper.async_copy_tile(q_s, q + i_b * s_qb + start * s_qt + i_h * s_qh, i_t * BT, queries, s_qt)
        hopper.async_copy_tile(do_s, do + i_b * s_db + start * s_dt + i_h * s_dh, i_t * BT, queries, s_dt)
        async_copy.commit_group()
        given = Columns(k_rows, v_rows, units, listed_tiles, unmasked, keys, n_min, full_min, full_max, total, window)
        b_list = async_copy_columns(stage_0, i_t * 0, read_list(units, 0, BT, UNIT, rows_k), given, UNIT)

        o_row = (i_b * HQ + i_h) * TQ + start
        p_o = o + ((i_b * TQ + start) * HQ + i_h) * V
        b_delta = load_delta(p_o, HQ * V, do_s, dlse, o_row, i_t * BT, queries)[0]
        b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
        o_m = gl.arange(0, BT, gl.SliceLayout(1, scores))
        b_lse = gl.load(lse + o_row + i_t * BT + o_m, mask=i_t * BT + o_m < queries, other=0.0) * LOG2_E
        p_bias = bias + (o_row + i_t * BT) * BIAS_COLUMNS
        store_bias(p_bias, b_lse, b_delta, queries - i_t * BT, scale * LOG2_E)

        b_dq = gl.zeros([BT, K], gl.float32, hopper.mma_layout(K, gl.num_warps()))
        resident = Queries(q_s, do_s, b_lse, b_delta, first + o_m, scale)
        for i in range(0, total - 1, 2):
            b_list, b_dq = dq_step(i, b_list, b_dq, stage_0, stage_1, given, resident, UNIT, WINDOW)
            b_list, b_dq = dq_step(i + 1, b_list, b_dq, stage_1, stage_0, given, resident, UNIT, WINDOW)
        if total % 2 == 1:
            b_list, b_dq = dq_step(total - 1, b_list, b_dq, stage_0, stage_1, given, resident, UNIT, WINDOW)
        hopper.wait_async_copies(0)
        # dQ passes through smem, so that a thread stores 16 bytes at once
        q_s.store((b_dq * scale).to(dq.dtype.element_ty))
        hopper.barrier()
        p_dq = dq + ((i_b * TQ + start + i_t * BT) * HQ + i_h) * K
        hopper.store_rows(p_dq, q_s, HQ * K, queries - i_t * BT, gl.num_warps())


def backward_queries(q, k, v, o, do, lse, dlse, bias, dq, keys: KeyLists, scale) -> None:
    """Write dq, and the bias columns of queries for the dK/dV kernel."""
    B, TQ, HQ, K = q.shape
    tiles = chunk_slots(1, TQ, TILE, keys.cu_seqlens)
    _kept_attention_backward_queries[(tiles * HQ * B,)](
        q=q, k=k, v=v, o=o, do=do, lse=lse, dlse=dlse, bias=bias, dq=dq, ranks=keys.ranks, lists=keys.lists,
        cu_seqlens=keys.cu_seqlens, **strides(q=q, k=k, v=v, d=do), **listed_sizes(q, k, keys), tiles=tiles,
        scale=scale, **constants(q, v, keys), maxnreg=register_limit(tiles * HQ * B, 168) if K == 64 else None,
    )  # fmt: skip
