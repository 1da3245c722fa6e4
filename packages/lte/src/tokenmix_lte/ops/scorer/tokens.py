"""Device functions of the scorer's kernels: which tokens a program computes; loads and stores of tokens; dropout."""

import triton
import triton.language as tl

from tokenmix_core.kernels import locate_chunk
from tokenmix_lte.ops.scorer.sizes import DROPPED

DROPPED_Z = tl.constexpr(DROPPED)


@triton.jit
def locate_tokens(i_c, slots, T, BT, N, begin, cu_seqlens, PACKED: tl.constexpr):
    """Return, for tile `i_c` of BT tokens, the first row of its sequence and, counted from this row, start and end of
    the sequence's existing tokens, and the tile's first token. The end is 0 if `i_c` is not below `slots`."""
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
def fold(x):
    """Return the lower half of int64 xor its upper half."""
    return (x ^ (x >> 32)).to(tl.int32)


@triton.jit
def dropout_scale(threshold, DROPOUT: tl.constexpr):
    """Return dropout's factor 1 / (1 − p), in which p is threshold / `reference.LEVELS`; 1 without dropout."""
    scale = 1.0
    if DROPOUT:
        scale = 32768.0 / (32768 - threshold)
    return scale


@triton.jit
def dropout_mask(seed, threshold, o_row, i_pair, LAYER: tl.constexpr, C: tl.constexpr):
    """Return `reference.dropout_mask` for a tile `[BT, C]`, whose first channel is the first of the pair `i_pair`."""
    b_seed = tl.load(seed).to(tl.uint32)
    o_c = tl.arange(0, C)
    b_base = hash32(tl.zeros([1], tl.uint32) + b_seed + (LAYER + 1) * 0x2545F491)
    b_row = (b_base ^ o_row.to(tl.uint32)).to(tl.int32, bitcast=True)
    # the signed value of 0x9E3779B1
    b_row_hash = fold(b_row.to(tl.int64) * -0x61C8864F).to(tl.int64)
    # both channels of a pair have one hash, which the compiler computes once
    b_pair_hash = hash32(b_base + (i_pair + (o_c >> 1)).to(tl.uint32)) | 1
    b_wide = b_row_hash[:, None] * b_pair_hash.to(tl.int32, bitcast=True).to(tl.int64)[None, :]
    b_hash = fold(b_wide)
    b_half = tl.where((o_c & 1 == 0)[None, :], b_hash, b_hash >> 16)
    return (b_half & 32767) >= threshold


@triton.jit
def apply_dropout(b_x, seed, threshold, o_row, i_pair, LAYER: tl.constexpr, DROPOUT: tl.constexpr):
    """Apply dropout to a tile of a layer's inputs, or of their gradients; scale what remains."""
    if DROPOUT:
        b_mask = dropout_mask(seed, threshold, o_row, i_pair, LAYER, b_x.shape[1])
        b_x = tl.where(b_mask, b_x.to(tl.float32) * dropout_scale(threshold, DROPOUT), 0.0).to(b_x.dtype)
    return b_x


@triton.jit
def mark_dropped(b_z, seed, threshold, o_row, LAYER: tl.constexpr, DROPOUT: tl.constexpr):
    """Set z of the dropped inputs of layer LAYER to `sizes.DROPPED`, for which SiLU and its derivative are 0."""
    if DROPOUT:
        b_z = tl.where(dropout_mask(seed, threshold, o_row, 0, LAYER, b_z.shape[1]), b_z, DROPPED_Z)
    return b_z
