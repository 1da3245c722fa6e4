"""Each query's log-sum-exp and delta as terms of 16 bits, which the matrix units subtract.

The kernel of keys has queries in columns: Pᵀ = exp(scale · K Qᵀ − lse) and dSᵀ = Pᵀ ⊙ (V dOᵀ − δ). As numbers lse and δ
would be read from shared memory by every thread, 32 of them a tile, and taken off in as many instructions. As further
columns of Q and dO they need neither: K and V have ones there, and a float32 number is the sum of three bfloat16.
"""

import triton
import triton.language as tl

# terms of −lse / scale, and as many of −δ behind them
EACH = tl.constexpr(3)
# with zeros behind these, the least depth of a product
TERMS = tl.constexpr(16)
# with less −lse / scale could leave float32
LEAST_SCALE = 2.0**-64


@triton.jit
def terms_of(o_c, b_lse, b_delta, scale):
    """The columns `o_c` of the terms of queries, in bfloat16, for shapes that broadcast.

    `scale` is a score's factor in units of `b_lse`. That is −∞ for a query that sees no key, whose scores are masked,
    and ∞ for one that nobody wants, whose weights are 0: as infinities they would leave no numbers.
    """
    b_infinite = tl.where(b_lse > 0, -(2.0**100), 0.0)
    b_x = tl.where(tl.abs(b_lse) == float("inf"), b_infinite, -b_lse / scale)
    b_x = tl.where(o_c < EACH, b_x, -b_delta)
    b_high = b_x.to(tl.bfloat16).to(tl.float32)
    b_rest = b_x - b_high
    b_middle = b_rest.to(tl.bfloat16).to(tl.float32)
    i_term = o_c - tl.where(o_c < EACH, 0, EACH)
    b_term = tl.where(i_term == 0, b_high, tl.where(i_term == 1, b_middle, b_rest - b_middle))
    return tl.where(o_c < 2 * EACH, b_term, 0.0).to(tl.bfloat16)


@triton.jit
def store_terms(terms, o_row, b_lse, b_delta, m_row, scale):
    """Store the terms of the queries of the rows `o_row`, where there are such."""
    o_c = tl.arange(0, TERMS)[None, :]
    b_terms = terms_of(o_c, b_lse[:, None], b_delta[:, None], scale)
    tl.store(terms + o_row[:, None] * TERMS + o_c, b_terms, mask=m_row[:, None])
