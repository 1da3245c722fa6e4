"""Which keys a query sees."""

import triton
import triton.language as tl


@triton.jit
def within(x, size):
    """Tell whether 0 ≤ x < size, in one comparison: a number below 0 is a large one without a sign."""
    return tl.cast(x, tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def visible(distance, o_k, keys, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Tell whether a query sees the key at position `o_k`, `distance` before it, for shapes that broadcast.

    A query is at a position of a key, or is none and may see what it likes. `sinks` is None where there are none.
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
