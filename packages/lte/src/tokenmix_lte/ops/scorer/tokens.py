"""Device functions of the scorer's kernels: which tokens a program computes; loads and stores of tokens; dropout."""

import triton
import triton.language as tl

from tokenmix_core.kernels import locate_chunk


@triton.jit
def locate_tokens(i_c, slots, T, BT, N, begin, cu_seqlens, PACKED: tl.constexpr):
    """Return the first row of the sequence of tile `i_c` (BT tokens), its existing tokens' start and end, and the
    tile's first token; the end is 0 if `i_c` is not below `slots`."""
    i_n, i_row, end, first = locate_chunk(i_c, T, BT, N, cu_seqlens, PACKED)
    end = tl.where(i_c < slots, end, 0)
    start = 0
    if begin is not None:
        start = tl.load(begin + tl.minimum(i_n, N - 1)).to(tl.int32)
    return i_row, start, end, first


@triton.jit
def load_channels(x, o_row, m_row, C, BC: tl.constexpr):
    """Load C channels of the rows `o_row` as a tile `[BT, BC]`; masked elements are 0."""
    o_c = tl.arange(0, BC)
    return tl.load(x + o_row[:, None] * C + o_c[None, :], mask=m_row[:, None] & (o_c < C)[None, :], other=0.0)


@triton.jit
def store_channels(x, b_x, o_row, m_row, C, BC: tl.constexpr):
    """Store a tile `[BT, BC]` to C channels of the rows `o_row`."""
    o_c = tl.arange(0, BC)
    p_x = x + o_row[:, None] * C + o_c[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_row[:, None] & (o_c < C)[None, :])


@triton.jit
def hash32(x):
    """Return a 32-bit hash of x."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def apply_dropout(b_x, seed, threshold, o_row, i_channel, LAYER: tl.constexpr, DROPOUT: tl.constexpr):
    """Apply `reference.dropout_mask` to a tile `[BT, BC]` of channels from `i_channel` on; scale the other elements."""
    if DROPOUT:
        b_seed = tl.load(seed).to(tl.uint32)
        o_c = (i_channel + tl.arange(0, b_x.shape[1])).to(tl.uint32)
        b_base = hash32(tl.zeros([1], tl.uint32) + b_seed + LAYER * 0x2545F491)
        b_row_hash = hash32(b_base ^ o_row.to(tl.uint32))
        b_channel_hash = hash32(b_base + o_c) | 1
        b_hash = b_row_hash[:, None] * b_channel_hash[None, :]
        b_hash = (b_hash ^ (b_hash >> 15)) * 0x2C1B3C6D
        b_hash = (b_hash >> 8).to(tl.int32)
        scale = 16777216.0 / (16777216 - threshold)
        b_x = tl.where(b_hash >= threshold, b_x.to(tl.float32) * scale, 0.0).to(b_x.dtype)
    return b_x
