"""Query selection, attention for some queries only: the selected rows of a tile, and the tiles that have such rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, num_sequences
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.varlen import sequence_span


@triton.jit
def selected_rows(selected, o_row, first, rows, BM: tl.constexpr):
    """Return which of the rows `first` … `first + BM − 1` are selected; row 0 is at offset `o_row` of `selected`."""
    o_t = first + tl.arange(0, BM)
    return tl.load(selected + o_row + o_t, mask=o_t < rows, other=0) != 0


@triton.jit
def listed(order, i):
    """Return the i-th tile of `order`, a list made by `list_tiles`; i if `order` is None."""
    if order is None:
        return i
    else:
        return tl.load(order + i)


@triton.jit
def list_offset(i_b, i_n, start, tiles, BM: tl.constexpr, PACKED: tl.constexpr):
    """Return the offset of a sequence's entries in `order` and `ranks` (`list_tiles`): one per tile, and one more."""
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
    offset = list_offset(i_n.to(tl.int64), i_n, start, tiles, BM, PACKED)
    count = 0
    for i in range(0, tl.cdiv(length, BM) + 1, BT):
        o_i = i + tl.arange(0, BT)
        o_t = o_i[:, None] * BM + tl.arange(0, BM)[None, :]
        b_any = tl.max(tl.load(selected + start + o_t, mask=o_t < length, other=0).to(tl.int32), 1)
        b_any = (b_any != 0).to(tl.int32)
        b_rank = count + tl.cumsum(b_any, 0) - b_any
        tl.store(ranks + offset + o_i, b_rank, mask=o_i <= tl.cdiv(length, BM))
        tl.store(order + offset + b_rank, o_i, mask=b_any != 0)
        count += tl.sum(b_any)


def list_tiles(selected: Tensor, cu_seqlens: Tensor | None, BM: int) -> tuple[Tensor, Tensor]:
    """Return `(ranks, order)`, int32, which list the query tiles of BM queries that contain a selected query.

    A sequence's entries start at `list_offset`. `order` has the indices of these tiles. `ranks` has, for every tile of
    the sequence, the number of listed tiles before it, and then the number of all listed tiles.
    """
    B, TQ = selected.shape
    sequences = num_sequences(selected, cu_seqlens)
    capacity = B * (cdiv(TQ, BM) + 1) if cu_seqlens is None else TQ // BM + 2 * sequences
    ranks, order = torch.empty(2, capacity, dtype=torch.int32, device=selected.device)
    _list_tiles[(sequences,)](
        selected=selected, ranks=ranks, order=order, cu_seqlens=cu_seqlens, TQ=TQ, tiles=cdiv(TQ, BM), BM=BM,
        PACKED=cu_seqlens is not None, BT=64,
    )  # fmt: skip
    return ranks, order
