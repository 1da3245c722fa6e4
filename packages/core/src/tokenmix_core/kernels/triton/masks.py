"""Attention masks."""

import triton
import triton.language as tl


@triton.jit
def within(x, size):
    """True if 0 ≤ x < size, in one comparison: a negative number is a large unsigned one."""
    return tl.cast(x, tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def visible(distance, o_k, keys, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """True if a query sees the key at position `o_k`, `distance` before it; shapes broadcast.

    Rows beyond the last query may get either value. `sinks` is None if there are no sinks.
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
