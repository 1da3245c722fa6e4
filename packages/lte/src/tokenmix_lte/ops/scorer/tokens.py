"""Which tokens a program of the scorer reads, and which of their channels dropout leaves."""

import triton
import triton.language as tl

from tokenmix_core.tile.sequences import locate_chunk


@triton.jit
def locate_tokens(i_c, slots, T, BT, N, begin, cu_seqlens, PACKED: tl.constexpr):
    """Of slot `i_c`: its sequence's first row, first and end of the tokens that exist, and the slot's first token."""
    i_n, i_row, end, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    end = tl.where(i_c < slots, end, 0)
    there = 0
    if begin is not None:
        there = tl.load(begin + tl.minimum(i_n, N - 1)).to(tl.int32)
    return i_row, there, end, first


@triton.jit
def load_channels(x, o_row, m_row, C, BC: tl.constexpr):
    """C channels of rows `[BT]`, a tile `[BT, BC]`; 0 where masked."""
    o_c = tl.arange(0, BC)
    return tl.load(x + o_row[:, None] * C + o_c[None, :], mask=m_row[:, None] & (o_c < C)[None, :], other=0.0)


@triton.jit
def store_channels(x, b_x, o_row, m_row, C, BC: tl.constexpr):
    """Store a tile `[BT, BC]` as C channels of rows `[BT]`."""
    o_c = tl.arange(0, BC)
    p_x = x + o_row[:, None] * C + o_c[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_row[:, None] & (o_c < C)[None, :])


@triton.jit
def scramble(x):
    """A hash of 32 bits."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropped(b_x, seed, threshold, o_row, i_channel, LAYER: tl.constexpr, DROPOUT: tl.constexpr):
    """A tile `[BT, BC]` of channels from `i_channel` on, with dropout as `reference.dropout_mask` says."""
    if DROPOUT:
        b_seed = tl.load(seed).to(tl.uint32)
        o_c = (i_channel + tl.arange(0, b_x.shape[1])).to(tl.uint32)
        b_base = scramble(tl.zeros([1], tl.uint32) + b_seed + LAYER * 0x2545F491)
        b_of_row = scramble(b_base ^ o_row.to(tl.uint32))
        b_of_channel = scramble(b_base + o_c) | 1
        b_hash = b_of_row[:, None] * b_of_channel[None, :]
        b_hash = (b_hash ^ (b_hash >> 15)) * 0x2C1B3C6D
        b_hash = (b_hash >> 8).to(tl.int32)
        scale = 16777216.0 / (16777216 - threshold)
        b_x = tl.where(b_hash >= threshold, b_x.to(tl.float32) * scale, 0.0).to(b_x.dtype)
    return b_x
