"""The first local key of each query, and lists of the retained units (keys, or chunks of keys) and of all others.

Lists are built on the device, in order, by counting units, without host synchronisation and atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.launch.launcher import cached_launch

# number of units (keys, or chunks of keys) that one program lists
_BLOCK = 1024


@triton.jit
def left_of(o_q, window, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Return the position of the first local key of each of the queries at positions `o_q`."""
    if WINDOW:
        return tl.maximum(o_q - window + 1, 0)
    else:
        return tl.maximum(o_q, 0) // UNIT * UNIT


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
    """Count the retained units of a block of BU units."""
    i_b, i_m, i_u = _row_and_block(blocks, HM)
    b_kept = _load_kept(keep, i_b, i_m, i_u * BU + tl.arange(0, BU), U, HM)
    tl.store(counts + tl.program_id(0), tl.sum(b_kept, 0))


@cached_launch
@triton.jit
def _list_units(keep, counts, ranks, lists, U, HM, blocks, BU: tl.constexpr):
    """Write each unit of a block to the list of retained or of other units, and its rank (see `list_units`)."""
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
    # the rank behind the last unit is the number of retained units
    tl.store(ranks + o_row * (U + 1) + o_u, b_rank, mask=o_u <= U)
    if (i_u + 1) * BU == U:
        tl.store(ranks + o_row * (U + 1) + U, before + tl.sum(b_kept, 0))
    tl.store(lists + o_row * U + tl.where(b_kept != 0, b_rank, count + o_u - b_rank), o_u, mask=o_u < U)


def list_units(keep: Tensor, ranks: Tensor, lists: Tensor) -> None:
    """Write `ranks [B, HM, U + 1]`, the number of retained units before each unit, then in all, and `lists [B, HM, U]`.

    A row of `lists` holds the retained units of all packed sequences in ascending order, then all other units.
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
