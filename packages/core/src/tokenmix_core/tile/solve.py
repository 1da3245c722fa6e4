"""Inverses of small unit lower triangular matrices, by blocks of 16 rows: one warp holds such a block in registers.

For I + L with L strictly lower, halves give

    (I + [[L₀₀, 0], [L₁₀, L₁₁]])⁻¹ = [[A₀, 0], [−A₁ L₁₀ A₀, A₁]],

applied from single rows upwards. Every factor is a piece of the matrix or of its inverse, so nothing grows beyond what
the inverse holds; powers of L, which a Neumann series needs, reach 10⁶ where keys repeat, and cancel only in exact
arithmetic.
"""

import triton
import triton.language as tl


@triton.jit
def inverse_16(b_l, PRECISION: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower `[16, 16]` float32 tile: pieces of 2, 4 and 8 rows are joined under masks."""
    o_i, o_j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    b_a = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(o_i // 2 == o_j // 2, b_l, 0.0)
    for log_size in tl.static_range(1, 4):
        m_pair = (o_i >> (log_size + 1) == o_j >> (log_size + 1)) & (o_i >> log_size != o_j >> log_size)
        b_la = tl.dot(tl.where(m_pair, b_l, 0.0), b_a, input_precision=PRECISION)
        b_a -= tl.dot(b_a, b_la, input_precision=PRECISION)
    return b_a


@triton.jit
def inverse_64(
    l_00, l_10, l_11, l_20, l_21, l_22, l_30, l_31, l_32, l_33, PRECISION: tl.constexpr
):  # fmt: skip
    """(I + L)⁻¹ of a strictly lower `[64, 64]` matrix, given and returned as its ten blocks `[16, 16]`, row by row."""
    a_00, a_11 = inverse_16(l_00, PRECISION), inverse_16(l_11, PRECISION)
    a_22, a_33 = inverse_16(l_22, PRECISION), inverse_16(l_33, PRECISION)
    # rows of blocks: A_ij = −A_ii Σ_m L_im A_mj
    a_10 = -tl.dot(a_11, tl.dot(l_10, a_00, input_precision=PRECISION), input_precision=PRECISION)
    b_x = tl.dot(l_20, a_00, input_precision=PRECISION)
    b_x = tl.dot(l_21, a_10, b_x, input_precision=PRECISION)
    a_20 = -tl.dot(a_22, b_x, input_precision=PRECISION)
    a_21 = -tl.dot(a_22, tl.dot(l_21, a_11, input_precision=PRECISION), input_precision=PRECISION)
    b_x = tl.dot(l_30, a_00, input_precision=PRECISION)
    b_x = tl.dot(l_31, a_10, b_x, input_precision=PRECISION)
    b_x = tl.dot(l_32, a_20, b_x, input_precision=PRECISION)
    a_30 = -tl.dot(a_33, b_x, input_precision=PRECISION)
    b_x = tl.dot(l_31, a_11, input_precision=PRECISION)
    b_x = tl.dot(l_32, a_21, b_x, input_precision=PRECISION)
    a_31 = -tl.dot(a_33, b_x, input_precision=PRECISION)
    a_32 = -tl.dot(a_33, tl.dot(l_32, a_22, input_precision=PRECISION), input_precision=PRECISION)
    return a_00, a_10, a_11, a_20, a_21, a_22, a_30, a_31, a_32, a_33
