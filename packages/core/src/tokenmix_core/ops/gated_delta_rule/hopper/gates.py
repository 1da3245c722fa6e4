"""How the steps load what `prepare` has made of the gates."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def load_gate(p_gate, rows, layout: gl.constexpr):
    """One of a chunk's four gates; past the end its last value, where all rows that it scales are zero."""
    return gl.load(p_gate + gl.minimum(gl.arange(0, 64, layout), rows - 1) * 4)


@gluon.jit
def load_gates(p_gates, token, length, layout: gl.constexpr):
    """b, β r and r of the chunk at `token` and its last b; of the first or last chunk where there is none."""
    token = gl.maximum(gl.minimum(token, length - 1), 0)
    p_gates += token.to(gl.int64) * 4
    rows = gl.maximum(gl.minimum(length - token, 64), 1)
    b_b, b_w = load_gate(p_gates, rows, layout), load_gate(p_gates + 1, rows, layout)
    return b_b, b_w, load_gate(p_gates + 2, rows, layout), gl.load(p_gates + (rows - 1) * 4)


@gluon.constexpr_function
def room(dtype, K, normalised=True):
    """A factor for operands that have norms of q and k in them, some 1 / K: else float16 would keep few digits."""
    return float(K) if normalised and dtype != gl.bfloat16 else 1.0
