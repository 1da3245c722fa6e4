"""Inverses of small unit lower triangular matrices, by blocks of 16 rows: one warp holds such a block in registers.

For I + L with L strictly lower, halves give

    (I + [[L₀₀, 0], [L₁₀, L₁₁]])⁻¹ = [[A₀, 0], [−A₁ L₁₀ A₀, A₁]],

applied from single rows upwards. Every factor is a piece of the matrix or of its inverse, so nothing grows beyond what
the inverse holds; powers of L, which a Neumann series needs, reach 10⁶ where keys repeat, and cancel only in exact
arithmetic.

Matrices go through products as pairs of parts, made once for all products of a matrix.
"""

import triton
import triton.language as tl


@triton.jit
def parts(b_x, PRECISION: tl.constexpr):
    """A float32 tile as the sum of two bfloat16 ones, for PRECISION "bf16x3"; else itself twice."""
    if PRECISION == "bf16x3":
        b_hi = b_x.to(tl.bfloat16)
        return b_hi, (b_x - b_hi.to(tl.float32)).to(tl.bfloat16)
    else:
        return b_x, b_x


@triton.jit
def product(x, y, b_z, PRECISION: tl.constexpr):
    """Z + X Y for X and Y in parts: without the product of their rests, or as `tl.dot` makes it to PRECISION."""
    if PRECISION == "bf16x3":
        b_z = tl.dot(x[1], y[0], b_z)
        b_z = tl.dot(x[0], y[1], b_z)
        return tl.dot(x[0], y[0], b_z)
    else:
        return tl.dot(x[0], y[0], b_z, input_precision=PRECISION)


@triton.jit
def inverse_16(b_l, PRECISION: tl.constexpr):
    """(I + L)⁻¹ of a strictly lower `[16, 16]` float32 tile: pieces of 2, 4 and 8 rows are joined under masks."""
    o_i, o_j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    zero = tl.zeros([16, 16], tl.float32)
    b_a = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(o_i // 2 == o_j // 2, b_l, 0.0)
    for log_size in tl.static_range(1, 4):
        m_pair = (o_i >> (log_size + 1) == o_j >> (log_size + 1)) & (o_i >> log_size != o_j >> log_size)
        a = parts(b_a, PRECISION)
        la = product(parts(tl.where(m_pair, -b_l, 0.0), PRECISION), a, zero, PRECISION)
        b_a = product(a, parts(la, PRECISION), b_a, PRECISION)
    return b_a


@triton.jit
def inverse_64(
    l_00, l_10, l_11, l_20, l_21, l_22, l_30, l_31, l_32, l_33, PRECISION: tl.constexpr
):  # fmt: skip
    """(I + L)⁻¹ of a strictly lower `[64, 64]` matrix, given and returned as its ten blocks `[16, 16]`, row by row."""
    b_00, b_11 = inverse_16(l_00, PRECISION), inverse_16(l_11, PRECISION)
    b_22, b_33 = inverse_16(l_22, PRECISION), inverse_16(l_33, PRECISION)
    a_00, a_11 = parts(b_00, PRECISION), parts(b_11, PRECISION)
    a_22, a_33 = parts(b_22, PRECISION), parts(b_33, PRECISION)
    # rows of blocks: A_ij = −A_ii Σ_m L_im A_mj
    zero = tl.zeros([16, 16], tl.float32)
    l_1 = parts(-l_10, PRECISION)
    b_10 = product(a_11, parts(product(l_1, a_00, zero, PRECISION), PRECISION), zero, PRECISION)
    a_10 = parts(b_10, PRECISION)
    l_1, l_2 = parts(-l_20, PRECISION), parts(-l_21, PRECISION)
    b_x = product(l_2, a_10, product(l_1, a_00, zero, PRECISION), PRECISION)
    b_20 = product(a_22, parts(b_x, PRECISION), zero, PRECISION)
    b_21 = product(a_22, parts(product(l_2, a_11, zero, PRECISION), PRECISION), zero, PRECISION)
    a_20, a_21 = parts(b_20, PRECISION), parts(b_21, PRECISION)
    l_1, l_2, l_3 = parts(-l_30, PRECISION), parts(-l_31, PRECISION), parts(-l_32, PRECISION)
    b_x = product(l_2, a_10, product(l_1, a_00, zero, PRECISION), PRECISION)
    b_30 = product(a_33, parts(product(l_3, a_20, b_x, PRECISION), PRECISION), zero, PRECISION)
    b_x = product(l_3, a_21, product(l_2, a_11, zero, PRECISION), PRECISION)
    b_31 = product(a_33, parts(b_x, PRECISION), zero, PRECISION)
    b_32 = product(a_33, parts(product(l_3, a_22, zero, PRECISION), PRECISION), zero, PRECISION)
    return b_00, b_10, b_11, b_20, b_21, b_22, b_30, b_31, b_32, b_33
