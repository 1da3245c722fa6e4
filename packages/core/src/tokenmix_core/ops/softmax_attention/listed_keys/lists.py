"""Lists of keys, and tiles gathered from them: BN keys of a list, called the tile's columns.

A list holds units of one key or of a whole chunk. In a packed batch a list spans all sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.varlen import sequence_span

# position of a column without a key: it exceeds every query's position, so no query sees the column
NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def away_from(o_k, window, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the position of the first query for which keys at `o_k` are no longer local: past the window or unit."""
    if WINDOW:
        return o_k + window
    else:
        return (o_k // UNIT + 1) * UNIT


@triton.jit
def first_unit(start, i_n, UNIT: tl.constexpr):
    """Return the index in `keep` of the first unit (UNIT tokens) of sequence `i_n`, which begins at token `start`."""
    if UNIT == 1:
        return start
    else:
        return start // UNIT + i_n


@triton.jit
def listed_columns(p_list, begin, o_c, count, BN: tl.constexpr, UNIT: tl.constexpr):
    """Return the positions of the list's keys with indices `o_c` … `o_c + BN − 1`; `NOWHERE` for indices ≥ `count`."""
    o_n = tl.arange(0, BN)
    if UNIT == 1:
        m_n = o_c + o_n < count
        return tl.where(m_n, tl.load(p_list + o_c + o_n, mask=m_n, other=0) - begin, NOWHERE)
    else:
        # all keys of a tile belong to one unit, since BN divides the unit
        first = tl.load(p_list + o_c // UNIT, mask=o_c < count, other=0) - begin
        return tl.where(o_c < count, first * UNIT + o_c % UNIT, NOWHERE) + o_n


@cached_launch
@triton.jit
def _list_first(ranks, lists, cu_seqlens, T, count, PACKED: tl.constexpr, BT: tl.constexpr):
    """List a sequence's first `count` tokens; write `ranks` only at its boundaries, which the dK/dV kernel reads."""
    i_n = tl.program_id(0)
    begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    before = 0
    o_row = i_n.to(tl.int64)
    if PACKED:
        o_row = o_row * 0
        for i in range(0, i_n, BT):
            o_n = i + tl.arange(0, BT)
            b_length = tl.load(cu_seqlens + o_n + 1, mask=o_n < i_n, other=0)
            b_length -= tl.load(cu_seqlens + o_n, mask=o_n < i_n, other=0)
            before += tl.sum(tl.minimum(b_length, count).to(tl.int32), 0)
    start = begin - o_row * T
    after = before + tl.minimum(length, count)
    # a sequence's last rank is also the next sequence's first rank: both programs write the same value
    tl.store(ranks + o_row * (T + 1) + start, before)
    tl.store(ranks + o_row * (T + 1) + start + length, after)
    for i in range(before, after, BT):
        o_u = i + tl.arange(0, BT)
        tl.store(lists + o_row * T + o_u, (start + o_u - before).to(tl.int32), mask=o_u < after)


def list_first(tokens: Tensor, count: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """List the first `count` tokens of each sequence of `tokens [B, T, ...]`.

    Returns:
        ranks `[B, 1, T + 1]`, of which only those at sequence boundaries are written, and the list `[B, 1, T]`.
    """
    B, T = tokens.shape[:2]
    ranks, lists = (tokens.new_empty(shape, dtype=torch.int32) for shape in ((B, 1, T + 1), (B, 1, T)))
    _list_first[(num_sequences(tokens, cu_seqlens),)](
        ranks=ranks, lists=lists, cu_seqlens=cu_seqlens, T=T, count=count, PACKED=cu_seqlens is not None, BT=256
    )
    return ranks, lists
