"""Tile schedule of the dK/dV kernel: which query tiles read each tile of keys, and how that work is split over CTAs.

Each key is in one of two lists: retained keys, which later queries see until they are evicted, or the others, which
only nearby queries see. The lists are cut into tiles of keys (columns). Their work may differ a thousandfold, so tiles
are split, as in stream-K, into **work tiles**: consecutive query tiles, enough work tiles to fill the device, none
longer than a CTA's share of all work. The gradients of a tile that is not split are written by one CTA. The work tiles
of a split tile store partial sums, which a second kernel adds in order. So the time is proportional to the work for
lists of any length, results are deterministic, and the workspace is bounded by the device.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.ops.softmax_attention import tuning
from tokenmix_core.ops.softmax_attention.launch_args import listed_sizes, strides
from tokenmix_core.ops.softmax_attention.listed_keys.lists import away_from, first_unit, listed_columns
from tokenmix_core.ops.softmax_attention.types import KeyLists

# indices of the rows of `facts`, a table with one column per tile of keys. Rows: the tile's query tiles (masked
# [M_MIN, FULL_MIN), unmasked [FULL_MIN, FULL_MAX), masked [FULL_MAX, M_MAX)); its first index in the list and the end
# of the sequence's indices; the sequence's first row, length and first unit; whether its keys are retained; its number
# of work tiles, first work tile and first partial sum
M_MIN = tl.constexpr(0)
FULL_MIN = tl.constexpr(1)
FULL_MAX = tl.constexpr(2)
M_MAX = tl.constexpr(3)
COLUMN = tl.constexpr(4)
COLUMNS = tl.constexpr(5)
START = tl.constexpr(6)
LENGTH = tl.constexpr(7)
BEGIN = tl.constexpr(8)
KEPT = tl.constexpr(9)
SPLITS = tl.constexpr(10)
FIRST_WORK = tl.constexpr(11)
FIRST_PARTIAL = tl.constexpr(12)
_FACTS = 13

# indices into `totals`: SPLIT_SIZE, the maximum number of query tiles in a work tile (one CTA's share of the work);
# the number of work tiles; the number of stored partial sums of dK and dV, which a second kernel adds
SPLIT_SIZE = tl.constexpr(0)
NUM_WORK = tl.constexpr(1)
NUM_PARTIALS = tl.constexpr(2)

# minimum of SPLIT_SIZE: smaller shares of a key tile's work are not worth a CTA each
_LEAST = 8


class TileSchedule(NamedTuple):
    """The schedule, in device memory; the tensors' sizes are upper bounds, because the host does not read the lists.

    Attributes:
        facts: table of tiles `[13, tiles]`, int32.
        work_tiles: index of the tile that each work tile belongs to.
        partial_tiles: index of the tile that each partial sum belongs to.
        totals: values at `SPLIT_SIZE`, `NUM_WORK` and `NUM_PARTIALS`.
        tiles: number of tiles, the columns of `facts`.
    """

    facts: Tensor
    work_tiles: Tensor
    partial_tiles: Tensor
    totals: Tensor
    tiles: int


class ColumnTile(NamedTuple):
    """A tile of keys of a list; the tile's columns are indices in the list.

    Attributes:
        i_b: batch row, int64.
        i_h: key head, int64.
        start: first row of the sequence, int64.
        length: length of the sequence.
        kept: whether the list is that of retained keys.
        p_list: the list.
        begin: index of the sequence's first unit.
        column: first column of the tile.
        columns: end of the sequence's columns in the list.
    """

    i_b: tl.tensor
    i_h: tl.tensor
    start: tl.tensor
    length: tl.tensor
    kept: tl.tensor
    p_list: tl.tensor
    begin: tl.tensor
    column: tl.tensor
    columns: tl.tensor


@triton.jit
def list_of(ranks, lists, i_b, i_m, U, HM, kept):
    """Return pointers to a head's list (of retained units if `kept`, else of others) and to its ranks (`KeyLists`)."""
    o_row = i_b * HM + i_m
    p_rank = ranks + o_row * (U + 1)
    return lists + o_row * U + tl.where(kept, 0, tl.load(p_rank + U)), p_rank


@triton.jit
def find_tile(facts, i_x, tiles, ranks, lists, B, U, H, HM):
    """Return the `ColumnTile` that column `i_x` of the table `facts` describes."""
    slots = tiles // (B * H)
    i_b = (i_x // slots // H).to(tl.int64)
    i_h = (i_x // slots % H).to(tl.int64)
    p_fact = facts + i_x
    kept = tl.load(p_fact + KEPT * tiles) != 0
    p_list, _ = list_of(ranks, lists, i_b, i_h // (H // HM), U, HM, kept)
    start = tl.load(p_fact + START * tiles).to(tl.int64)
    length = tl.load(p_fact + LENGTH * tiles)
    begin = tl.load(p_fact + BEGIN * tiles)
    column = tl.load(p_fact + COLUMN * tiles)
    columns = tl.load(p_fact + COLUMNS * tiles)
    return ColumnTile(i_b, i_h, start, length, kept, p_list, begin, column, columns)


@triton.jit
def _position(p_rank, o_u, kept):
    """Return how many units of a list (of retained units if `kept`, else of others) precede the unit `o_u`."""
    b_rank = tl.load(p_rank + o_u)
    return tl.where(kept, b_rank, o_u - b_rank)


@triton.jit
def _locate_columns(p_rank, i_s, T, U, N, cu_seqlens, kept, BN: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """Find the tile of columns with index `i_s` in a list; sequence n's tiles begin at ⌊its first column / BN⌋ + n.

    Returns:
        the sequence's first row and length, the index of its first unit, the tile's first column, and the end of the
        sequence's columns. If no tile has the index, this end is not after the first column.
    """
    if PACKED:
        sequences = 0
        for i in range(0, N, 256):
            o_n = i + tl.arange(0, 256)
            b_unit = first_unit(tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int32), o_n, UNIT)
            b_position = _position(p_rank, tl.where(o_n < N, b_unit, 0), kept)
            sequences += tl.sum(((b_position * UNIT // BN + o_n <= i_s) & (o_n < N)).to(tl.int32), 0)
        i_n = sequences - 1
        start = tl.load(cu_seqlens + i_n).to(tl.int32)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int32) - start
        begin = first_unit(start, i_n, UNIT)
        position = _position(p_rank, begin, kept) * UNIT
        column = position + (i_s - position // BN - i_n) * BN
    else:
        start = i_s * 0
        length = T + start
        begin = start
        column = i_s * BN
    return start, length, begin, column, _position(p_rank, begin + tl.cdiv(length, UNIT), kept) * UNIT


@cached_launch
@triton.jit
def _find_query_tiles(
    facts, ranks, lists, until, cu_seqlens, s_ub, s_ut, s_uh, B, TQ, TK, U, H, HM, N, slots, window,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Store the column of one tile in the table `facts`, except its rows about work tiles; one tile per program.

    A head has `slots` columns: tiles of retained keys begin at the first one; with `OTHERS`, tiles of the other keys
    take columns from the last one backwards.
    """
    i_x = tl.program_id(0)
    tiles = tl.num_programs(0)
    i_s = i_x % slots
    i_b = (i_x // slots // H).to(tl.int64)
    i_h = i_x // slots % H
    kept = i_s >= 0
    _, p_rank = list_of(ranks, lists, i_b, i_h // (H // HM), U, HM, kept)
    start, length, begin, column, columns = _locate_columns(p_rank, i_s, TK, U, N, cu_seqlens, kept, BN, UNIT, PACKED)
    if OTHERS and column >= columns:
        kept = i_s < 0
        start, length, begin, column, columns = _locate_columns(
            p_rank, slots - 1 - i_s, TK, U, N, cu_seqlens, kept, BN, UNIT, PACKED
        )
    p_list, _ = list_of(ranks, lists, i_b, i_h // (H // HM), U, HM, kept)
    o_k = listed_columns(p_list, begin, column, columns, BN, UNIT)
    m_k = o_k < length
    shift = 0 if PACKED else TK - TQ
    queries = length - shift
    b_end = away_from(o_k, window, UNIT, WINDOW)
    if until is not None:
        p_until = until + i_b * s_ub + start.to(tl.int64) * s_ut + i_h * s_uh
        b_until = tl.minimum(tl.load(p_until + o_k * s_ut, mask=m_k, other=0), length).to(tl.int32)
        b_end = tl.where(kept, tl.maximum(b_end, b_until), b_end)
    else:
        b_end = tl.where(kept, length, b_end)
    first = tl.min(tl.where(m_k, o_k, length), 0)
    last = tl.max(tl.where(m_k, o_k, 0), 0)
    least = tl.min(tl.where(m_k, b_end, length), 0)
    most = tl.max(tl.where(m_k, b_end, 0), 0)
    used = tl.max(m_k.to(tl.int32), 0) != 0

    m_max = tl.minimum(tl.cdiv(queries, BM), tl.cdiv(tl.maximum(most - shift, 0), BM))
    full_max = tl.minimum(queries // BM, tl.maximum(least - shift, 0) // BM)
    m_min = tl.minimum(tl.maximum(first - shift, 0) // BM, m_max)
    full_min = tl.minimum(tl.cdiv(tl.maximum(last - shift, 0), BM), m_max)
    full_max = tl.minimum(tl.maximum(full_max, full_min), m_max)
    p_fact = facts + i_x
    tl.store(p_fact + M_MIN * tiles, m_min)
    tl.store(p_fact + FULL_MIN * tiles, full_min)
    tl.store(p_fact + FULL_MAX * tiles, full_max)
    tl.store(p_fact + M_MAX * tiles, m_max)
    tl.store(p_fact + COLUMN * tiles, column)
    tl.store(p_fact + COLUMNS * tiles, columns)
    tl.store(p_fact + START * tiles, start)
    tl.store(p_fact + LENGTH * tiles, length)
    tl.store(p_fact + BEGIN * tiles, begin)
    tl.store(p_fact + KEPT * tiles, kept.to(tl.int32))
    # store whether the tile has any key; `_split_work` replaces this flag by the number of work tiles
    tl.store(p_fact + SPLITS * tiles, used.to(tl.int32))


@cached_launch
@triton.jit
def _split_work(
    facts, work_tiles, partial_tiles, totals, slots, tiles, programs, LEAST: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """One program splits all tiles of keys into work tiles, each of at most max(LEAST, total / `programs`) query tiles.

    The total is the sum of the counts of query tiles that see each tile of keys.
    """
    work = tl.zeros([], tl.int64)
    for i in range(0, tiles, BT):
        o_x = i + tl.arange(0, BT)
        m_x = o_x < tiles
        b_work = tl.load(facts + M_MAX * tiles + o_x, mask=m_x, other=0)
        b_work -= tl.load(facts + M_MIN * tiles + o_x, mask=m_x, other=0)
        work += tl.sum(b_work, 0)
    split_size = tl.maximum(LEAST, tl.cdiv(work, programs).to(tl.int32))
    work_tile = 0
    partial = 0
    # order of work tiles: retained keys first, alternating between heads, since the earliest keys have the most
    # queries; then the other keys, head by head, since neighbouring tiles read the same queries
    for kept in tl.static_range(1, -1, -1):
        for i in range(0, tiles, BT):
            o_x = i + tl.arange(0, BT)
            m_x = o_x < tiles
            if kept == 1:
                o_x = o_x % (tiles // slots) * slots + o_x // (tiles // slots)
            m_x = m_x & (tl.load(facts + KEPT * tiles + o_x, mask=m_x, other=0) == kept)
            b_work = tl.load(facts + M_MAX * tiles + o_x, mask=m_x, other=0)
            b_work -= tl.load(facts + M_MIN * tiles + o_x, mask=m_x, other=0)
            m_used = tl.load(facts + SPLITS * tiles + o_x, mask=m_x, other=0) != 0
            # a tile that no query sees still has one work tile, which writes zeros as gradients
            b_splits = tl.where(m_used, tl.maximum(tl.cdiv(b_work, split_size), 1), 0)
            b_partials = tl.where(b_splits > 1, b_splits, 0)
            b_work_tile = work_tile + tl.cumsum(b_splits, 0) - b_splits
            b_partial = partial + tl.cumsum(b_partials, 0) - b_partials
            tl.store(facts + SPLITS * tiles + o_x, b_splits, mask=m_x)
            tl.store(facts + FIRST_WORK * tiles + o_x, b_work_tile, mask=m_x)
            tl.store(facts + FIRST_PARTIAL * tiles + o_x, b_partial, mask=m_x)
            for j in range(0, tl.max(b_splits, 0)):
                tl.store(work_tiles + b_work_tile + j, o_x, mask=j < b_splits)
                tl.store(partial_tiles + b_partial + j, o_x, mask=j < b_partials)
            work_tile += tl.sum(b_splits, 0)
            partial += tl.sum(b_partials, 0)
    tl.store(totals + SPLIT_SIZE, split_size)
    tl.store(totals + NUM_WORK, work_tile)
    tl.store(totals + NUM_PARTIALS, partial)


def schedule_tiles(keys: KeyLists, q: Tensor, k: Tensor, BM: int, BN: int, most: int | None) -> TileSchedule:
    """Schedule tiles of BN keys of either list with query tiles of BM queries.

    With `most`, schedule only the first list (retained keys or sinks), which has at most `most` keys per sequence.
    """
    ranks, unit, packed = keys.ranks, keys.unit, keys.cu_seqlens is not None
    shape = listed_sizes(q, k, keys)
    B, U, N = q.shape[0], shape["U"], max(shape["N"], 1)
    # an upper bound on a head's tiles: all whole tiles, and one partial tile for each list of each sequence
    if most is not None:
        slots = min(N * most, U) // BN + N if packed else cdiv(most, BN)
    else:
        slots = U * unit // BN + 2 * N if packed else cdiv(U * unit, BN) + 1
    tiles = slots * B * shape["H"]
    programs = tuning.work_tiles(tiles, ranks.device)
    facts = ranks.new_empty(_FACTS, tiles)
    # upper bounds: each tile has one work tile, and the split into `programs` shares adds at most one for each share
    work_tiles, partial_tiles, totals = (ranks.new_empty(n) for n in (tiles + programs, 2 * programs, 3))
    _find_query_tiles[(tiles,)](
        facts=facts, ranks=ranks, lists=keys.lists, until=keys.until, cu_seqlens=keys.cu_seqlens,
        **strides(u=keys.until), B=B, **{name: shape[name] for name in ("TQ", "TK", "U", "H", "HM", "window")}, N=N,
        slots=slots, BM=BM, BN=BN, UNIT=unit, WINDOW=keys.window is not None, PACKED=packed, OTHERS=most is None,
        num_warps=1,
    )  # fmt: skip
    _split_work[(1,)](
        facts=facts, work_tiles=work_tiles, partial_tiles=partial_tiles, totals=totals, slots=slots, tiles=tiles,
        programs=programs, LEAST=_LEAST, BT=1024, num_warps=4,
    )  # fmt: skip
    return TileSchedule(facts, work_tiles, partial_tiles, totals, tiles)
