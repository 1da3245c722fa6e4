"""Device functions of the kernels: where chunks lie, and gates as products of two factors that cannot overflow.

Inside a chunk the weight of token j in a slot at token t is `exp2(G_t − G_j) · enter_j` with G the cumulative log2
gates. A matrix product needs it as row factor times column factor. Pairs (t, j) are sorted by the smallest aligned
block that
holds both: where j lies in its left half and t in its right one, both are measured from the border between the halves
and both factors are at most 1; pairs of one block of eight are measured from its middle, where no factor exceeds 2^(4
· 28) because single gates are bounded by 2^−28.
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
def load_gates(p_f, o_t, m_t, stride, M: tl.constexpr, SLOTS: tl.constexpr):
    """Rows `o_t` of log-gates in float32; 0, which lets nothing enter, where masked and beyond the slots that exist."""
    o_m = tl.arange(0, M)
    p_f = p_f + o_t.to(tl.int64)[:, None] * stride + o_m[None, :]
    return tl.load(p_f, mask=m_t[:, None] & (o_m < SLOTS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_tile(p, rows, R: tl.constexpr, D: tl.constexpr):
    """A contiguous tile `[R, D]`, zero from row `rows` on."""
    o_r, o_d = tl.arange(0, R)[:, None], tl.arange(0, D)[None, :]
    return tl.load(p + o_r * D + o_d, mask=o_r < rows, other=0.0)


@triton.jit
def enter_weight(b_f):
    """1 − exp(f) for f ≤ 0, to the last digits also near 0."""
    b_small = -b_f * (1.0 + b_f * (0.5 + b_f * (1 / 6 + b_f * (1 / 24 + b_f * (1 / 120)))))
    return tl.where(b_f > -0.1, b_small, 1.0 - tl.exp2(b_f * LOG2_E))


@triton.jit
def anew(p, level, levels):
    """`p`, by an address that the compiler takes to depend on the level.

    Tiles are then read from the first cache for every level, where it would hold them in registers that the loop needs.
    """
    # a multiple of 16 keeps loads wide
    return p + level // (levels + 1) * 16


@triton.jit
def row_factor(p_g, rows, level, levels, BT: tl.constexpr, M: tl.constexpr):
    """Factors `[BT, M]` of the rows that see a level's pairs, and the log2 gates these are measured from.

    Rows that belong to no pair of the level are kept finite. `rows` is BT, or 0 where no token enters: every factor is
    1 then.
    """
    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)
    half = (BT // 2) >> level
    o_ref = (o_r & -(2 * half)) + half - 1
    b_ref = tl.load(p_g + o_ref[:, None] * M + o_m[None, :], mask=(o_ref < rows)[:, None], other=0.0)
    b_d = load_tile(anew(p_g, level, levels), rows, BT, M) - b_ref
    return tl.exp2(tl.minimum(b_d, tl.where(level == levels, 126.0, 0.0))), b_ref


@triton.jit
def column_factor(p_h, b_ref, rows, level, levels, BT: tl.constexpr, M: tl.constexpr):
    """The tokens' side of the product, `exp2(ref + h)` with `h = log2(enter) − G`: what enters, weighted."""
    o_r, o_m = tl.arange(0, BT), tl.arange(0, M)
    p_h = anew(p_h, level, levels) + o_r[:, None] * M + o_m[None, :]
    b_h = tl.load(p_h, mask=(o_r < rows)[:, None], other=float("-inf"))
    return tl.exp2(tl.minimum(b_ref + b_h, tl.where(level == levels, 126.0, 0.0)))


@triton.jit
def partners(o_t, level, levels, BT: tl.constexpr):
    """The tokens `[low, high)` that row t forms a level's pairs with: the left half of its block for a row of the right
    half, or, in blocks of eight, all tokens up to t."""
    half = (BT // 2) >> level
    low = o_t & -(2 * half)
    high = tl.where((o_t & half) != 0, low + half, low)
    return low, tl.where(level == levels, o_t + 1, high)
