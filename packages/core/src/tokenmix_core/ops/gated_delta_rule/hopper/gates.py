"""How the steps load what `prepare` has made of the gates."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add(x, y):
    """To sum decays over tokens with, or over chunks."""
    return x + y


@gluon.jit
def load_gate(p_gate, rows, layout: gl.constexpr):
    """One of a chunk's four gates; past the end its last value, where all rows that it scales are zero."""
    return gl.load(p_gate + gl.minimum(gl.arange(0, 64, layout), rows - 1) * 4)
