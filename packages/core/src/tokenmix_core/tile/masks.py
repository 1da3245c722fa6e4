"""Which keys a query sees."""

import triton
import triton.language as tl


@triton.jit
def visible(o_q, o_k, keys, window, sinks, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Tell whether a query at position `o_q` sees the key at `o_k`, for shapes that broadcast; positions count keys."""
    m_s = o_k < keys
    if CAUSAL:
        m_s = m_s & (o_k <= o_q)
    if WINDOW:
        m_s = m_s & ((o_k > o_q - window) | (o_k < sinks))
    return m_s
