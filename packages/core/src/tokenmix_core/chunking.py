"""Index arithmetic for chunks, packed sequences and their boundaries.

A *packed* batch concatenates N sequences along time into one row (`B = 1`). Its boundaries are `cu_seqlens [N + 1]`,
int32 or int64, from 0 to T or less, as in flash-attn. Sequences may be empty. Tokens after the last boundary are
padding: they influence no other token, and their outputs and gradients are zero. The shapes of a packed batch can
therefore stay constant while its sequences change, as CUDA graphs require. No function waits for the device: a size
that depends on the values of `cu_seqlens` is replaced by an upper bound.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """Return ⌈a / b⌉ for positive b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n (n ≥ 1)."""
    return 1 << (n - 1).bit_length()


def num_sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return N, the number of sequences in a batch x `[B, ...]`: its rows or, if packed, the sequences in one row."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def chunk_slots(batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None) -> int:
    """Return an upper bound of a batch's number of chunks: the number of entries (slots) of tensors with one per chunk.

    For an unpacked batch the bound is the exact number."""
    if cu_seqlens is None:
        return batch * cdiv(tokens, chunk_size)
    return tokens // chunk_size + cu_seqlens.numel() - 1


def sequence_ids(cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int) -> Int[Tensor, "T"]:
    """Return, for each of `tokens` packed positions, the index of its sequence; N for padding."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)


def packed_positions(cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int) -> Int[Tensor, "T"]:
    """Return each packed token's position in its own sequence, counted from 0; padding counts as a further sequence."""
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return index - cu_seqlens[sequence_ids(cu_seqlens, tokens)]


def packed_lengths(cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int) -> Int[Tensor, "T"]:
    """Return, for each packed token, the length of its sequence; padding counts as a further sequence."""
    return torch.nn.functional.pad(cu_seqlens, (0, 1), value=tokens).diff()[sequence_ids(cu_seqlens, tokens)]


def slot_ids(cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int, chunk_size: int) -> Int[Tensor, "T"]:
    """Return, for each packed token, its chunk's index in tensors with one entry per chunk (see `chunk_slots`).

    Each sequence starts with a new chunk. Some indices below `chunk_slots` may belong to no chunk.
    """
    index = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = sequence_ids(cu_seqlens, tokens)
    begin = cu_seqlens[sequence]
    return begin // chunk_size + sequence + (index - begin) // chunk_size


def inverse(places: Int[Tensor, "R"], count: int) -> Int[Tensor, "count"]:
    """Invert a map from rows to distinct indices below `count` (or −1): return the row of each index, −1 if none."""
    rows = torch.arange(len(places), device=places.device)
    # rows that map to −1 go to an extra last element, which is cut off
    found = rows.new_full((count + 1,), -1).scatter_(0, torch.where(places < 0, count, places).long(), rows)
    return found[:count]


def chunk_places(
    cu_seqlens: Int[Tensor, "N_plus_1"], tokens: int, chunk_size: int
) -> tuple[Int[Tensor, "slots C"], Int[Tensor, "T"]]:
    """Return a table with the indices of each chunk's tokens, −1 if missing, and each token's index in the table.

    The index of a token counts the elements of the flattened table; it is −1 for padding.
    """
    at = slot_ids(cu_seqlens, tokens, chunk_size) * chunk_size + packed_positions(cu_seqlens, tokens) % chunk_size
    at = at.masked_fill(sequence_ids(cu_seqlens, tokens) == len(cu_seqlens) - 1, -1)
    slots = chunk_slots(1, tokens, chunk_size, cu_seqlens)
    return inverse(at, slots * chunk_size).view(slots, chunk_size), at


def cu_seqlens_from_lengths(lengths: Int[Tensor, "N"]) -> Int[Tensor, "N_plus_1"]:
    """Return the boundaries of sequences with the given lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
