"""Which tokens a tile holds and which keys a query sees."""

import triton
import triton.language as tl


@triton.jit
def locate_tile(cu_seqlens, N, i_tile, BT: tl.constexpr):
    """The sequence and the tile inside it that packed tile `i_tile` stands for, with the sequence's start and length.

    Sequence n owns tiles ⌊cu[n] / BT⌋ + n onwards, which leaves room for its ⌈length / BT⌉: no table has to be computed
    before the launch over ⌊T / BT⌋ + N tiles. A tile beyond the end of its sequence has nothing to do.
    """
    BS: tl.constexpr = 128
    i_n = 0
    for first in range(1, N, BS):
        o_n = first + tl.arange(0, BS)
        owned = tl.load(cu_seqlens + o_n, mask=o_n < N, other=0) // BT + o_n
        i_n += tl.sum(((owned <= i_tile) & (o_n < N)).to(tl.int32))
    start = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32)
    return i_n, i_tile - (start // BT).to(tl.int32) - i_n, start, length


@triton.jit
def visible(o_q, o_k, keys, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query at position `o_q` sees the key at `o_k`, for shapes that broadcast; positions count keys."""
    m_s = o_k < keys
    if CAUSAL:
        m_s = m_s & (o_k <= o_q)
    if WINDOW:
        m_s = m_s & ((o_k > o_q - window) | (o_k < sinks))
    return m_s
