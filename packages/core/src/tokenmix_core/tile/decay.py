"""Decays inside a chunk: base-2 logarithms, cumulated, whose differences alone are exponentiated."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# exp2 of anything lower is zero in float32; bounding single decays keeps the digits of the cumulative ones
LOWEST = tl.constexpr(-160.0)


@triton.jit
def load_decay(p_g, m_t):
    """Base-2 logarithms of the decays at `p_g`, given there as natural ones; 0 (no decay) where masked."""
    return tl.maximum(tl.load(p_g, mask=m_t, other=0.0).to(tl.float32) * LOG2_E, LOWEST)


@triton.jit
def causal_decay(b_row, b_col, o_row, o_col):
    """`exp2(b_row − b_col)` where the row's token is at or after the column's, else 0."""
    m_causal = o_row[:, None] >= o_col[None, :]
    return tl.exp2(tl.where(m_causal, b_row[:, None] - b_col[None, :], float("-inf")))


@triton.jit
def causal_decay_transposed(b_row, b_col, o_row, o_col):
    """The transpose of `causal_decay`: `exp2(b_col − b_row)` where the column's token is not before the row's."""
    m_causal = o_row[:, None] <= o_col[None, :]
    return tl.exp2(tl.where(m_causal, b_col[None, :] - b_row[:, None], float("-inf")))
