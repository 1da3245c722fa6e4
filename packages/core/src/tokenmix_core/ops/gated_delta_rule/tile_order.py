"""Which of a packed batch's pieces to start first: the longest, as one begun last would keep all others waiting."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch

# beyond so many pieces they are taken as they come: even their order would then take longer to find than it saves
_MOST = 1024
_BLOCK = 64


@triton.jit
def piece_lengths(o_s, N, segment, cu_seqlens, BLOCK: tl.constexpr):
    """Tokens of the segments in slots `o_s`, numbered as `tile.sequences` numbers chunks; 0 for unused slots."""
    b_length = tl.zeros([BLOCK], tl.int32)
    for i in range(0, N, BLOCK):
        o_n = i + tl.arange(0, BLOCK)
        begin = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int64)
        end = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0).to(tl.int64)
        # where in the sequence a slot's segment would begin
        first = (o_s[:, None] - (begin // segment + o_n)[None, :]) * segment
        left = tl.minimum((end - begin)[None, :] - first, segment)
        b_length += tl.sum(tl.where((first >= 0) & (left > 0), left, 0).to(tl.int32), 1)
    return b_length


@cached_launch
@triton.jit(do_not_specialize=("N", "segment", "slots"))
def longest_first_kernel(cu_seqlens, order, N, segment, slots, BLOCK: tl.constexpr):
    """The slots of pieces from the longest to the shortest: a piece's place is the number of those before it."""
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_length, b_place = piece_lengths(o_s, N, segment, cu_seqlens, BLOCK), tl.zeros([BLOCK], tl.int32)
    for i in range(0, slots, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_other = piece_lengths(o_i, N, segment, cu_seqlens, BLOCK)[None, :]
        b_before = (b_other > b_length[:, None]) | ((b_other == b_length[:, None]) & (o_i[None, :] < o_s[:, None]))
        b_place += tl.sum((b_before & (o_i < slots)[None, :]).to(tl.int32), 1)
    tl.store(order + b_place, o_s, mask=o_s < slots)


def longest_first(tokens: int, segment: int, cu_seqlens: Tensor | None) -> Tensor | None:
    """The slots of a packed batch's segments, or of its sequences if `segment` is 0, longest first, int32.

    None means any order: unpacked pieces are equally long.
    """
    if cu_seqlens is None:
        return None
    segment = segment or tokens + 1
    slots = chunk_slots(1, tokens, segment, cu_seqlens)
    if slots > _MOST:
        return None
    order = torch.empty(slots, dtype=torch.int32, device=cu_seqlens.device)
    longest_first_kernel[(cdiv(slots, _BLOCK),)](
        cu_seqlens=cu_seqlens, order=order, N=cu_seqlens.numel() - 1, segment=segment, slots=slots, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    return order
