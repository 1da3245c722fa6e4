"""The mask's geometry, and the lists of retained units and of the others.

Lists are built on the device, in order, by counting: no host synchronisation and no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.varlen import sequence_span

# units that one program lists
_BLOCK = 1024


@triton.jit
def left_of(o_q, window, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key of the local part of queries at positions `o_q`."""
    if WINDOW:
        return tl.maximum(o_q - window + 1, 0)
    else:
        return tl.maximum(o_q, 0) // UNIT * UNIT


@triton.jit
def away_from(o_k, window, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first query for which keys at positions `o_k` are no longer local."""
    if WINDOW:
        return o_k + window
    else:
        return (o_k // UNIT + 1) * UNIT


@triton.jit
def first_unit(start, i_n, UNIT: tl.constexpr):
    """Return the index in `keep` of the first unit of sequence `i_n`, whose first token is `start` in its row."""
    if UNIT == 1:
        return start
    else:
        return start // UNIT + i_n


@triton.jit
def _load_kept(keep, i_b, i_m, o_u, U, HM):
    b_keep = tl.load(keep + (i_b * U + o_u) * HM + i_m, mask=o_u < U, other=0)
    if keep.dtype.element_ty == tl.int1:
        return (b_keep != 0).to(tl.int32)
    else:
        return (b_keep > 0.5).to(tl.int32)


@triton.jit
def _row_and_block(blocks, HM):
    pid = tl.program_id(0)
    return (pid // blocks // HM).to(tl.int64), pid // blocks % HM, pid % blocks


@cached_launch
@triton.jit
def _count_units(keep, counts, U, HM, blocks, BU: tl.constexpr):
    """Count the retained units of a block."""
    i_b, i_m, i_u = _row_and_block(blocks, HM)
    b_kept = _load_kept(keep, i_b, i_m, i_u * BU + tl.arange(0, BU), U, HM)
    tl.store(counts + tl.program_id(0), tl.sum(b_kept, 0))


@cached_launch
@triton.jit
def _list_units(keep, counts, ranks, lists, U, HM, blocks, BU: tl.constexpr):
    """Write each unit of a block to the list of retained units or to the list of the others."""
    i_b, i_m, i_u = _row_and_block(blocks, HM)
    o_u = i_u * BU + tl.arange(0, BU)
    b_kept = _load_kept(keep, i_b, i_m, o_u, U, HM)
    before = 0
    count = tl.sum(b_kept, 0)
    if blocks > 1:
        count = 0
        for i in range(0, blocks, BU):
            o_c = i + tl.arange(0, BU)
            b_count = tl.load(counts + tl.program_id(0) - i_u + o_c, mask=o_c < blocks, other=0)
            before += tl.sum(tl.where(o_c < i_u, b_count, 0), 0)
            count += tl.sum(b_count, 0)
    b_rank = before + tl.cumsum(b_kept, 0) - b_kept
    o_row = i_b * HM + i_m
    # the entry behind the last unit is the number of retained units
    tl.store(ranks + o_row * (U + 1) + o_u, b_rank, mask=o_u <= U)
    if (i_u + 1) * BU == U:
        tl.store(ranks + o_row * (U + 1) + U, before + tl.sum(b_kept, 0))
    tl.store(lists + o_row * U + tl.where(b_kept != 0, b_rank, count + o_u - b_rank), o_u, mask=o_u < U)


@cached_launch
@triton.jit
def _list_first(ranks, lists, cu_seqlens, T, count, PACKED: tl.constexpr, BT: tl.constexpr):
    """List a sequence's first tokens; write the ranks at its boundaries, which are all that the dK/dV kernel reads."""
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
    # the next sequence writes the same value
    tl.store(ranks + o_row * (T + 1) + start, before)
    tl.store(ranks + o_row * (T + 1) + start + length, after)
    for i in range(before, after, BT):
        o_u = i + tl.arange(0, BT)
        tl.store(lists + o_row * T + o_u, (start + o_u - before).to(tl.int32), mask=o_u < after)


def list_first(tokens: Tensor, count: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ranks `[B, 1, T + 1]` at sequence boundaries and the list `[B, 1, T]` of the first `count` tokens of each.

    `tokens` is `[B, T, ...]`.
    """
    B, T = tokens.shape[:2]
    ranks, lists = (tokens.new_empty(shape, dtype=torch.int32) for shape in ((B, 1, T + 1), (B, 1, T)))
    _list_first[(num_sequences(tokens, cu_seqlens),)](
        ranks=ranks, lists=lists, cu_seqlens=cu_seqlens, T=T, count=count, PACKED=cu_seqlens is not None, BT=256
    )
    return ranks, lists


def list_units(keep: Tensor, ranks: Tensor, lists: Tensor) -> None:
    """Write `ranks [B, HM, U + 1]`, the retained units before each unit, and `lists [B, HM, U]`: retained, then others.

    Both lists of a row ascend; in a packed batch they span all sequences.
    """
    keep = keep.contiguous()
    B, U, HM = keep.shape
    blocks = cdiv(U, _BLOCK)
    counts = ranks.new_empty(B * HM * blocks)
    if blocks > 1:
        _count_units[(B * HM * blocks,)](keep=keep, counts=counts, U=U, HM=HM, blocks=blocks, BU=_BLOCK)
    _list_units[(B * HM * blocks,)](
        keep=keep, counts=counts, ranks=ranks, lists=lists, U=U, HM=HM, blocks=blocks, BU=_BLOCK
    )
