"""Decays inside a chunk, as cumulative base-2 logarithms b; kernels exponentiate only differences of two b."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# lower bound of log-decays: its exp2 is zero in float32, and larger magnitudes would make cumulative sums less
# precise
LOWEST = tl.constexpr(-160.0)


@triton.jit
def load_decay(p_g, m_t):
    """Load natural log-decays, return them as base-2 logarithms ≥ `LOWEST`; 0 (no decay) where `m_t` is false."""
    return tl.maximum(tl.load(p_g, mask=m_t, other=0.0).to(tl.float32) * LOG2_E, LOWEST)


@triton.jit
def causal_decay(b_row, b_col, o_row, o_col):
    """Return `exp2(b_row − b_col)`, but 0 if the row's token precedes the column's."""
    m_causal = o_row[:, None] >= o_col[None, :]
    return tl.exp2(tl.where(m_causal, b_row[:, None] - b_col[None, :], float("-inf")))


@triton.jit
def causal_decay_transposed(b_row, b_col, o_row, o_col):
    """Return the transpose of `causal_decay`: `exp2(b_col − b_row)`, but 0 if the column's token precedes the row's."""
    m_causal = o_row[:, None] <= o_col[None, :]
    return tl.exp2(tl.where(m_causal, b_col[None, :] - b_row[:, None], float("-inf")))
