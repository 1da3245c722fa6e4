"""Device functions of the kernels: where chunks lie, and gates as products of two factors that cannot overflow.

Inside a chunk the weight of token j in a slot at token t is `exp2(G_t − G_j) · enter_j` with G the cumulative log2 gates.
A matrix product needs it as row factor times column factor. Pairs (t, j) are sorted by the smallest aligned block that
holds both: where j lies in its left half and t in its right one, both are measured from the border between the halves and
both factors are at most 1; pairs of one block of eight are measured from its middle, where no factor exceeds
2^(4 · 28) because single gates are bounded by 2^−28.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# 1 − 2⁻²⁸ is 1 in float32: a lower gate cannot be told from this one
LOWEST_GATE = tl.constexpr(-28.0)


@triton.jit
def locate_chunk(i_c, T, N, chunks, extra, cu_seqlens, BT: tl.constexpr, PACKED: tl.constexpr):
    """The sequence of slot `i_c`, the chunk in it, its first query (int64, over all rows) and its number of queries.

    A sequence's chunks cover `extra` tokens beside its own. In a packed batch they begin at slot `⌊b / BT⌋ + n`, with b
    all tokens before sequence n: sequences never share a slot, and no table is needed; some slots stay unused.
    """
    if PACKED:
        BN: tl.constexpr = 128
        sequences = 0
        for i in range(0, N, BN):
            o_n = i + tl.arange(0, BN)
            m_n = o_n < N
            slots = (tl.load(cu_seqlens + o_n, mask=m_n, other=0).to(tl.int64) + o_n * extra) // BT + o_n
            sequences += tl.sum(((slots <= i_c) & m_n).to(tl.int32), 0)
        i_n = sequences - 1
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - begin).to(tl.int32)
        i_t = i_c - ((begin + i_n * extra) // BT + i_n).to(tl.int32)
    else:
        i_n = i_c // chunks
        begin = i_n.to(tl.int64) * T
        length = T
        i_t = i_c - i_n * chunks
    return i_n, i_t, begin, length


@triton.jit
def sequence_span(i_n, T, cu_seqlens, PACKED: tl.constexpr):
    """The first query (int64, over all rows) and the number of queries of sequence `i_n`."""
    if PACKED:
        begin = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - begin).to(tl.int32)
    else:
        begin = i_n.to(tl.int64) * T
        length = T
    return begin, length


@triton.jit
def first_entry(i_n, begin_k, entries, BT: tl.constexpr, PACKED: tl.constexpr):
    """Where the chunk states of sequence `i_n` begin: one before each chunk of entering tokens and one at the end."""
    if PACKED:
        entry = begin_k // BT + 2 * i_n
    else:
        entry = i_n.to(tl.int64) * entries
    return entry


@triton.jit
def load_rows(p, o_t, m_t, stride, D: tl.constexpr):
    """Rows `o_t` of a matrix with D columns; zero where masked."""
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :], mask=m_t[:, None], other=0.0)


@triton.jit
def store_rows(p, b_x, o_t, m_t, stride, D: tl.constexpr):
    """Store rows `o_t` of a matrix with D columns."""
    p = p + o_t.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(p, b_x.to(p.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def load_tile(p, exists, R: tl.constexpr, D: tl.constexpr):
    """A contiguous tile `[R, D]`, or zeros unless it exists."""
    return tl.load(p + tl.arange(0, R)[:, None] * D + tl.arange(0, D)[None, :], mask=exists, other=0.0)


@triton.jit
def enter_weight(b_f):
    """1 − exp(f) for f ≤ 0, to the last digits also near 0."""
    b_small = -b_f * (1.0 + b_f * (0.5 + b_f * (1 / 6 + b_f * (1 / 24 + b_f * (1 / 120)))))
    return tl.where(b_f > -0.1, b_small, 1.0 - tl.exp2(b_f * LOG2_E))


@triton.jit
def gate_factors(p_g, b_g, entering, LEVEL: tl.constexpr, LEVELS: tl.constexpr, BT: tl.constexpr, M: tl.constexpr):
    """Row and column factors `[BT, M]` of `exp2(G_t − G_j)` for the pairs of a level.

    `b_g` is the tile at `p_g`, or zeros unless `entering`.
    """
    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)
    if LEVEL < LEVELS:
        HALF: tl.constexpr = BT >> (LEVEL + 1)
        o_ref = o_r // (2 * HALF) * (2 * HALF) + HALF - 1
    else:
        o_ref = o_r // 8 * 8 + 3
    b_d = b_g - tl.load(p_g + o_ref[:, None] * M + o_m[None, :], mask=entering, other=0.0)
    if LEVEL < LEVELS:
        return tl.exp2(tl.minimum(b_d, 0.0)), tl.exp2(tl.minimum(-b_d, 0.0))
    else:
        return tl.exp2(b_d), tl.exp2(-b_d)


@triton.jit
def level_pairs(o_t, o_j, LEVEL: tl.constexpr, LEVELS: tl.constexpr, BT: tl.constexpr):
    """Which pairs of a query's row and an entering token's belong to a level, for shapes that broadcast."""
    if LEVEL < LEVELS:
        HALF: tl.constexpr = BT >> (LEVEL + 1)
        return (o_j // HALF % 2 == 0) & (o_t // HALF == o_j // HALF + 1)
    else:
        return (o_t // 8 == o_j // 8) & (o_t >= o_j)
