"""The backward kernel of keys for Hopper, in Gluon: pieces of dk, dv and the gradient of `keep`, heads of 64 or 128.

As attention's kernel of keys, where a tile's keys are gathered from a list and a program takes a piece of the tiles of
queries that see them. Pieces, and the sums of their parts, are those of the portable form.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from tokenmix_core import tuning
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.softmax_attention.forward import strides
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
    await_copies,
    barrier,
    begin_copy,
    begin_vector_copy,
    product_layout,
    row_layout,
)


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


@cached_launch
@gluon.jit
def _kept_attention_backward_keys(
    q, k, v, do, lse, delta, dk, dv, dm, parts_k, parts_v, parts_m, ranks, lists, facts, piece_tiles, totals,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, B, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A piece of a tile of columns a program: some of the tiles of queries that see it, of all heads of the group."""
    i_p = gl.program_id(0)
    if i_p < gl.load(totals + ALL_PIECES):
        scores: gl.constexpr = product_layout(BT, gl.num_warps())
        sums_k: gl.constexpr = product_layout(K, gl.num_warps())
        sums_v: gl.constexpr = product_layout(V, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
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
        sh_q = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, K], shared)
        sh_do = gl.allocate_shared_memory(q.dtype.element_ty, [2, BT, V], shared)
        sh_lse = gl.allocate_shared_memory(gl.float32, [2, BT], vector)
        sh_delta = gl.allocate_shared_memory(gl.float32, [2, BT], vector)
        # of the head that is copied next, from the first of the group on
        i_h = i_hk * (HQ // H)
        p_q = q + i_b * s_qb + start * s_qt + i_h * s_qh
        p_do = do + i_b * s_db + start * s_dt + i_h * s_dh
        p_lse = lse + (i_b * HQ + i_h) * TQ + start
        p_delta = delta + (i_b * HQ + i_h) * TQ + start
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        begin_gather(sh_k, p_k, listed_columns(p_list, begin, column, count, BT, UNIT, rows_k), keys, s_kt)
        begin_gather(sh_v, p_v, listed_columns(p_list, begin, column, count, BT, UNIT, rows_v), keys, s_vt)
        left = gl.where(total > 0, queries, 0)
        begin_copy(sh_q.index(0), p_q, near * BT, left, s_qt)
        begin_copy(sh_do.index(0), p_do, near * BT, left, s_dt)
        begin_vector_copy(sh_lse.index(0), p_lse, near * BT, left)
        begin_vector_copy(sh_delta.index(0), p_delta, near * BT, left)
        async_copy.commit_group()

        o_k = listed_columns(p_list, begin, column, count, BT, UNIT, gl.SliceLayout(1, scores))
        b_away = away_from(o_k, window, UNIT, WINDOW)
        b_end = gl.where(kept, keys, b_away)
        b_dk = gl.zeros([BT, K], gl.float32, sums_k)
        b_dv = gl.zeros([BT, V], gl.float32, sums_v)
        b_dm = gl.zeros([BT], gl.float32, gl.SliceLayout(1, scores))
        zeros = gl.zeros([BT, BT], gl.float32, scores)
        o_m = gl.arange(0, BT, gl.SliceLayout(0, scores))
        i_q = near
        for i in range(total):
            await_copies(0)
            sh_qi = sh_q.index(i % 2)
            sh_doi = sh_do.index(i % 2)
            b_st = warpgroup_mma(sh_k, sh_qi.permute((1, 0)), zeros, use_acc=False, is_async=True)
            b_dpt = warpgroup_mma(sh_v, sh_doi.permute((1, 0)), zeros, use_acc=False, is_async=True)
            i_next = i_q + 1
            if i_next == stop:
                i_next = near
                p_q += s_qh
                p_do += s_dh
                p_lse += TQ
                p_delta += TQ
            # nothing comes after the last tile
            left = gl.where(i + 1 < total, queries, 0)
            begin_copy(sh_q.index((i + 1) % 2), p_q, i_next * BT, left, s_qt)
            begin_copy(sh_do.index((i + 1) % 2), p_do, i_next * BT, left, s_dt)
            begin_vector_copy(sh_lse.index((i + 1) % 2), p_lse, i_next * BT, left)
            begin_vector_copy(sh_delta.index((i + 1) % 2), p_delta, i_next * BT, left)
            async_copy.commit_group()
            b_lse = sh_lse.index(i % 2).load(gl.SliceLayout(0, scores)) * LOG2_E
            b_st = warpgroup_mma_wait(1, [b_st])
            b_pt = gl.exp2(b_st * (scale * LOG2_E) - b_lse[None, :])
            o_q = i_q * BT + o_m
            if (i_q < full) | (i_q >= end):
                m_s = (o_q[None, :] + shift >= o_k[:, None]) & (o_q[None, :] + shift < b_end[:, None])
                b_pt = gl.where(m_s & (o_q < queries)[None, :], b_pt, 0.0)
            b_left = gl.convert_layout(b_pt.to(q.dtype.element_ty), gl.DotOperandLayout(0, sums_v, 2))
            b_dv = warpgroup_mma(b_left, sh_doi, b_dv, is_async=True)
            b_delta = sh_delta.index(i % 2).load(gl.SliceLayout(0, scores))
            b_dpt = warpgroup_mma_wait(1, [b_dpt])
            b_dst = b_pt * (b_dpt - b_delta[None, :])
            if dm is not None:
                b_dm += gl.sum(gl.where(o_q[None, :] + shift >= b_away[:, None], b_dst, 0.0), 1)
            b_right = gl.convert_layout(b_dst.to(q.dtype.element_ty), gl.DotOperandLayout(0, sums_k, 2))
            b_dk = warpgroup_mma(b_right, sh_qi, b_dk, is_async=True)
            # what stands among the waited for is not overwritten before
            b_dk, b_dv, b_left, b_right = warpgroup_mma_wait(0, [b_dk, b_dv, b_left, b_right])
            i_q = i_next
        await_copies(0)
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
            o_part = (gl.load(p_fact + FIRST_PART * tiles) + piece).to(gl.int64) * BT
            store_part(parts_k + o_part * K, b_dk, BT, sums_k)
            store_part(parts_v + o_part * V, b_dv, BT, sums_v)
            if dm is not None:
                gl.store(parts_m + o_part + gl.arange(0, BT, gl.SliceLayout(1, scores)), b_dm)


def backward_keys(
    q, k, v, do, lse, delta, dk, dv, dm, parts_k, parts_v, parts_m, ranks, lists, cu_seqlens, pieces: Pieces,
    *, unit, window, scale,
) -> None:  # fmt: skip
    """Write dk and dv, and the gradients of keys' factors `dm` unless that is None; of tiles in pieces their parts."""
    small = q.shape[3] == v.shape[3] == 64 and dm is None
    _kept_attention_backward_keys[(len(pieces.piece_tiles),)](
        q=q, k=k, v=v, do=do, lse=lse, delta=delta, dk=dk, dv=dv, dm=dm, parts_k=parts_k, parts_v=parts_v,
        parts_m=parts_m, ranks=ranks, lists=lists, facts=pieces.facts, piece_tiles=pieces.piece_tiles,
        totals=pieces.totals, **strides(q=q, k=k, v=v, d=do), B=q.shape[0],
        **sizes(q, k, ranks, cu_seqlens), tiles=pieces.tiles, window=window or 0, scale=scale,
        **constants(q, v, unit, window, cu_seqlens),
        maxnreg=tuning.registers_of_many(len(pieces.piece_tiles), 168) if small else None,
    )  # fmt: skip
