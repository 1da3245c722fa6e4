"""Attention for chosen queries: which rows of a tile are wanted, and a list of the tiles that hold one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, num_sequences
from tokenmix_core.launch.kernels import cached_launch
from tokenmix_core.tile.sequences import sequence_span


@triton.jit
def selected_rows(selected, o_row, first, rows, BM: tl.constexpr):
    """Tell whether each of the rows `first` … `first + BM − 1` is selected, rows counted from `o_row` on."""
    o_t = first + tl.arange(0, BM)
    return tl.load(selected + o_row + o_t, mask=o_t < rows, other=0) != 0


@triton.jit
def listed(order, i):
    """The tile at place i of a list; i itself without a list."""
    if order is None:
        return i
    else:
        return tl.load(order + i)


@triton.jit
def list_offset(i_b, i_n, start, tiles, BM: tl.constexpr, PACKED: tl.constexpr):
    """Where the list of a sequence begins: it has room for its tiles and one more."""
    if PACKED:
        return start // BM + 2 * i_n
    else:
        return i_b * (tiles + 1)


@cached_launch
@triton.jit
def _list_tiles(
    selected, ranks, order, cu_seqlens, TQ, tiles, BM: tl.constexpr, PACKED: tl.constexpr, BT: tl.constexpr
):
    i_n = tl.program_id(0)
    start, length = sequence_span(i_n, TQ, cu_seqlens, PACKED)
    place = list_offset(i_n.to(tl.int64), i_n, start, tiles, BM, PACKED)
    count = 0
    for i in range(0, tl.cdiv(length, BM) + 1, BT):
        o_i = i + tl.arange(0, BT)
        o_t = o_i[:, None] * BM + tl.arange(0, BM)[None, :]
        b_any = tl.max(tl.load(selected + start + o_t, mask=o_t < length, other=0).to(tl.int32), 1)
        b_any = (b_any != 0).to(tl.int32)
        b_rank = count + tl.cumsum(b_any, 0) - b_any
        tl.store(ranks + place + o_i, b_rank, mask=o_i <= tl.cdiv(length, BM))
        tl.store(order + place + b_rank, o_i, mask=b_any != 0)
        count += tl.sum(b_any)


def list_tiles(selected: Tensor, cu_seqlens: Tensor | None, BM: int) -> tuple[Tensor, Tensor]:
    """For each sequence: how many tiles of BM queries with a selected one lie before each tile, and which they are.

    Both int32, in places that `first_place` counts; a sequence's ranks end with its number of such tiles.
    """
    B, TQ = selected.shape
    sequences = num_sequences(selected, cu_seqlens)
    places = B * (cdiv(TQ, BM) + 1) if cu_seqlens is None else TQ // BM + 2 * sequences
    ranks, order = torch.empty(2, places, dtype=torch.int32, device=selected.device)
    _list_tiles[(sequences,)](
        selected=selected, ranks=ranks, order=order, cu_seqlens=cu_seqlens, TQ=TQ, tiles=cdiv(TQ, BM), BM=BM,
        PACKED=cu_seqlens is not None, BT=64,
    )  # fmt: skip
    return ranks, order
