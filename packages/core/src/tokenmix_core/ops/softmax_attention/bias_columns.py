"""Bias columns: each query's lse and delta as bf16×3 columns that the MMAs of the dK/dV kernel add.

The dK/dV kernel has queries in columns: Pᵀ = exp(scale · K Qᵀ − lse) and dSᵀ = Pᵀ ⊙ (V dOᵀ − delta). As vectors, lse
and delta would cost each thread 32 shared-memory loads and as many subtractions per tile. As extra columns of Q and dO,
with ones in K and V, they cost neither. Three bfloat16 values add up to a float32 value.
"""

import triton
import triton.language as tl

# lse and delta are each the sum of this number of bfloat16 columns: first those of −lse / scale, then those of −delta
PARTS = tl.constexpr(3)
# number of bias columns including zero padding: the K dimension of one MMA instruction
BIAS_COLUMNS = tl.constexpr(16)


@triton.jit
def bias_of(o_c, b_lse, b_delta, scale):
    """Return the bias columns `o_c` of queries, in bfloat16; shapes broadcast.

    `scale` converts a score to the units of `b_lse`. `b_lse` is −∞ if a query sees no key: all scores of this query are
    masked. `b_lse` is ∞ if a query is not selected: all weights of this query must be 0. In both cases the bias is
    finite, since an infinite bias would make scores NaN.
    """
    b_infinite = tl.where(b_lse > 0, -(2.0**100), 0.0)
    b_x = tl.where(tl.abs(b_lse) == float("inf"), b_infinite, -b_lse / scale)
    b_x = tl.where(o_c < PARTS, b_x, -b_delta)
    b_high = b_x.to(tl.bfloat16).to(tl.float32)
    b_rest = b_x - b_high
    b_middle = b_rest.to(tl.bfloat16).to(tl.float32)
    i_part = o_c - tl.where(o_c < PARTS, 0, PARTS)
    b_bias = tl.where(i_part == 0, b_high, tl.where(i_part == 1, b_middle, b_rest - b_middle))
    return tl.where(o_c < 2 * PARTS, b_bias, 0.0).to(tl.bfloat16)


@triton.jit
def store_bias(bias, o_row, b_lse, b_delta, m_row, scale):
    """Store the bias columns of the rows `o_row` for which the mask `m_row` is true."""
    o_c = tl.arange(0, BIAS_COLUMNS)[None, :]
    b_bias = bias_of(o_c, b_lse[:, None], b_delta[:, None], scale)
    tl.store(bias + o_row[:, None] * BIAS_COLUMNS + o_c, b_bias, mask=m_row[:, None])
