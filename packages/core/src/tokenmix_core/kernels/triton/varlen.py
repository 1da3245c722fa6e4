"""Offsets of sequences and chunks in unpacked and packed batches, computed from `cu_seqlens` without index tables."""

import triton
import triton.language as tl


@triton.jit
def sequence_span(i_n, T, cu_seqlens, PACKED: tl.constexpr):
    """Return the first row (int64, in the flattened `[B · T]`) and the length of sequence `i_n`."""
    if PACKED:
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        begin = i_n.to(tl.int64) * T
        length = T
    return begin, length


@triton.jit
def first_chunk(i_n, begin, T, C, PACKED: tl.constexpr):
    """Return the index (slot) of sequence `i_n`'s first chunk of C tokens among the chunks of the batch.

    A slot is the index of a chunk in tensors with one entry per chunk. In a packed batch a sequence's slots start at
    `begin // C + i_n`: sequences never share a slot, `T // C + N` slots suffice, and no table of offsets is needed.
    """
    if PACKED:
        slot = begin // C + i_n
    else:
        slot = i_n.to(tl.int64) * tl.cdiv(T, C)
    return slot


@triton.jit
def locate_chunk(i_c, T, C, N, cu_seqlens, PACKED: tl.constexpr):
    """Find the chunk of C tokens with index `i_c` in the batch (see `first_chunk`).

    Returns:
        the sequence's index, its first row, its length, and the position of the chunk's first token in the sequence,
        which is at least the length if no chunk has the index.
    """
    if PACKED:
        BN: tl.constexpr = 256
        sequences = 0
        for i in range(0, N, BN):
            o_n = i + tl.arange(0, BN)
            slots = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(tl.int64) // C + o_n
            sequences += tl.sum(((slots <= i_c) & (o_n < N)).to(tl.int32), 0)
        i_n = sequences - 1
        begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = ((i_c - first_chunk(i_n, begin, T, C, PACKED)) * C).to(tl.int32)
    else:
        chunks = tl.cdiv(T, C)
        i_n = i_c // chunks
        begin, length = sequence_span(i_n, T, cu_seqlens, PACKED)
        first = (i_c - i_n * chunks) * C
    return i_n, begin, length, first


@triton.jit
def locate_slot(i_n, slots, fresh):
    """Return the slot of sequence `i_n`, as int64, and whether the sequence starts from the state in its slot.

    A sequence starts from a zero state if its slot is negative, or if it is `fresh` (unless `fresh` is None).
    """
    slot = tl.load(slots + i_n).to(tl.int64)
    known = slot >= 0
    if fresh is not None:
        known = known & (tl.load(fresh + i_n) == 0)
    return slot, known
