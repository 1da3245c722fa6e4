"""Index arithmetic: chunks, packed sequences and their offsets.

A *packed* batch concatenates N sequences along time into one row (`B = 1`) and names their borders with
`cu_seqlens [N + 1]`, int32 or int64, starting at 0 and ending at T, as in flash-attn. Empty sequences are allowed.
Nothing here waits for the device: sizes that depend on the values of `cu_seqlens` are replaced by their upper bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉ for positive b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n ≥ 1)."""
    return 1 << (n - 1).bit_length()


def chunk_slots(batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None) -> int:
    """Slots for the chunks of a batch, as `tile.sequences` numbers them: exact unpacked, an upper bound packed."""
    if cu_seqlens is None:
        return batch * cdiv(tokens, chunk_size)
    return tokens // chunk_size + len(cu_seqlens) - 1


class ChunkLayout(NamedTuple):
    """Where the chunks of a batch lie. Chunks never cross a border between sequences.

    Attributes:
        chunk_offsets: `[N + 1]` int32, the number of chunks before each sequence; None for an unpacked batch.
        chunk_to_seq: `[chunks]` int32, the sequence of each chunk, N for the unused tail; None for an unpacked batch.
        chunks: chunks to launch over. Unpacked: chunks in one row. Packed: an upper bound, `⌊T / C⌋ + N`.
    """

    chunk_offsets: Tensor | None
    chunk_to_seq: Tensor | None
    chunks: int


def chunk_layout(tokens: int, chunk_size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None) -> ChunkLayout:
    """Lay out chunks of `chunk_size` over `tokens` positions, sequence by sequence when `cu_seqlens` is given."""
    if cu_seqlens is None:
        return ChunkLayout(None, None, cdiv(tokens, chunk_size))
    chunk_offsets = torch.zeros_like(cu_seqlens, dtype=torch.int32)
    torch.cumsum((cu_seqlens.diff() + (chunk_size - 1)) // chunk_size, 0, dtype=torch.int32, out=chunk_offsets[1:])
    chunks = tokens // chunk_size + len(cu_seqlens) - 1
    index = torch.arange(chunks, device=cu_seqlens.device, dtype=torch.int32)
    chunk_to_seq = torch.searchsorted(chunk_offsets[1:], index, right=True, out_int32=True)
    return ChunkLayout(chunk_offsets, chunk_to_seq, chunks)


def sequence_ids(cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int) -> Int[Tensor, "T"]:
    """The index of the sequence that each of `tokens` packed positions belongs to."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


def packed_positions(cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int) -> Int[Tensor, "T"]:
    """The position of each packed token in its own sequence, counted from 0."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return index - cu_seqlens[sequence_ids(cu_seqlens, tokens)]


def cu_seqlens_from_lengths(lengths: Int[Tensor, "N"]) -> Int[Tensor, "N_plus_1"]:
    """Sequence borders from sequence lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def pack(x: Float[Tensor, "B T *rest"], mask: Bool[Tensor, "B T"]) -> tuple[Tensor, Tensor]:
    """Drop the padding: `(packed [1, mask.sum(), ...], cu_seqlens)`. Waits for the device once, to learn the size."""
    cu_seqlens = cu_seqlens_from_lengths(mask.sum(1))
    return x[mask].unsqueeze(0), cu_seqlens


def unpack(packed: Float[Tensor, "1 T *rest"], mask: Bool[Tensor, "B T"]) -> Tensor:
    """The inverse of `pack`; padding becomes zero."""
    out = packed.new_zeros(*mask.shape, *packed.shape[2:])
    out[mask] = packed.squeeze(0)
    return out
