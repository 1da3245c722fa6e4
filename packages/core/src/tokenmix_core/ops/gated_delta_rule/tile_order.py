"""Order the segments of a packed batch from longest to shortest, so that few SMs idle in the last wave."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.kernels.launch.launcher import cached_launch

# maximum number of segments to sort: with more segments, sorting takes longer than it saves
_MOST = 1024
_BLOCK = 64


@triton.jit
def segment_lengths(o_s, N, segment, cu_seqlens, BLOCK: tl.constexpr):
    """Return the number of tokens of the segments with indices `o_s`; 0 for an unused index.

    Indices are those that `kernels.triton.varlen.first_chunk` gives to chunks of `segment` tokens.
    """
    b_length = tl.zeros([BLOCK], tl.int32)
    for i in range(0, N, BLOCK):
        o_n = i + tl.arange(0, BLOCK)
        bos = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int64)
        eos = tl.load(cu_seqlens + o_n + 1, mask=o_n < N, other=0).to(tl.int64)
        # first token of each segment, counted in each sequence
        first = (o_s[:, None] - (bos // segment + o_n)[None, :]) * segment
        left = tl.minimum((eos - bos)[None, :] - first, segment)
        b_length += tl.sum(tl.where((first >= 0) & (left > 0), left, 0).to(tl.int32), 1)
    return b_length


@cached_launch
@triton.jit(do_not_specialize=("N", "segment", "slots"))
def longest_first_kernel(cu_seqlens, order, N, segment, slots, BLOCK: tl.constexpr):
    """Write the segments' indices to `order`, the longest segment first; a segment's rank is its index in `order`."""
    o_s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_length, b_rank = segment_lengths(o_s, N, segment, cu_seqlens, BLOCK), tl.zeros([BLOCK], tl.int32)
    for i in range(0, slots, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_other = segment_lengths(o_i, N, segment, cu_seqlens, BLOCK)[None, :]
        b_before = (b_other > b_length[:, None]) | ((b_other == b_length[:, None]) & (o_i[None, :] < o_s[:, None]))
        b_rank += tl.sum((b_before & (o_i < slots)[None, :]).to(tl.int32), 1)
    tl.store(order + b_rank, o_s, mask=o_s < slots)


def longest_first(tokens: int, segment: int, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the indices of a packed batch's segments, or of its sequences if `segment` is 0, longest first, int32.

    None stands for any order: segments of an unpacked batch are equally long, and more than `_MOST` segments take
    longer to sort than the order saves.
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
