"""Invert the queries' lists of blocks: for each block of keys, list the queries that list it, without atomics.

A **pair** is an entry of `blocks`: a query and one of its blocks. A **run** is a fixed number of consecutive pairs.
Each pair gets its rank among the pairs of its run with the same block. The prefix sum of the counts of all runs, block
after block, gives the index of each pair in one array with all lists. The CPU reads no result: sizes of buffers are
upper bounds. The list of a block is divided into **splits** of P pairs, one for each program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import cached_launch, locate_chunk
from tokenmix_lte.ops.selected_blocks.plan import pairs_per_run

# number of pairs in the tile of a program
_ELEMENTS = 1024


class Lists(NamedTuple):
    """Pairs of queries and blocks, listed by block, as kernels read them.

    Attributes:
        slots: `[B, H, T · S]`, index of each pair's block among all blocks; −1 if the query sees none of its keys.
        listed: the pairs of each row and head, sorted by block; pair s of query t is the number t · S + s.
        ends: `[B · H · U]`, end of each block's list in `listed`, by row, head and block.
        masked: `[B · H · U]`, number of pairs at the start of each block's list whose queries may not see all its keys.
        owners: for each program, the index of the (row, head, block) that it works on: it processes a split of this
            block's list.
    """

    slots: Tensor
    listed: Tensor
    ends: Tensor
    masked: Tensor
    owners: Tensor


@triton.jit
def sequence_of(o_t, N, cu_seqlens):
    """Return the index of the packed sequence to which each of the rows `o_t` belongs."""
    b_n = tl.zeros_like(o_t)
    for i in range(0, N, 64):
        o_n = i + tl.arange(0, 64)
        b_begin = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int32)
        b_n += tl.sum(((b_begin[None, :] <= o_t[:, None]) & (o_n < N)[None, :]).to(tl.int32), 1)
    return b_n - 1


@triton.jit
def locate_split(owners, ends, listed, i_x, H, U, P: tl.constexpr):
    """Locate the split of program `i_x`.

    Returns:
        row, head (int64) and block; the block's index among all blocks, and its list; the range of the program's pairs,
        `low` … `high − 1` of the list, which may be empty.
    """
    i_r = tl.load(owners + i_x)
    i_b = (i_r // U // H).to(tl.int64)
    i_h = (i_r // U % H).to(tl.int64)
    begin, end = boundaries(ends, i_r)
    low = (i_x - begin // P - i_r) * P
    return i_b, i_h, i_r % U, i_r, listed + begin, tl.minimum(low, end - begin), tl.minimum(low + P, end - begin)


@triton.jit
def boundaries(ends, i_r):
    """Return the offsets at which the list of block `i_r`, counted over all rows and heads, begins and ends."""
    return tl.load(ends + i_r - 1, mask=i_r > 0, other=0), tl.load(ends + i_r)


@triton.jit
def block_of(i_u, TK, TQ, first, N, cu_seqlens, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Return the first row (int64) and length of a block's sequence, the block's first key, and that key's query row.

    Query rows count from `first`.
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


@cached_launch
@triton.jit
def _find_slots(
    blocks, slots, cu_seqlens, s_b, s_t, s_h, s_s, T, TQ, TK, first, H, S, U, N,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Compute each listed block's index among all sequences' blocks; −1 if the entry is unused or in the future."""
    tiles = tl.cdiv(T * S, BE)
    i_b = (tl.program_id(0) // tiles // H).to(tl.int64)
    i_h = tl.program_id(0) // tiles % H
    o_e = tl.program_id(0) % tiles * BE + tl.arange(0, BE)
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
    if PACKED:
        # queries of padding list no block
        m_seen &= b_row < tl.load(cu_seqlens + N)
    tl.store(slots + (i_b * H + i_h) * T * S + o_e, tl.where(m_seen, b_slot, -1), mask=m_e)


@cached_launch
@triton.jit
def _rank_pairs(slots, ranks, counts, pairs, U, runs, RUN: tl.constexpr, BJ: tl.constexpr):
    """Rank each pair among the pairs of its run with the same block; count each block's pairs in the run."""
    i_bh = (tl.program_id(0) // runs).to(tl.int64)
    i_run = tl.program_id(0) % runs
    p_slot = slots + i_bh * pairs + i_run * RUN
    rest = pairs - i_run * RUN
    o_e = tl.arange(0, RUN)
    b_slot = tl.load(p_slot + o_e, mask=o_e < rest, other=-1)
    # each integer holds two counts of the run's pairs with the same block: in its lower 16 bits those before the pair,
    # in its upper bits all; columns are summed only at the end
    b_count = tl.zeros([RUN, BJ], tl.int32)
    for i in range(0, RUN, BJ):
        o_j = i + tl.arange(0, BJ)
        b_other = tl.load(p_slot + o_j, mask=o_j < rest, other=-1)
        b_one = tl.where(o_j[None, :] < o_e[:, None], 0x10001, 0x10000)
        b_count += tl.where(b_slot[:, None] == b_other[None, :], b_one, 0)
    b_both = tl.sum(b_count, 1)
    b_rank, b_all = b_both & 0xFFFF, b_both >> 16
    tl.store(ranks + i_bh * pairs + i_run * RUN + o_e, b_rank, mask=o_e < rest)
    # the last pair of a block stores the block's count
    m_last = (b_slot >= 0) & (b_rank + 1 == b_all)
    tl.store(counts + (i_bh * U + b_slot) * runs + i_run, b_all, mask=m_last)


@cached_launch
@triton.jit
def _list_pairs(slots, ranks, sums, listed, pairs, U, runs, RUN: tl.constexpr, BE: tl.constexpr):
    """Write each pair to `listed`, in the list of its block, at the index that `sums` and `ranks` give."""
    tiles = tl.cdiv(pairs, BE)
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    o_e = tl.program_id(0) % tiles * BE + tl.arange(0, BE)
    b_slot = tl.load(slots + i_bh * pairs + o_e, mask=o_e < pairs, other=-1)
    b_index = (i_bh * U + tl.maximum(b_slot, 0)) * runs + o_e // RUN
    b_begin = tl.load(sums + b_index - 1, mask=(b_slot >= 0) & (b_index > 0), other=0)
    b_rank = tl.load(ranks + i_bh * pairs + o_e, mask=b_slot >= 0, other=0)
    tl.store(listed + b_begin + b_rank, o_e, mask=b_slot >= 0)


@cached_launch
@triton.jit
def _assign_splits(
    sums, ends, masked, owners, cu_seqlens, T, TQ, TK, first, S, U, N, runs,
    BLOCK: tl.constexpr, RUN: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write where a block's list ends, how many of its pairs need a mask, and which programs process its splits.

    The programs for block i_r start at ⌊begin / P⌋ + i_r, where `begin` is the offset of its list and P the number of
    pairs of a split. No two blocks then share a program, and no table with the number of splits is needed.
    """
    i_r = tl.program_id(0)
    p_sum = sums + i_r.to(tl.int64) * runs
    begin = tl.load(p_sum - 1, mask=i_r > 0, other=0)
    end = tl.load(p_sum + runs - 1)
    tl.store(ends + i_r, end)
    # pairs whose query lies in the block come first in its list and need a mask; their number is rounded up to whole
    # runs
    _, _, _, row = block_of(i_r % U, TK, TQ, first, N, cu_seqlens, BLOCK, PACKED)
    stop = tl.minimum(tl.maximum(row + BLOCK, 0), T) * S
    inside = tl.load(p_sum + tl.maximum(stop - 1, 0) // RUN) - begin
    tl.store(masked + i_r, tl.where(stop > 0, inside, 0))
    for i in range(begin // P + i_r, end // P + i_r + 1, BP):
        o_x = i + tl.arange(0, BP)
        tl.store(owners + o_x, tl.full([BP], 0, tl.int32) + i_r, mask=o_x <= end // P + i_r)


def make_lists(
    blocks: Tensor, cu_seqlens: Tensor | None, *, first: int, TQ: int, TK: int, U: int, block_size: int, split: int
) -> Lists:
    """Return the lists for `blocks [B, T, H, S]` of queries `first` … `first + T − 1`; a row has U blocks of keys."""
    B, T, H, S = blocks.shape
    pairs, RUN = T * S, pairs_per_run(U)
    runs = cdiv(pairs, RUN)
    slots, ranks = (blocks.new_empty(B, H, pairs, dtype=torch.int32) for _ in range(2))
    listed = blocks.new_empty(B * H * pairs, dtype=torch.int32)
    owners = blocks.new_empty(B * H * pairs // split + B * H * U, dtype=torch.int32)
    N, packed = 0 if cu_seqlens is None else len(cu_seqlens) - 1, cu_seqlens is not None
    ends, masked = (blocks.new_empty(B * H * U, dtype=torch.int32) for _ in range(2))
    # smaller tiles for packed rows: comparing each pair with all sequence boundaries takes many registers
    elements = _ELEMENTS if N == 0 else _ELEMENTS // 4
    _find_slots[(B * H * cdiv(pairs, elements),)](
        blocks=blocks, slots=slots, cu_seqlens=cu_seqlens,
        **dict(zip(("s_b", "s_t", "s_h", "s_s"), blocks.stride(), strict=True)),
        T=T, TQ=TQ, TK=TK, first=first, H=H, S=S, U=U, N=N,
        BLOCK=block_size, PACKED=packed, BE=elements, num_warps=8,
    )  # fmt: skip
    counts = blocks.new_zeros(B * H * U * runs, dtype=torch.int32)
    _rank_pairs[(B * H * runs,)](
        slots=slots, ranks=ranks, counts=counts, pairs=pairs, U=U, runs=runs, RUN=RUN, BJ=16,
        num_warps=4 if RUN < 512 else 8,
    )  # fmt: skip
    sums = counts.cumsum(0, dtype=torch.int32)
    _list_pairs[(B * H * cdiv(pairs, _ELEMENTS),)](
        slots=slots, ranks=ranks, sums=sums, listed=listed, pairs=pairs, U=U, runs=runs, RUN=RUN, BE=_ELEMENTS
    )  # fmt: skip
    _assign_splits[(B * H * U,)](
        sums=sums, ends=ends, masked=masked, owners=owners, cu_seqlens=cu_seqlens, T=T, TQ=TQ, TK=TK, first=first, S=S,
        U=U, N=N, runs=runs, BLOCK=block_size, RUN=RUN, P=split, BP=64, PACKED=packed,
    )  # fmt: skip
    return Lists(slots, listed, ends, masked, owners)
