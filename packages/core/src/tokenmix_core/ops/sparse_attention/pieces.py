"""The lists' transpose, for the kernel of dk and dv: which queries see a tile of columns, and who computes what of it.

Each key stands in one of two lists: of kept keys, which all later queries see, or of others, which only those around
them do. Tiles are cut from the lists, and as the work of tiles may differ a thousandfold, they are cut into **pieces**:
runs of tiles of queries, about as many pieces as keep the device busy, none longer than its share of all work. A tile
of one piece is written by it; pieces of the same tile leave partial sums, which are added in order. So lists of any
length take the time of their work, every run gives the same bits, and what is kept between is bounded by the device.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.ops.sparse_attention.mask import away_from, first_unit
from tokenmix_core.ops.sparse_attention.tiles import listed_columns

# what is known of a tile, each a row of a table: its tiles of queries (masked [near, full), seen entirely [full, end),
# masked [end, stop)), the places of its first column and behind its list's last one, the sequence's first row, length
# and first unit, whether its keys are kept, and how many pieces it has
NEAR = tl.constexpr(0)
FULL = tl.constexpr(1)
END = tl.constexpr(2)
STOP = tl.constexpr(3)
COLUMN = tl.constexpr(4)
COLUMNS = tl.constexpr(5)
START = tl.constexpr(6)
LENGTH = tl.constexpr(7)
BEGIN = tl.constexpr(8)
KEPT = tl.constexpr(9)
PIECES = tl.constexpr(10)
FIRST_PIECE = tl.constexpr(11)
FIRST_PART = tl.constexpr(12)
_FACTS = 13

# what is known of the whole: tiles of queries a piece, pieces, and parts that have to be added
SHARE = tl.constexpr(0)
ALL_PIECES = tl.constexpr(1)
ALL_PARTS = tl.constexpr(2)

# fewer tiles of queries than this are not worth a program
_LEAST = 8


class Pieces(NamedTuple):
    """Facts of each tile `[13, tiles]`, whose tile each piece and each part is, and the totals; sizes are bounds."""

    facts: Tensor
    piece_tiles: Tensor
    part_tiles: Tensor
    totals: Tensor
    tiles: int


@triton.jit
def list_of(ranks, lists, i_b, i_m, U, HM, kept):
    """A row's list, of kept units or of the others, and the ranks of kept ones."""
    o_row = i_b * HM + i_m
    p_rank = ranks + o_row * (U + 1)
    return lists + o_row * U + tl.where(kept, 0, tl.load(p_rank + U)), p_rank


@triton.jit
def find_tile(facts, i_x, tiles, ranks, lists, B, U, H, HM):
    """Find out which columns a tile holds.

    Returns:
        its row, head and sequence's first row (int64), that one's length, whether its keys are kept, their list and the
        place of the sequence's first unit, the tile's first column and the end of the list.
    """
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
    return i_b, i_h, start, length, kept, p_list, begin, column, tl.load(p_fact + COLUMNS * tiles)


@triton.jit
def _place(p_rank, o_u, kept):
    """How many units of a list stand before unit `o_u`."""
    b_rank = tl.load(p_rank + o_u)
    return tl.where(kept, b_rank, o_u - b_rank)


@triton.jit
def _locate_columns(p_rank, i_s, T, U, N, cu_seqlens, kept, BN: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr):
    """The tile of columns in slot `i_s` of a list: sequence n's tiles begin at ⌊its first column / BN⌋ + n.

    Returns:
        the sequence's first row and length, the place of its first unit, and the tile's first column and the end of its
        list, which lies before it where the slot is unused.
    """
    if PACKED:
        sequences = 0
        for i in range(0, N, 256):
            o_n = i + tl.arange(0, 256)
            b_unit = first_unit(tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int32), o_n, UNIT)
            b_place = _place(p_rank, tl.where(o_n < N, b_unit, 0), kept)
            sequences += tl.sum(((b_place * UNIT // BN + o_n <= i_s) & (o_n < N)).to(tl.int32), 0)
        i_n = sequences - 1
        start = tl.load(cu_seqlens + i_n).to(tl.int32)
        length = tl.load(cu_seqlens + i_n + 1).to(tl.int32) - start
        begin = first_unit(start, i_n, UNIT)
        place = _place(p_rank, begin, kept) * UNIT
        column = place + (i_s - place // BN - i_n) * BN
    else:
        start = i_s * 0
        length = T + start
        begin = start
        column = i_s * BN
    return start, length, begin, column, _place(p_rank, begin + tl.cdiv(length, UNIT), kept) * UNIT


@cached_launch
@triton.jit
def _find_queries(
    facts, ranks, lists, until, cu_seqlens, s_ub, s_ut, s_uh, B, TQ, TK, U, H, HM, N, slots, window,
    BM: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """The facts of a tile of columns but for its pieces.

    Kept keys take slots from the first on; with `OTHERS`, those that are not kept take slots from the last on.
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

    stop = tl.minimum(tl.cdiv(queries, BM), tl.cdiv(tl.maximum(most - shift, 0), BM))
    end = tl.minimum(queries // BM, tl.maximum(least - shift, 0) // BM)
    near = tl.minimum(tl.maximum(first - shift, 0) // BM, stop)
    full = tl.minimum(tl.cdiv(tl.maximum(last - shift, 0), BM), stop)
    end = tl.minimum(tl.maximum(end, full), stop)
    p_fact = facts + i_x
    tl.store(p_fact + NEAR * tiles, near)
    tl.store(p_fact + FULL * tiles, full)
    tl.store(p_fact + END * tiles, end)
    tl.store(p_fact + STOP * tiles, stop)
    tl.store(p_fact + COLUMN * tiles, column)
    tl.store(p_fact + COLUMNS * tiles, columns)
    tl.store(p_fact + START * tiles, start)
    tl.store(p_fact + LENGTH * tiles, length)
    tl.store(p_fact + BEGIN * tiles, begin)
    tl.store(p_fact + KEPT * tiles, kept.to(tl.int32))
    # until they are counted: whether there is a column at all
    tl.store(p_fact + PIECES * tiles, used.to(tl.int32))


@cached_launch
@triton.jit
def _share_out(
    facts, piece_tiles, part_tiles, totals, slots, tiles, programs, LEAST: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """Cut the tiles into pieces of no more than the share of one of `programs` programs; one program for all."""
    work = tl.zeros([], tl.int64)
    for i in range(0, tiles, BT):
        o_x = i + tl.arange(0, BT)
        m_x = o_x < tiles
        b_work = tl.load(facts + STOP * tiles + o_x, mask=m_x, other=0)
        b_work -= tl.load(facts + NEAR * tiles + o_x, mask=m_x, other=0)
        work += tl.sum(b_work, 0)
    share = tl.maximum(LEAST, tl.cdiv(work, programs).to(tl.int32))
    pieces = 0
    parts = 0
    # kept keys first, of all heads, as early ones have most queries; others head by head, as neighbours share queries
    for kept in tl.static_range(1, -1, -1):
        for i in range(0, tiles, BT):
            o_x = i + tl.arange(0, BT)
            m_x = o_x < tiles
            if kept == 1:
                o_x = o_x % (tiles // slots) * slots + o_x // (tiles // slots)
            m_x = m_x & (tl.load(facts + KEPT * tiles + o_x, mask=m_x, other=0) == kept)
            b_work = tl.load(facts + STOP * tiles + o_x, mask=m_x, other=0)
            b_work -= tl.load(facts + NEAR * tiles + o_x, mask=m_x, other=0)
            m_used = tl.load(facts + PIECES * tiles + o_x, mask=m_x, other=0) != 0
            # a tile without queries has gradients of 0, which a piece writes
            b_pieces = tl.where(m_used, tl.maximum(tl.cdiv(b_work, share), 1), 0)
            b_parts = tl.where(b_pieces > 1, b_pieces, 0)
            b_piece = pieces + tl.cumsum(b_pieces, 0) - b_pieces
            b_part = parts + tl.cumsum(b_parts, 0) - b_parts
            tl.store(facts + PIECES * tiles + o_x, b_pieces, mask=m_x)
            tl.store(facts + FIRST_PIECE * tiles + o_x, b_piece, mask=m_x)
            tl.store(facts + FIRST_PART * tiles + o_x, b_part, mask=m_x)
            for j in range(0, tl.max(b_pieces, 0)):
                tl.store(piece_tiles + b_piece + j, o_x, mask=j < b_pieces)
                tl.store(part_tiles + b_part + j, o_x, mask=j < b_parts)
            pieces += tl.sum(b_pieces, 0)
            parts += tl.sum(b_parts, 0)
    tl.store(totals + SHARE, share)
    tl.store(totals + ALL_PIECES, pieces)
    tl.store(totals + ALL_PARTS, parts)


def cut_pieces(ranks, lists, until, cu_seqlens, *, TQ, TK, H, BM, BN, unit, window, until_strides, most=None) -> Pieces:
    """Tiles of BN columns of both lists, and their pieces of tiles of BM queries.

    With `most`, of the first list alone, of which a sequence has at most so many columns.
    """
    B, HM, U = ranks.shape
    U -= 1
    N = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    # whole tiles, and one that is not of each sequence and list; packed, sequences leave gaps
    if most is not None:
        slots = cdiv(most, BN) if cu_seqlens is None else min(N * most, U) // BN + N
    else:
        slots = cdiv(U * unit, BN) + 1 if cu_seqlens is None else U * unit // BN + 2 * N
    tiles = slots * B * H
    programs = tuning.kept_attention_pieces(tiles, ranks.device)
    facts = ranks.new_empty(_FACTS, tiles)
    # each is at most the tiles, or a share of the work
    piece_tiles, part_tiles, totals = (ranks.new_empty(n) for n in (tiles + programs, 2 * programs, 3))
    _find_queries[(tiles,)](
        facts=facts, ranks=ranks, lists=lists, until=until, cu_seqlens=cu_seqlens, **until_strides,
        B=B, TQ=TQ, TK=TK, U=U, H=H, HM=HM, N=N, slots=slots,
        window=window or 0, BM=BM, BN=BN, UNIT=unit, WINDOW=window is not None, PACKED=cu_seqlens is not None,
        OTHERS=most is None, num_warps=1,
    )  # fmt: skip
    _share_out[(1,)](
        facts=facts, piece_tiles=piece_tiles, part_tiles=part_tiles, totals=totals, slots=slots, tiles=tiles,
        programs=programs, LEAST=_LEAST, BT=1024, num_warps=4,
    )  # fmt: skip
    return Pieces(facts, piece_tiles, part_tiles, totals, tiles)
