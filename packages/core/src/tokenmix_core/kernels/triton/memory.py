"""Loads and stores of a chunk's rows; loads return 0 for tokens beyond the chunk's end, stores skip these tokens."""

import triton
import triton.language as tl


@triton.jit
def load_rows(p_rows, stride, rows, BT: tl.constexpr, D: tl.constexpr):
    """Load rows that lie `stride` elements apart as a tile `[BT, D]`; rows from index `rows` on are zero."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, D)
    return tl.load(p_rows + o_t[:, None] * stride + o_d[None, :], mask=o_t[:, None] < rows, other=0.0)


@triton.jit
def store_rows(p_rows, b_x, stride, rows, BT: tl.constexpr, D: tl.constexpr):
    """Store the first `rows` rows of a tile `[BT, D]`, `stride` elements apart."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, D)
    tl.store(p_rows + o_t[:, None] * stride + o_d[None, :], b_x.to(p_rows.dtype.element_ty), mask=o_t[:, None] < rows)


@triton.jit
def load_vector(p_vector, stride, rows, BT: tl.constexpr):
    """Load `[BT]` values that lie `stride` elements apart, as float32; values from index `rows` on are zero."""
    o_t = tl.arange(0, BT)
    return tl.load(p_vector + o_t * stride, mask=o_t < rows, other=0.0).to(tl.float32)


@triton.jit
def store_vector(p_vector, b_x, stride, rows, BT: tl.constexpr):
    """Store the values with index below `rows` of `b_x [BT]`, `stride` elements apart."""
    o_t = tl.arange(0, BT)
    tl.store(p_vector + o_t * stride, b_x.to(p_vector.dtype.element_ty), mask=o_t < rows)


@triton.jit
def inverse_norm(b_x, DOT: tl.constexpr):
    """Return (Σ x² + 1e−6)^−½ of each row of a tile `[BT, K]`.

    The sums are the diagonal of X Xᵀ, which an MMA computes: X need not be loaded from shared memory into registers.
    """
    return diagonal_inverse_norm(tl.dot(b_x, tl.trans(b_x), input_precision=DOT), b_x.shape[0])


@triton.jit
def diagonal_inverse_norm(b_xx, BT: tl.constexpr):
    """Return (d + 1e−6)^−½ of the diagonal d of a tile `[BT, BT]`."""
    o_t = tl.arange(0, BT)
    return tl.rsqrt(tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_xx, 0.0), 1) + 1e-6)


@triton.jit
def column(b_x, INDEX: tl.constexpr):
    """Return column INDEX of a tile `[BT, 4]`.

    The gated delta rule scales rows and columns of accumulators by four vectors. They are interleaved in memory, so
    that one load serves all; separate vectors would be loaded element by element, once for each layout that uses them.
    """
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == INDEX, b_x, 0.0), 1)


@triton.jit
def last_of(b_x, rows, BT: tl.constexpr):
    """Return the element of `b_x [BT]` at the chunk's last token, whose index is min(rows, BT) − 1."""
    return tl.sum(tl.where(tl.arange(0, BT) == tl.minimum(rows, BT) - 1, b_x, 0.0), 0)
