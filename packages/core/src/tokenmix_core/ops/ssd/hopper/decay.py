"""Decays inside a chunk, as in `tile.decay`: base-2 logarithms, of which differences alone are exponentiated."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import LOG2_E, LOWEST


@gluon.jit
def load_decay(p_g, stride, rows):
    """Base-2 logarithms of a chunk's decays; 0 (no decay) from `rows` on."""
    o_t = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.maximum(gl.load(p_g + o_t * stride, mask=o_t < rows, other=0.0).to(gl.float32) * LOG2_E, LOWEST)


@gluon.jit
def cumulative_decay(g_j, o_i, o_j):
    """The sums of decays, by column, up to each token, by row, and over the chunk."""
    b_i = gl.sum(gl.where(o_i[:, None] >= o_j[None, :], g_j[None, :], 0.0), 1)
    return b_i, gl.sum(gl.where(o_i == 63, b_i, 0.0), 0)
