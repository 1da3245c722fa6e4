"""Attention masks for kernels.

`visible` is for dense attention, with or without causality, window and sinks; `visible_columns` for tiles of listed
keys (retained keys, gathered by a list of their positions) or of local keys (from the window or chunk of each query).
"""

import triton
import triton.language as tl


@triton.jit
def within(x, size):
    """True if 0 ≤ x < size, in one comparison: a negative number is a large unsigned one."""
    return tl.cast(x, tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def visible(distance, o_k, keys, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """True if a query sees the key at position `o_k`, which is `distance` positions before the query; shapes broadcast.

    Rows beyond the last query may get either value. The first `sinks` keys are visible to all later queries, also
    outside the window; None means no sinks.
    """
    if WINDOW:
        m_s = within(distance, window)
        if sinks is not None:
            m_s = m_s | ((distance >= 0) & (o_k < sinks))
    elif CAUSAL:
        m_s = distance >= 0
    else:
        m_s = o_k < keys
    return m_s


@triton.jit
def visible_columns(o_q, b_left, o_k, listed, p_until, s_ut, keys):
    """Return the mask of a tile of keys at positions `o_k`, all `listed` or all local, for queries at `o_q`.

    A query sees local keys from position `b_left` to its own, and listed keys before `b_left`. A listed key is evicted
    at the position in `p_until`; None evicts none.
    """
    m_listed = o_k[None, :] < b_left[:, None]
    if p_until is not None:
        b_until = tl.load(p_until + o_k * s_ut, mask=o_k < tl.where(listed, keys, 0), other=0)
        m_listed = m_listed & (o_q[:, None] < b_until[None, :])
    m_local = (o_k[None, :] >= b_left[:, None]) & (o_k[None, :] <= o_q[:, None])
    return (m_listed & listed) | (m_local & (not listed))
