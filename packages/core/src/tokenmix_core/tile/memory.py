"""Loads and stores of a chunk's rows; tokens beyond its end read as zero and are never written."""

import triton
import triton.language as tl


@triton.jit
def load_rows(p_rows, stride, rows, BT: tl.constexpr, D: tl.constexpr):
    """A tile `[BT, D]` of rows that lie `stride` elements apart; rows from `rows` on are zero."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, D)
    return tl.load(p_rows + o_t[:, None] * stride + o_d[None, :], mask=o_t[:, None] < rows, other=0.0)


@triton.jit
def store_rows(p_rows, b_x, stride, rows, BT: tl.constexpr, D: tl.constexpr):
    """Store a tile `[BT, D]` as rows that lie `stride` elements apart, up to row `rows`."""
    o_t, o_d = tl.arange(0, BT), tl.arange(0, D)
    tl.store(p_rows + o_t[:, None] * stride + o_d[None, :], b_x.to(p_rows.dtype.element_ty), mask=o_t[:, None] < rows)


@triton.jit
def load_vector(p_vector, stride, rows, BT: tl.constexpr):
    """`[BT]` float32 values that lie `stride` elements apart; zero from `rows` on."""
    o_t = tl.arange(0, BT)
    return tl.load(p_vector + o_t * stride, mask=o_t < rows, other=0.0).to(tl.float32)


@triton.jit
def store_vector(p_vector, b_x, stride, rows, BT: tl.constexpr):
    """Store `[BT]` values that lie `stride` elements apart, up to element `rows`."""
    o_t = tl.arange(0, BT)
    tl.store(p_vector + o_t * stride, b_x.to(p_vector.dtype.element_ty), mask=o_t < rows)
