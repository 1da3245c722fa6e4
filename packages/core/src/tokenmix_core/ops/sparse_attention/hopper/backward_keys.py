"""dK, dV and the gradient of `keep` over retained keys on Hopper: heads of 64 or 128, one warpgroup per CTA.

work tile  a tile of gathered columns, or a share of the query tiles that see it (`tile_schedule.py`)
smem       K, V (gathered once), bias selectors; stages: Q, dO, bias columns (two buffers)
iteration  wait Q_i, dO_i
           Sᵀ = bias + K Q_iᵀ, dPᵀ = bias + V dO_iᵀ in flight together (WGMMA); meanwhile cp.async tile i + 1
           wait Sᵀ → Pᵀ = exp2(Sᵀ), mask; dV += Pᵀ dO_i; wait dPᵀ → dSᵀ = Pᵀ ∘ dPᵀ; dK += dSᵀ Q_i
           d(keep) += row sums of dSᵀ over the queries that see the key as a listed one, unless VALUES
epilogue   VALUES: d(keep) = row sums of V ∘ dV
           all query tiles: rows of dK, dV are scattered; a share: float32 partial sums → workspace
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon import hopper
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.tuning import register_limit
from tokenmix_core.ops.softmax_attention.hopper.backward_tiles import (
    Heads,
    Keys,
    Masking,
    QuerySpan,
    allocate_queries,
    async_copy_queries,
    dkdv_step,
)
from tokenmix_core.ops.softmax_attention.hopper.bias_columns import BIAS_COLUMNS, PARTS, bias_selector
from tokenmix_core.ops.softmax_attention.launch_args import listed_sizes, strides
from tokenmix_core.ops.softmax_attention.listed_keys.lists import away_from
from tokenmix_core.ops.softmax_attention.listed_keys.tile_schedule import (
    FIRST_PARTIAL,
    FIRST_WORK,
    FULL_MAX,
    FULL_MIN,
    M_MAX,
    M_MIN,
    NUM_WORK,
    SPLIT_SIZE,
    SPLITS,
    TileSchedule,
    find_tile,
)
from tokenmix_core.ops.softmax_attention.steps import ColumnsVisibleTo, Rows
from tokenmix_core.ops.softmax_attention.types import KeyLists
from tokenmix_core.ops.sparse_attention.hopper import constants
from tokenmix_core.ops.sparse_attention.hopper.tiles import KeyList, async_gather_rows, listed_columns


@gluon.jit
def store_gathered(p_x, s_x, o_t, rows, stride):
    """Store row i of an smem tile to row `o_t[i]` of the matrix at `p_x`, unless `o_t[i]` ≥ `rows`."""
    layout: gl.constexpr = hopper.row_layout(s_x.shape[1], gl.num_warps())
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    m_t = o_t < rows
    p_x += gl.where(m_t, o_t, 0).to(gl.int64)[:, None] * stride + o_d[None, :]
    gl.store(p_x, s_x.load(layout), mask=m_t[:, None])


@gluon.jit
def store_partial(p_x, b_x, rows: gl.constexpr, layout: gl.constexpr):
    """Store a float32 accumulator at `p_x` as contiguous rows."""
    o_n = gl.arange(0, rows, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, b_x.shape[1], gl.SliceLayout(0, layout))
    gl.store(p_x + o_n[:, None] * b_x.shape[1] + o_d[None, :], b_x)


@cached_launch
@gluon.jit
def _kept_attention_backward_keys(
    q, k, v, do, bias, dk, dv, dm, partial_k, partial_v, partial_m, ranks, lists, facts, work_tiles, totals,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_db, s_dh, B, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    s_qt: gl.constexpr, s_kt: gl.constexpr, s_vt: gl.constexpr, s_dt: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BT: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr, PACKED: gl.constexpr,
    VALUES: gl.constexpr,
):  # fmt: skip
    """Compute one work tile per program: a tile of keys by some or all of its query tiles, for a GQA group."""
    i_w = gl.program_id(0)
    if i_w < gl.load(totals + NUM_WORK):
        scores: gl.constexpr = hopper.mma_layout(BT, gl.num_warps())
        sums_k: gl.constexpr = hopper.mma_layout(K, gl.num_warps())
        sums_v: gl.constexpr = hopper.mma_layout(V, gl.num_warps())
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        rows_k: gl.constexpr = gl.SliceLayout(1, hopper.row_layout(K, gl.num_warps()))
        rows_v: gl.constexpr = gl.SliceLayout(1, hopper.row_layout(V, gl.num_warps()))
        i_x = gl.load(work_tiles + i_w)
        i_b, i_hk, start, keys, kept, p_list, begin, column, count = find_tile(
            facts, i_x, tiles, ranks, lists, B, U, H, HM
        )
        p_fact = facts + i_x
        queries = TQ
        if PACKED:
            queries = keys
        shift = keys - queries
        split_size = gl.load(totals + SPLIT_SIZE)
        split = i_w - gl.load(p_fact + FIRST_WORK * tiles)
        m_min = gl.load(p_fact + M_MIN * tiles) + split * split_size
        m_max = gl.minimum(m_min + split_size, gl.load(p_fact + M_MAX * tiles))
        full_min = gl.load(p_fact + FULL_MIN * tiles)
        full_max = gl.load(p_fact + FULL_MAX * tiles)
        total = gl.maximum(m_max - m_min, 0) * (HQ // H)

        k_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, K], shared)
        v_s = gl.allocate_shared_memory(q.dtype.element_ty, [BT, V], shared)
        stage_0 = allocate_queries(q.dtype.element_ty, BT, K, V)
        stage_1 = allocate_queries(q.dtype.element_ty, BT, K, V)
        # first query head of the key head's group
        i_h = i_hk * (HQ // H)
        heads = Heads(
            Rows(q + i_b * s_qb + start * s_qt + i_h * s_qh, s_qt),
            Rows(do + i_b * s_db + start * s_dt + i_h * s_dh, s_dt),
            Rows(bias + ((i_b * HQ + i_h) * TQ + start) * BIAS_COLUMNS, BIAS_COLUMNS),
            (s_qh, s_dh, TQ * BIAS_COLUMNS),
        )
        p_k = k + i_b * s_kb + start * s_kt + i_hk * s_kh
        p_v = v + i_b * s_vb + start * s_vt + i_hk * s_vh
        units = KeyList(p_list, begin, count)
        async_gather_rows(k_s, p_k, listed_columns(units, column, BT, UNIT, rows_k), keys, s_kt)
        async_gather_rows(v_s, p_v, listed_columns(units, column, BT, UNIT, rows_v), keys, s_vt)
        async_copy_queries(stage_0, heads, m_min * 0, m_min * BT, gl.where(total > 0, queries, 0))

        o_k = listed_columns(units, column, BT, UNIT, gl.SliceLayout(1, scores))
        b_away = away_from(o_k, window, UNIT, WINDOW)
        b_end = gl.where(kept, keys, b_away)
        given = Keys(k_s, v_s, bias_selector(0, BT), bias_selector(PARTS, BT), o_k, scale)
        mask = ColumnsVisibleTo(o_k, shift, b_away if dm is not None and not VALUES else None, b_end)
        span = QuerySpan(queries, m_min, full_min, full_max, m_max, total, None, mask)
        cursor = (m_min, m_min * 0)
        sums = (
            gl.zeros([BT, K], gl.float32, sums_k),
            gl.zeros([BT, V], gl.float32, sums_v),
            gl.zeros([BT], gl.float32, gl.SliceLayout(1, scores)),
        )
        for i in range(0, total - 1, 2):
            cursor, sums = dkdv_step(
                i, cursor, sums, stage_0, stage_1, heads, given, span, Masking(True, WINDOW, True)
            )  # fmt: skip
            cursor, sums = dkdv_step(
                i + 1, cursor, sums, stage_1, stage_0, heads, given, span, Masking(True, WINDOW, True)
            )  # fmt: skip
        if total % 2 == 1:
            cursor, sums = dkdv_step(
                total - 1, cursor, sums, stage_0, stage_1, heads, given, span, Masking(True, WINDOW, True)
            )  # fmt: skip
        b_dk, b_dv, b_dm = sums
        hopper.wait_async_copies(0)
        # load these values again: held during the loop, they would leave it fewer registers
        i_x = gl.load(work_tiles + hopper.opaque(i_w))
        i_b, i_hk, start, keys, kept, p_list, begin, column, count = find_tile(
            facts, i_x, tiles, ranks, lists, B, U, H, HM
        )
        p_fact = facts + i_x
        units = KeyList(p_list, begin, count)
        o_k = listed_columns(units, column, BT, UNIT, gl.SliceLayout(1, scores))
        if VALUES:
            b_dm = gl.sum(b_dv * v_s.load(sums_v).to(gl.float32), 1)
            b_dm = gl.convert_layout(b_dm, gl.SliceLayout(1, scores))
        if gl.load(p_fact + SPLITS * tiles) == 1:
            k_s.store((b_dk * scale).to(dk.dtype.element_ty))
            v_s.store(b_dv.to(dv.dtype.element_ty))
            hopper.barrier()
            o_row = (i_b * TK + start) * H + i_hk
            o_rows = listed_columns(units, column, BT, UNIT, rows_k)
            store_gathered(dk + o_row * K, k_s, o_rows, keys, H * K)
            if K != V:
                o_rows = listed_columns(units, column, BT, UNIT, rows_v)
            store_gathered(dv + o_row * V, v_s, o_rows, keys, H * V)
            if dm is not None:
                p_dm = dm + (i_b * H + i_hk) * TK + start + o_k
                if not VALUES:
                    b_dm = gl.where(kept, b_dm, 0.0)
                gl.store(p_dm, b_dm, mask=o_k < keys)
        else:
            split = hopper.opaque(i_w) - gl.load(p_fact + FIRST_WORK * tiles)
            o_partial = (gl.load(p_fact + FIRST_PARTIAL * tiles) + split).to(gl.int64) * BT
            store_partial(partial_k + o_partial * K, b_dk, BT, sums_k)
            store_partial(partial_v + o_partial * V, b_dv, BT, sums_v)
            if dm is not None:
                gl.store(partial_m + o_partial + gl.arange(0, BT, gl.SliceLayout(1, scores)), b_dm)


def backward_keys(
    q, k, v, do, bias, keys: KeyLists, scale, dk, dv, dm, partial_k, partial_v, partial_m, ranks, lists,
    schedule: TileSchedule, *, VALUES: bool,
) -> None:  # fmt: skip
    """Write dk, dv and, unless None, dm (see `listed_keys_backward`); for split tiles, write their partial sums."""
    small = q.shape[3] == v.shape[3] == 64 and (dm is None or VALUES)
    programs = len(schedule.work_tiles)
    _kept_attention_backward_keys[(programs,)](
        q=q, k=k, v=v, do=do, bias=bias, dk=dk, dv=dv, dm=dm, partial_k=partial_k, partial_v=partial_v,
        partial_m=partial_m, ranks=ranks, lists=lists, facts=schedule.facts, work_tiles=schedule.work_tiles,
        totals=schedule.totals, **strides(q=q, k=k, v=v, d=do), B=q.shape[0], **listed_sizes(q, k, keys),
        tiles=schedule.tiles, scale=scale, **constants(q, v, keys), VALUES=VALUES,
        maxnreg=register_limit(programs, 168) if small else None,
    )  # fmt: skip
