"""The dK/dV kernel over listed keys: it runs the work tiles of `tile_schedule.py`.

A tile's columns are keys gathered from one list. The queries that see a key form one interval, whether the key is local
or listed for them (`sparse_attention/README.md`), so each key's gradients are one sum, written once.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.decay import LOG2_E
from tokenmix_core.ops.softmax_attention import tuning
from tokenmix_core.ops.softmax_attention.kv_tiles import load_rows, load_tile, masked_tile
from tokenmix_core.ops.softmax_attention.launch_args import listed_constants, listed_sizes, strides
from tokenmix_core.ops.softmax_attention.listed_keys.lists import away_from, list_first, listed_columns
from tokenmix_core.ops.softmax_attention.listed_keys.tile_schedule import (
    FIRST_PARTIAL,
    FIRST_WORK,
    FULL_MAX,
    FULL_MIN,
    M_MAX,
    M_MIN,
    NUM_PARTIALS,
    NUM_WORK,
    SPLIT_SIZE,
    SPLITS,
    ColumnTile,
    find_tile,
    schedule_tiles,
)
from tokenmix_core.ops.softmax_attention.steps import ColumnsVisibleTo, Config, QueryRows, Rows, dkdv_step
from tokenmix_core.ops.softmax_attention.types import KeyLists


@triton.jit
def store_rows(p_x, b_x, o_t, m_t, stride, D: tl.constexpr, BD: tl.constexpr):
    """Store row i of a tile to row `o_t[i]` of the matrix at `p_x`, for each i for which `m_t[i]` is true."""
    o_d = tl.arange(0, BD)
    p_x += o_t.to(tl.int64)[:, None] * stride + o_d[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=m_t[:, None] & (o_d < D)[None, :])


@triton.jit
def store_gradients(outputs, sums, tile: ColumnTile, o_k, m_k, TK, H, scale, config: Config, VALUES: tl.constexpr):
    """Write dk, dv and, unless None, dm of the keys at positions `o_k` for which `m_k` is true.

    dm is each key's term of the gradient of `keep`: 0 for keys that are not retained, unless VALUES.
    """
    dk, dv, dm = outputs
    b_dk, b_dv, b_dm = sums
    i_b, i_h, start, _, kept, _, _, _, _ = tile
    o_row = i_b * TK + start
    store_rows(dk + (o_row * H + i_h) * config.K, b_dk * scale, o_k, m_k, H * config.K, config.K, config.BK)
    store_rows(dv + (o_row * H + i_h) * config.V, b_dv, o_k, m_k, H * config.V, config.V, config.BV)
    if dm is not None:
        if not VALUES:
            b_dm = tl.where(kept, b_dm, 0.0)
        tl.store(dm + (i_b * H + i_h) * TK + start + o_k, b_dm, mask=m_k)


@cached_launch
@triton.jit
def _listed_keys_backward(
    q, k, v, do, lse, delta, dk, dv, dm, partial_k, partial_v, partial_m, ranks, lists, until, facts, work_tiles,
    totals, s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh, s_db, s_dt, s_dh, s_ub, s_ut, s_uh,
    B, TQ, TK, U, HQ, H, HM, N, tiles, window, scale,
    K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    UNIT: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute one work tile per program: a tile of keys by some of its query tiles, in all heads of the GQA group."""
    i_w = tl.program_id(0)
    if i_w >= tl.load(totals + NUM_WORK):
        return
    i_x = tl.load(work_tiles + i_w)
    tile = find_tile(facts, i_x, tiles, ranks, lists, B, U, H, HM)
    i_b, i_h, start, keys, kept, p_list, begin, column, count = tile
    o_k = listed_columns(p_list, begin, column, count, BN, UNIT)
    p_fact = facts + i_x
    queries = TQ
    if PACKED:
        queries = keys
    shift = keys - queries
    split_size = tl.load(totals + SPLIT_SIZE)
    split = i_w - tl.load(p_fact + FIRST_WORK * tiles)
    m_min = tl.load(p_fact + M_MIN * tiles) + split * split_size
    m_max = tl.minimum(m_min + split_size, tl.load(p_fact + M_MAX * tiles))
    full_min = tl.minimum(tl.maximum(tl.load(p_fact + FULL_MIN * tiles), m_min), m_max)
    full_max = tl.minimum(tl.maximum(tl.load(p_fact + FULL_MAX * tiles), full_min), m_max)

    m_k = o_k < keys
    b_k = load_rows(k + i_b * s_kb + start * s_kt + i_h * s_kh, o_k, keys, s_kt, K, BK, True)
    b_v = load_rows(v + i_b * s_vb + start * s_vt + i_h * s_vh, o_k, keys, s_vt, V, BV, True)
    b_away = away_from(o_k, window, UNIT, WINDOW)
    b_end = b_away
    if until is not None:
        p_until = until + i_b * s_ub + start * s_ut + i_h * s_uh
        b_until = tl.minimum(tl.load(p_until + o_k * s_ut, mask=m_k, other=0), keys).to(tl.int32)
        b_end = tl.where(kept, tl.maximum(b_away, b_until), b_away)
    else:
        b_end = tl.where(kept, keys, b_away)
    kv = (b_k, b_v)
    sums = (tl.zeros([BN, BK], tl.float32), tl.zeros([BN, BV], tl.float32), tl.zeros([BN], tl.float32))
    # one loop over the query tiles of all heads of the group: a loop per head would be too short to pipeline copies
    i_hq = i_h * (HQ // H)
    p_q = q + i_b * s_qb + start * s_qt + i_hq * s_qh
    p_do = do + i_b * s_db + start * s_dt + i_hq * s_dh
    o_row = (i_b * HQ + i_hq) * TQ + start
    mask = ColumnsVisibleTo(o_k, shift, b_away if dm is not None and not VALUES else None, b_end)
    unmasked = tl.maximum(full_max - full_min, 1)
    for i in range(0, (full_max - full_min) * (HQ // H)):
        i_g = (i // unmasked).to(tl.int64)
        q_rows, do_rows = Rows(p_q + i_g * s_qh, s_qt), Rows(p_do + i_g * s_dh, s_dt)
        given = QueryRows(q_rows, do_rows, lse + o_row + i_g * TQ, delta + o_row + i_g * TQ, queries)
        sums = dkdv_step(
            sums, kv, given, full_min + i % unmasked, mask, scale * LOG2_E,
            Config(K, V, BK, BV, PRECISION, LISTED=True), BM, False,
        )  # fmt: skip
    masked = tl.maximum(full_min - m_min + m_max - full_max, 1)
    for i in range(0, (full_min - m_min + m_max - full_max) * (HQ // H)):
        i_g = (i // masked).to(tl.int64)
        q_rows, do_rows = Rows(p_q + i_g * s_qh, s_qt), Rows(p_do + i_g * s_dh, s_dt)
        given = QueryRows(q_rows, do_rows, lse + o_row + i_g * TQ, delta + o_row + i_g * TQ, queries)
        i_q = masked_tile(i % masked, 0, m_min, full_min, full_max)
        sums = dkdv_step(
            sums, kv, given, i_q, mask, scale * LOG2_E, Config(K, V, BK, BV, PRECISION, LISTED=True), BM, True
        )
    b_dk, b_dv, b_dm = sums
    if VALUES:
        b_dm = tl.sum(b_dv * b_v.to(tl.float32), 1)
    if tl.load(p_fact + SPLITS * tiles) == 1:
        store_gradients(
            (dk, dv, dm), (b_dk, b_dv, b_dm), tile, o_k, m_k, TK, H, scale,
            Config(K, V, BK, BV, PRECISION, LISTED=True), VALUES,
        )  # fmt: skip
    else:
        o_n = tl.arange(0, BN)
        o_partial = (tl.load(p_fact + FIRST_PARTIAL * tiles) + split).to(tl.int64) * BN
        store_rows(partial_k + o_partial * BK, b_dk, o_n, m_k, BK, BK, BK)
        store_rows(partial_v + o_partial * BV, b_dv, o_n, m_k, BV, BV, BV)
        if dm is not None:
            tl.store(partial_m + o_partial + o_n, b_dm, mask=m_k)


@cached_launch
@triton.jit
def _sum_partials(
    dk, dv, dm, partial_k, partial_v, partial_m, ranks, lists, facts, partial_tiles, totals, B, TK, U, H, HM, tiles,
    scale, K: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of dK, dV and, unless None, dm of a split tile, in a fixed order, and write its gradients.

    There is one program per partial sum; the program of a tile's first one adds all of the tile's partial sums, and the
    other programs exit.
    """
    i_w = tl.program_id(0)
    if i_w >= tl.load(totals + NUM_PARTIALS):
        return
    i_x = tl.load(partial_tiles + i_w)
    if i_w != tl.load(facts + FIRST_PARTIAL * tiles + i_x):
        return
    tile = find_tile(facts, i_x, tiles, ranks, lists, B, U, H, HM)
    _, _, _, keys, _, p_list, begin, column, count = tile
    o_k = listed_columns(p_list, begin, column, count, BN, UNIT)
    b_dk = tl.zeros([BN, BK], tl.float32)
    b_dv = tl.zeros([BN, BV], tl.float32)
    b_dm = tl.zeros([BN], tl.float32)
    for i in range(i_w, i_w + tl.load(facts + SPLITS * tiles + i_x)):
        b_dk += load_tile(partial_k, i * BN, 0, BK, BK, BN, BK, False)
        b_dv += load_tile(partial_v, i * BN, 0, BV, BV, BN, BV, False)
        if dm is not None:
            b_dm += tl.load(partial_m + i * BN + tl.arange(0, BN))
    sums = (b_dk, b_dv, b_dm)
    store_gradients((dk, dv, dm), sums, tile, o_k, o_k < keys, TK, H, scale, Config(K, V, BK, BV, "tf32"), VALUES)


def listed_keys_backward(
    q, k, v, do, lse, delta, dk, dv, keys: KeyLists, scale, *, dm=None, values: bool = False, most: int | None = None,
    tile: tuning.AttentionTile | None = None, launch: Callable[..., None] | None = None,
) -> None:  # fmt: skip
    """Write dk and dv of all keys or, with `most`, only of the first list: retained keys or sinks, `most` per sequence.

    Args:
        dm: None, or where to write each retained key's sum of dS over the queries that see it as a listed key,
            `[B, H, TK]`.
        values: write ⟨v, dv⟩ of every key to `dm` instead, from the float32 accumulators of dv.
        tile: tile sizes of the kernel that `launch` launches; None for those of the portable kernel.
        launch: a function that launches another dK/dV kernel on a schedule; None for the portable kernel.
    """
    (B, TK, H, V), K = v.shape, q.shape[3]
    tile = tile or tuning.listed_keys(max(K, V), q.dtype)
    shape = listed_sizes(q, k, keys)
    compiled_for = listed_constants(q, v, tile, keys)
    schedule = schedule_tiles(keys, q, k, tile.BM, tile.BN, most)
    partials = len(schedule.partial_tiles) * tile.BN
    partial_k, partial_v = (lse.new_empty(partials, compiled_for[size]) for size in ("BK", "BV"))
    # arguments of both kernels: gradients, partial sums, and the lists that locate the keys' rows
    written = dict(
        dk=dk, dv=dv, dm=dm, partial_k=partial_k, partial_v=partial_v,
        partial_m=None if dm is None else lse.new_empty(partials), ranks=keys.ranks, lists=keys.lists, VALUES=values,
    )  # fmt: skip
    if launch is not None:
        launch(**written, schedule=schedule)
    else:
        _listed_keys_backward[(len(schedule.work_tiles),)](
            q=q, k=k, v=v, do=do, lse=lse, delta=delta, **written, until=keys.until, facts=schedule.facts,
            work_tiles=schedule.work_tiles, totals=schedule.totals, **strides(q=q, k=k, v=v, d=do, u=keys.until), B=B,
            **shape, tiles=schedule.tiles, scale=scale, **compiled_for,
        )  # fmt: skip
    _sum_partials[(len(schedule.partial_tiles),)](
        **written, facts=schedule.facts, partial_tiles=schedule.partial_tiles, totals=schedule.totals,
        B=B, TK=TK, U=shape["U"], H=H, HM=shape["HM"], tiles=schedule.tiles, scale=scale,
        **{name: compiled_for[name] for name in ("K", "V", "BN", "BK", "BV", "UNIT")}, num_warps=8,
    )  # fmt: skip


def first_keys_backward(q, k, v, do, lse, delta, dk, dv, cu_seqlens, *, count, window, scale) -> None:
    """Overwrite the rows of dk and dv of each sequence's first `count` keys, which all queries see."""
    count = min(count, k.shape[1])
    keys = KeyLists(*list_first(k, count, cu_seqlens), None, cu_seqlens, 1, window)
    listed_keys_backward(q, k, v, do, lse, delta, dk, dv, keys, scale, most=count)
