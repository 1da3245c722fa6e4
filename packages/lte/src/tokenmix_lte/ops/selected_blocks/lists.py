"""Lists of blocks turned round: of each block of keys the queries that named it, in order, without atomics.

A **pair** is an entry of `blocks`: a query and one of its blocks. Pairs are ranked in runs of RANKED among those of the
same block; sums of the counts of all runs before say where each stands in one list, block after block. Nothing is read
by the host: sizes are bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.tile.sequences import locate_chunk
from tokenmix_lte.ops.selected_blocks.plan import RANKED

_ELEMENTS = 1024


class Lists(NamedTuple):
    """Pairs of queries and blocks, listed by block, as kernels read them.

    Attributes:
        slots: `[B, H, T · S]`, the place of each pair's block among all blocks, −1 where the query sees none of it.
        listed: the pairs of each row and head, by block; a pair is t · S + s.
        ends: `[B · H · U · runs]`, how many pairs are listed up to a block and run of pairs.
        owners: whose piece of the list each program takes: a row, head and block.
    """

    slots: Tensor
    listed: Tensor
    ends: Tensor
    owners: Tensor
    runs: int
    piece: int


@triton.jit
def sequence_of(o_t, N, cu_seqlens):
    """The packed sequence that rows `o_t` belong to."""
    b_n = tl.zeros_like(o_t)
    for i in range(0, N, 64):
        o_n = i + tl.arange(0, 64)
        b_begin = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int32)
        b_n += tl.sum(((b_begin[None, :] <= o_t[:, None]) & (o_n < N)[None, :]).to(tl.int32), 1)
    return b_n - 1


@triton.jit
def owner(owners, ends, listed, i_x, H, U, runs, P: tl.constexpr):
    """Whose piece of a list a program takes.

    Returns:
        row, head (int64) and block; its number among all, its list and where that begins; the pairs `low` … `high − 1`
        of the list that are the program's, none where it has no piece.
    """
    i_r = tl.load(owners + i_x)
    i_b = (i_r // U // H).to(tl.int64)
    i_h = (i_r // U % H).to(tl.int64)
    begin = tl.load(ends + i_r.to(tl.int64) * runs - 1, mask=i_r > 0, other=0)
    count = tl.load(ends + (i_r.to(tl.int64) + 1) * runs - 1) - begin
    low = (i_x - begin // P - i_r) * P
    return i_b, i_h, i_r % U, i_r, listed + begin, begin, tl.minimum(low, count), tl.minimum(low + P, count)


@triton.jit
def block_of(i_u, TK, TQ, first, N, cu_seqlens, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Of a block its sequence's first row (int64) and length, its first key, and the row of the query at that key.

    Rows of queries are counted from `first` on.
    """
    if PACKED:
        _, start, keys, key = locate_chunk(i_u, TK, BLOCK, N, cu_seqlens, PACKED)
        row = (start + key).to(tl.int32) - first
    else:
        start = tl.zeros([], tl.int64)
        keys = TK
        key = i_u * BLOCK
        row = key - (TK - TQ) - first
    return start, keys, key, row


@triton.jit
def masked_pairs(ends, begin, i_r, row, T, S, runs, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """How many of a block's pairs may be of queries inside of the block, which do not see all of it: the first ones."""
    stop = tl.minimum(tl.maximum(row + BLOCK, 0), T) * S
    i_run = tl.maximum(stop - 1, 0) // RUN
    count = tl.load(ends + i_r.to(tl.int64) * runs + i_run) - begin
    return tl.where(stop > 0, count, 0)


@cached_launch
@triton.jit
def _find_slots(
    blocks, slots, cu_seqlens, s_b, s_t, s_h, s_s, T, TQ, TK, first, H, S, U, N,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """The place of each pair's block among all blocks; −1 where it lies behind the query, or is none."""
    pieces = tl.cdiv(T * S, BE)
    i_b = (tl.program_id(0) // pieces // H).to(tl.int64)
    i_h = tl.program_id(0) // pieces % H
    o_e = tl.program_id(0) % pieces * BE + tl.arange(0, BE)
    o_t = o_e // S
    m_e = o_t < T
    b_c = tl.load(blocks + i_b * s_b + o_t.to(tl.int64) * s_t + i_h * s_h + o_e % S * s_s, mask=m_e, other=-1)
    b_row = tl.minimum(o_t, T - 1) + first
    if PACKED:
        b_n = sequence_of(b_row, N, cu_seqlens)
        b_begin = tl.load(cu_seqlens + b_n).to(tl.int32)
        b_own = (b_row - b_begin) // BLOCK
        b_slot = b_begin // BLOCK + b_n + b_c.to(tl.int32)
    else:
        b_own = (b_row + TK - TQ) // BLOCK
        b_slot = b_c.to(tl.int32)
    m_seen = (b_c >= 0) & (b_c <= b_own)
    tl.store(slots + (i_b * H + i_h) * T * S + o_e, tl.where(m_seen, b_slot, -1), mask=m_e)


@cached_launch
@triton.jit
def _rank_pairs(slots, ranks, counts, pairs, U, runs, RUN: tl.constexpr, BJ: tl.constexpr):
    """How many pairs of a run name the same block before each, and how many of the run name each block."""
    i_bh = (tl.program_id(0) // runs).to(tl.int64)
    i_run = tl.program_id(0) % runs
    p_slot = slots + i_bh * pairs + i_run * RUN
    rest = pairs - i_run * RUN
    o_e = tl.arange(0, RUN)
    b_slot = tl.load(p_slot + o_e, mask=o_e < rest, other=-1)
    b_rank = tl.zeros([RUN], tl.int32)
    b_all = tl.zeros([RUN], tl.int32)
    for i in range(0, RUN, BJ):
        o_j = i + tl.arange(0, BJ)
        b_other = tl.load(p_slot + o_j, mask=o_j < rest, other=-1)
        m_same = b_slot[:, None] == b_other[None, :]
        b_all += tl.sum(m_same.to(tl.int32), 1)
        b_rank += tl.sum((m_same & (o_j[None, :] < o_e[:, None])).to(tl.int32), 1)
    tl.store(ranks + i_bh * pairs + i_run * RUN + o_e, b_rank, mask=o_e < rest)
    # the last of a block tells its number
    m_last = (b_slot >= 0) & (b_rank + 1 == b_all)
    tl.store(counts + (i_bh * U + b_slot) * runs + i_run, b_all, mask=m_last)


@cached_launch
@triton.jit
def _list_pairs(slots, ranks, ends, listed, pairs, U, runs, RUN: tl.constexpr, BE: tl.constexpr):
    """Write each pair into the list of its block."""
    pieces = tl.cdiv(pairs, BE)
    i_bh = (tl.program_id(0) // pieces).to(tl.int64)
    o_e = tl.program_id(0) % pieces * BE + tl.arange(0, BE)
    b_slot = tl.load(slots + i_bh * pairs + o_e, mask=o_e < pairs, other=-1)
    b_place = (i_bh * U + tl.maximum(b_slot, 0)) * runs + o_e // RUN
    b_begin = tl.load(ends + b_place - 1, mask=(b_slot >= 0) & (b_place > 0), other=0)
    b_rank = tl.load(ranks + i_bh * pairs + o_e, mask=b_slot >= 0, other=0)
    tl.store(listed + b_begin + b_rank, o_e, mask=b_slot >= 0)


@cached_launch
@triton.jit
def _own_pieces(ends, owners, runs, P: tl.constexpr, BP: tl.constexpr):
    """Name a block as the owner of its programs: from ⌊its list's beginning / P⌋ + its number on.

    So blocks never share a program, and no table of their numbers of pieces is needed.
    """
    i_r = tl.program_id(0)
    begin = tl.load(ends + i_r.to(tl.int64) * runs - 1, mask=i_r > 0, other=0)
    end = tl.load(ends + (i_r.to(tl.int64) + 1) * runs - 1)
    for i in range(begin // P + i_r, end // P + i_r + 1, BP):
        o_x = i + tl.arange(0, BP)
        tl.store(owners + o_x, tl.full([BP], 0, tl.int32) + i_r, mask=o_x <= end // P + i_r)


def make_lists(
    blocks: Tensor, cu_seqlens: Tensor | None, *, first: int, TQ: int, TK: int, U: int, block_size: int, piece: int
) -> Lists:
    """The lists of queries `blocks [B, T, H, S]`, which are rows `first` … of all TQ, for U blocks of keys a row."""
    B, T, H, S = blocks.shape
    pairs, runs = T * S, cdiv(T * S, RANKED)
    slots, ranks = (blocks.new_empty(B, H, pairs, dtype=torch.int32) for _ in range(2))
    listed = blocks.new_empty(B * H * pairs, dtype=torch.int32)
    owners = blocks.new_empty(B * H * pairs // piece + B * H * U, dtype=torch.int32)
    N = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    # a packed row is found among all borders, for each pair
    found = _ELEMENTS if N == 0 else _ELEMENTS // 4
    _find_slots[(B * H * cdiv(pairs, found),)](
        blocks=blocks, slots=slots, cu_seqlens=cu_seqlens,
        **dict(zip(("s_b", "s_t", "s_h", "s_s"), blocks.stride(), strict=True)),
        T=T, TQ=TQ, TK=TK, first=first, H=H, S=S, U=U, N=N,
        BLOCK=block_size, PACKED=cu_seqlens is not None, BE=found, num_warps=8,
    )  # fmt: skip
    counts = blocks.new_zeros(B * H * U * runs, dtype=torch.int32)
    _rank_pairs[(B * H * runs,)](
        slots=slots, ranks=ranks, counts=counts, pairs=pairs, U=U, runs=runs, RUN=RANKED, BJ=16, num_warps=8
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    _list_pairs[(B * H * cdiv(pairs, _ELEMENTS),)](
        slots=slots, ranks=ranks, ends=ends, listed=listed, pairs=pairs, U=U, runs=runs, RUN=RANKED, BE=_ELEMENTS
    )  # fmt: skip
    _own_pieces[(B * H * U,)](ends=ends, owners=owners, runs=runs, P=piece, BP=64)
    return Lists(slots, listed, ends, owners, runs, piece)
