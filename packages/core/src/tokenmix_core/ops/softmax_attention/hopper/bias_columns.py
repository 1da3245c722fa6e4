"""Bias columns for Gluon: the dQ kernels store them, the dK/dV kernels add them in their MMAs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import row_layout
from tokenmix_core.ops.softmax_attention import bias_columns
from tokenmix_core.ops.softmax_attention.bias_columns import bias_of

PARTS, BIAS_COLUMNS = gl.constexpr(bias_columns.PARTS.value), gl.constexpr(bias_columns.BIAS_COLUMNS.value)


@gluon.jit
def store_bias(p_bias, b_lse, b_delta, rows, scale):
    """Store the bias columns of the first `rows` queries of a tile; `scale` is that of `bias_of`."""
    layout: gl.constexpr = row_layout(BIAS_COLUMNS, gl.num_warps())
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_t = gl.arange(0, b_lse.shape[0], row)[:, None]
    o_c = gl.arange(0, BIAS_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    b_bias = bias_of(
        o_c, gl.convert_layout(b_lse, row)[:, None], gl.convert_layout(b_delta, row)[:, None], scale
    )  # fmt: skip
    gl.store(p_bias + o_t * BIAS_COLUMNS + o_c, b_bias, mask=o_t < rows)


@gluon.jit
def bias_selector(first: gl.constexpr, rows: gl.constexpr):
    """Return an smem tile of ones and zeros whose MMA with bias columns adds PARTS of them, starting at `first`."""
    layout: gl.constexpr = row_layout(BIAS_COLUMNS, gl.num_warps())
    ones_s = allocate_bias(rows)
    o_c = gl.arange(0, BIAS_COLUMNS, gl.SliceLayout(0, layout))[None, :] + gl.zeros(
        [rows, BIAS_COLUMNS], gl.int32, layout
    )
    ones_s.store(gl.where((o_c >= first) & (o_c < first + PARTS), 1.0, 0.0).to(gl.bfloat16))
    return ones_s


@gluon.jit
def allocate_bias(rows: gl.constexpr):
    """Allocate an smem buffer for the bias columns of a tile."""
    return gl.allocate_shared_memory(gl.bfloat16, [rows, BIAS_COLUMNS], gl.NVMMASharedLayout(32, 16, 2))
