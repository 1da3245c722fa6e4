"""Inverses of small unit lower triangular matrices, by blocks of 16 rows that one warp holds in registers.

For I + L with L strictly lower triangular, the inverses A₀ and A₁ of the two halves give the inverse of the whole:

    (I + [[L₀₀, 0], [L₁₀, L₁₁]])⁻¹ = [[A₀, 0], [−A₁ L₁₀ A₀, A₁]],

first for blocks of one row, then of 2, 4, 8 … rows. Every factor is a block of the matrix or of its inverse, so no
intermediate exceeds the entries of the inverse. A Neumann series would sum powers of L: if keys repeat, these reach 10⁶
and cancel only in exact arithmetic.

With PRECISION "bf16x3" each matrix is split into bfloat16 high and low parts once, for all of its MMAs.
"""

import triton
import triton.language as tl


@triton.jit
def split_hi_lo(b_x, PRECISION: tl.constexpr):
    """Return a float32 tile's high and low bfloat16 parts for PRECISION "bf16x3"; else return the tile twice."""
    if PRECISION == "bf16x3":
        b_hi = b_x.to(tl.bfloat16)
        return b_hi, (b_x - b_hi.to(tl.float32)).to(tl.bfloat16)
    else:
        return b_x, b_x


@triton.jit
def split_dot(x, y, b_z, PRECISION: tl.constexpr):
    """Return Z + X Y, X and Y split by `split_hi_lo`: three bfloat16 MMAs (no low × low), or `tl.dot` in PRECISION."""
    if PRECISION == "bf16x3":
        b_z = tl.dot(x[1], y[0], b_z)
        b_z = tl.dot(x[0], y[1], b_z)
        return tl.dot(x[0], y[0], b_z)
    else:
        return tl.dot(x[0], y[0], b_z, input_precision=PRECISION)


@triton.jit
def inverse_16(b_l, PRECISION: tl.constexpr):
    """Return (I + L)⁻¹ for a strictly lower triangular float32 L `[16, 16]`; masks select blocks of 1 to 8 rows."""
    o_i, o_j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    zero = tl.zeros([16, 16], tl.float32)
    b_a = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(o_i // 2 == o_j // 2, b_l, 0.0)
    for log_size in tl.static_range(1, 4):
        m_pair = (o_i >> (log_size + 1) == o_j >> (log_size + 1)) & (o_i >> log_size != o_j >> log_size)
        a = split_hi_lo(b_a, PRECISION)
        la = split_dot(split_hi_lo(tl.where(m_pair, -b_l, 0.0), PRECISION), a, zero, PRECISION)
        b_a = split_dot(a, split_hi_lo(la, PRECISION), b_a, PRECISION)
    return b_a


@triton.jit
def inverse_64(blocks, PRECISION: tl.constexpr):
    """Return (I + L)⁻¹ for a strictly lower triangular L `[64, 64]`, each as ten blocks `[16, 16]`, row by row."""
    l_00, l_10, l_11, l_20, l_21, l_22, l_30, l_31, l_32, l_33 = blocks
    b_00, b_11 = inverse_16(l_00, PRECISION), inverse_16(l_11, PRECISION)
    b_22, b_33 = inverse_16(l_22, PRECISION), inverse_16(l_33, PRECISION)
    a_00, a_11 = split_hi_lo(b_00, PRECISION), split_hi_lo(b_11, PRECISION)
    a_22, a_33 = split_hi_lo(b_22, PRECISION), split_hi_lo(b_33, PRECISION)
    # compute the inverse A one row of blocks after the other: A_ij = −A_ii Σ_m L_im A_mj for j < i
    zero = tl.zeros([16, 16], tl.float32)
    l_1 = split_hi_lo(-l_10, PRECISION)
    b_10 = split_dot(a_11, split_hi_lo(split_dot(l_1, a_00, zero, PRECISION), PRECISION), zero, PRECISION)
    a_10 = split_hi_lo(b_10, PRECISION)
    l_1, l_2 = split_hi_lo(-l_20, PRECISION), split_hi_lo(-l_21, PRECISION)
    b_x = split_dot(l_2, a_10, split_dot(l_1, a_00, zero, PRECISION), PRECISION)
    b_20 = split_dot(a_22, split_hi_lo(b_x, PRECISION), zero, PRECISION)
    b_21 = split_dot(a_22, split_hi_lo(split_dot(l_2, a_11, zero, PRECISION), PRECISION), zero, PRECISION)
    a_20, a_21 = split_hi_lo(b_20, PRECISION), split_hi_lo(b_21, PRECISION)
    l_1, l_2, l_3 = split_hi_lo(-l_30, PRECISION), split_hi_lo(-l_31, PRECISION), split_hi_lo(-l_32, PRECISION)
    b_x = split_dot(l_2, a_10, split_dot(l_1, a_00, zero, PRECISION), PRECISION)
    b_30 = split_dot(a_33, split_hi_lo(split_dot(l_3, a_20, b_x, PRECISION), PRECISION), zero, PRECISION)
    b_x = split_dot(l_3, a_21, split_dot(l_2, a_11, zero, PRECISION), PRECISION)
    b_31 = split_dot(a_33, split_hi_lo(b_x, PRECISION), zero, PRECISION)
    b_32 = split_dot(a_33, split_hi_lo(split_dot(l_3, a_22, zero, PRECISION), PRECISION), zero, PRECISION)
    return b_00, b_10, b_11, b_20, b_21, b_22, b_30, b_31, b_32, b_33
