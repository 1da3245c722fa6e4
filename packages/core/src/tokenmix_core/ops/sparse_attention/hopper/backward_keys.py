"""The backward kernel of keys for Hopper, in Gluon: pieces of dk, dv and the gradient of `keep`, heads of 64 or 128.

As attention's kernel of keys, where a tile's keys are gathered from a list and a program takes a piece of the tiles of
queries that see them. Pieces, and the sums of their parts, are those of the portable form.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tokenmix_core import tuning
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import strides
from tokenmix_core.ops.softmax_attention.hopper.backward import (
    allocate_queries,
    begin_weights,
    bring_queries,
    columns_behind,
    next_tile,
)
from tokenmix_core.ops.softmax_attention.hopper.terms import EACH, TERMS, adding_terms
from tokenmix_core.ops.sparse_attention.forward import sizes
from tokenmix_core.ops.sparse_attention.hopper import constants
from tokenmix_core.ops.sparse_attention.hopper.tiles import begin_gather, listed_columns
from tokenmix_core.ops.sparse_attention.mask import away_from
from tokenmix_core.ops.sparse_attention.pieces import (
    ALL_PIECES,
    END,
    FIRST_PART,
    FIRST_PIECE,
    FULL,
    NEAR,
    PIECES,
    SHARE,
    STOP,
    Pieces,
    find_tile,
)
from tokenmix_core.tile.hopper import (
    LOG2_E,
    barrier,
    mma_layout,
    opaque,
    opaque_tile,
    row_layout,
    wait_async_copies,
)
from tokenmix_core.tile.masks import within


@gluon.jit
def store_gathered(p_x, s_x, o_t, rows, stride):
    """Store a tile from shared memory as the rows `o_t`, laid out as rows are, but for those from `rows` on."""
    layout: gl.constexpr = row_layout(s_x.shape[1], gl.num_warps())
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    m_t = o_t < rows
    p_x += gl.where(m_t, o_t, 0).to(gl.int64)[:, None] * stride + o_d[None, :]
    gl.store(p_x, s_x.load(layout), mask=m_t[:, None])


@gluon.jit
def store_part(p_x, b_x, rows: gl.constexpr, layout: gl.constexpr):
    """Store a tile in float32 as rows side by side."""
    o_n = gl.arange(0, rows, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, b_x.shape[1], gl.SliceLayout(0, layout))
    gl.store(p_x + o_n[:, None] * b_x.shape[1] + o_d[None, :], b_x)


@gluon.jit
def meet_queries(
    i, cursor, sums, here_s, next_s, given, steps, s_qt: gl.constexpr, s_dt: gl.constexpr, FACTORS: gl.constexpr,
):  # fmt: skip
    """As attention's: add what a tile of queries gives to dk, dv and, if wanted, to the gradients of keys' factors."""
    i_q, i_h = cursor
    b_dk, b_dv, b_dm = sums
    pointers, keys_s, span, o_k, b_away, b_end, scale = given
    queries, shift, near, full, end, stop, count = span
    BT: gl.constexpr = here_s[0].shape[0]
    dtype: gl.constexpr = here_s[0].dtype
    left_k: gl.constexpr = gl.DotOperandLayout(0, mma_layout(here_s[0].shape[1], gl.num_warps()), 2)
    left_v: gl.constexpr = gl.DotOperandLayout(0, mma_layout(here_s[1].shape[1], gl.num_warps()), 2)
    wait_async_copies(0)
    b_st, b_dpt = begin_weights(keys_s, here_s)
    i_next, i_h = next_tile(i_q, i_h, near, stop)
    # nothing comes after the last tile
    bring_queries(next_s, pointers, i_h, steps, i_next * BT, gl.where(i + 1 < count, queries, 0), s_qt, s_dt)
    b_st = warpgroup_mma_wait(1, [b_st])
    b_pt = gl.exp2(b_st * (scale * LOG2_E))
    if (i_q < full) | (i_q >= end):
        # what there is no query for has a gradient of 0
        distance = columns_behind(i_q * BT + shift - o_k, BT)
        b_pt = gl.where(within(distance, gl.maximum(b_end - o_k, 0)[:, None]), b_pt, 0.0)
    b_left = gl.convert_layout(b_pt.to(dtype), left_v)
    b_dv = warpgroup_mma(b_left, opaque_tile(here_s[1]), b_dv, is_async=True)
    b_dpt = warpgroup_mma_wait(1, [b_dpt])
    b_dst = b_pt * b_dpt
    if FACTORS:
        o_q = i_q * BT + shift + gl.arange(0, BT, gl.SliceLayout(0, mma_layout(BT, gl.num_warps())))
        b_dm += gl.sum(gl.where(o_q[None, :] >= b_away[:, None], b_dst, 0.0), 1)
    b_right = gl.convert_layout(b_dst.to(dtype), left_k)
    b_dk = warpgroup_mma(b_right, opaque_tile(here_s[0]), b_dk, is_async=True)
    # what stands among the waited for is not overwritten before
    b_dk, b_dv, b_left, b_right = warpgroup_mma_wait(0, [b_dk, b_dv, b_left, b_right])
    return (i_next, i_h), (b_dk, b_dv, b_dm)


@cached_launch
@gluon.jit
def _kept_attention_backward_keys(
    q, k, v, do, terms, dk, dv, dm, parts_k, parts_v, parts_m, ranks, lists, facts, piece_tiles, totals,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, B, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A piece of a tile of columns a program: some of the tiles of queries that see it, of all heads of the group."""
    i_p = gl.program_id(0)
    if i_p < gl.load(totals + ALL_PIECES):
        scores: gl.constexpr = mma_layout(BT, gl.num_warps())
        sums_k: gl.constexpr = mma_layout(K, gl.num_warps())
        sums_v: gl.constexpr = mma_layout(V, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        rows_k: gl.constexpr = gl.SliceLayout(1, row_layout(K, gl.num_warps()))
        rows_v: gl.constexpr = gl.SliceLayout(1, row_layout(V, gl.num_warps()))
        i_x = gl.load(piece_tiles + i_p)
        i_b, i_hk, start, keys, kept, p_list, begin, column, count = find_tile(
            facts, i_x, tiles, ranks, lists, B, U, H, HM
        )
        p_fact = facts + i_x
        queries = TQ
        if PACKED:
            queries = keys
        shift = keys - queries
        share = gl.load(totals + SHARE)
        piece = i_p - gl.load(p_fact + FIRST_PIECE * tiles)
        near = gl.load(p_fact + NEAR * tiles) + piece * share
        stop = gl.minimum(near + share, gl.load(p_fact + STOP * tiles))
        full = gl.load(p_fact + FULL * tiles)
        end = gl.load(p_fact + END * tiles)
        total = gl.maximum(stop - near, 0) * (HQ // H)

        sh_k = gl.allocate_shared_memory(q.dtype.element_ty, [BT, K], shared)
        sh_v = gl.allocate_shared_memory(q.dtype.element_ty, [BT, V], shared)
        # places that Triton tells apart: in a ring products and copies would wait for each other
        even_s = allocate_queries(q.dtype.element_ty, BT, K, V)
        odd_s = allocate_queries(q.dtype.element_ty, BT, K, V)
        # from the first head of the group on
        i_h = i_hk * (HQ // H)
        pointers = (
            q + i_b * s_qb + start * s_qt + i_h * s_qh,
            do + i_b * s_db + start * s_dt + i_h * s_dh,
            terms + ((i_b * HQ + i_h) * TQ + start) * TERMS,
        )
        steps = (s_qh, s_dh, TQ * TERMS)
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        begin_gather(sh_k, p_k, listed_columns(p_list, begin, column, count, BT, UNIT, rows_k), keys, s_kt)
        begin_gather(sh_v, p_v, listed_columns(p_list, begin, column, count, BT, UNIT, rows_v), keys, s_vt)
        bring_queries(even_s, pointers, near * 0, steps, near * BT, gl.where(total > 0, queries, 0), s_qt, s_dt)

        o_k = listed_columns(p_list, begin, column, count, BT, UNIT, gl.SliceLayout(1, scores))
        b_away = away_from(o_k, window, UNIT, WINDOW)
        b_end = gl.where(kept, keys, b_away)
        keys_s = (sh_k, sh_v, adding_terms(0, BT), adding_terms(EACH, BT))
        given = (pointers, keys_s, (queries, shift, near, full, end, stop, total), o_k, b_away, b_end, scale)
        cursor = (near, near * 0)
        sums = (
            gl.zeros([BT, K], gl.float32, sums_k),
            gl.zeros([BT, V], gl.float32, sums_v),
            gl.zeros([BT], gl.float32, gl.SliceLayout(1, scores)),
        )
        factors: gl.constexpr = dm is not None
        for i in range(0, total - 1, 2):
            cursor, sums = meet_queries(i, cursor, sums, even_s, odd_s, given, steps, s_qt, s_dt, factors)
            cursor, sums = meet_queries(i + 1, cursor, sums, odd_s, even_s, given, steps, s_qt, s_dt, factors)
        if total % 2 == 1:
            cursor, sums = meet_queries(total - 1, cursor, sums, even_s, odd_s, given, steps, s_qt, s_dt, factors)
        b_dk, b_dv, b_dm = sums
        wait_async_copies(0)
        # read once more: what the loop does not need would take its registers
        i_x = gl.load(piece_tiles + opaque(i_p))
        i_b, i_hk, start, keys, kept, p_list, begin, column, count = find_tile(
            facts, i_x, tiles, ranks, lists, B, U, H, HM
        )
        p_fact = facts + i_x
        o_k = listed_columns(p_list, begin, column, count, BT, UNIT, gl.SliceLayout(1, scores))
        if gl.load(p_fact + PIECES * tiles) == 1:
            sh_k.store((b_dk * scale).to(dk.dtype.element_ty))
            sh_v.store(b_dv.to(dv.dtype.element_ty))
            barrier()
            o_row = (i_b * TK + start) * H + i_hk
            o_rows = listed_columns(p_list, begin, column, count, BT, UNIT, rows_k)
            store_gathered(dk + o_row * K, sh_k, o_rows, keys, H * K)
            if K != V:
                o_rows = listed_columns(p_list, begin, column, count, BT, UNIT, rows_v)
            store_gathered(dv + o_row * V, sh_v, o_rows, keys, H * V)
            if dm is not None:
                p_dm = dm + (i_b * H + i_hk) * TK + start + o_k
                gl.store(p_dm, gl.where(kept, b_dm, 0.0), mask=o_k < keys)
        else:
            piece = opaque(i_p) - gl.load(p_fact + FIRST_PIECE * tiles)
            o_part = (gl.load(p_fact + FIRST_PART * tiles) + piece).to(gl.int64) * BT
            store_part(parts_k + o_part * K, b_dk, BT, sums_k)
            store_part(parts_v + o_part * V, b_dv, BT, sums_v)
            if dm is not None:
                gl.store(parts_m + o_part + gl.arange(0, BT, gl.SliceLayout(1, scores)), b_dm)


def backward_keys(
    q, k, v, do, terms, dk, dv, dm, parts_k, parts_v, parts_m, ranks, lists, cu_seqlens, pieces: Pieces,
    *, unit, window, scale,
) -> None:  # fmt: skip
    """Write dk and dv, and the gradients of keys' factors `dm` unless that is None; of tiles in pieces their parts."""
    small = q.shape[3] == v.shape[3] == 64 and dm is None
    _kept_attention_backward_keys[(len(pieces.piece_tiles),)](
        q=q, k=k, v=v, do=do, terms=terms, dk=dk, dv=dv, dm=dm, parts_k=parts_k, parts_v=parts_v,
        parts_m=parts_m, ranks=ranks, lists=lists, facts=pieces.facts, piece_tiles=pieces.piece_tiles,
        totals=pieces.totals, **strides(q=q, k=k, v=v, d=do), B=q.shape[0],
        **sizes(q, k, ranks, cu_seqlens), tiles=pieces.tiles, window=window or 0, scale=scale,
        **constants(q, v, unit, window, cu_seqlens),
        maxnreg=tuning.registers_of_many(len(pieces.piece_tiles), 168) if small else None,
    )  # fmt: skip
