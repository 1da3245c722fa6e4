"""Online softmax over KV tiles for Gluon, relative to the row maxima of the first tile alone.

A softmax may subtract any value from a row's scores: in floating point a weight of 2⁶⁰ is as exact as a weight of 1,
unless it overflows. A running maximum would cost as many instructions per tile as the exponentials, and each tile would
wait for it and rescale the accumulator. So all tiles subtract the row maxima of the first tile, which holds the
queries' own keys. If a row sum then leaves the range that `LIMIT` allows, or is NaN, the program runs once more with a
running maximum.

float16 lacks this range: it always takes the running maximum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import mma_layout

# largest row sum, and largest reciprocal of a row sum, that need no second run. Its exponent, 64, is half of 128, at
# which float32 overflows. The largest weight of a row's first tile is 1
LIMIT = gl.constexpr(2.0**64)


@gluon.constexpr_function
def needs_running_max(dtype):
    """True if `dtype` needs a running maximum, that is, if every tile must update the row maxima."""
    return dtype == gl.float16


@gluon.jit
def update_row_max(b_s, b_m, scale):
    """Update the row maxima `b_m` by a tile of scores.

    Returns:
        the new maxima, the shift that is subtracted from scaled scores, and the factor that rescales older sums.
    """
    b_top = gl.maximum(b_m, gl.max(b_s, 1))
    # the maximum is −∞ while all scores of a row are masked; −∞ − (−∞) would be NaN
    b_max = gl.where(b_top == float("-inf"), 0.0, b_top)
    # subtract before scaling, so that the factor is exactly 1 if the maximum does not change
    return b_top, b_max * scale, gl.exp2((b_m - b_max) * scale)


@gluon.jit
def quad_row_sums(b_p):
    """Return `[BM, 4]`: partial sums of the four threads that share each row of an accumulator, without shuffles."""
    return gl.sum(gl.sum(b_p.reshape([b_p.shape[0], b_p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def expand_to_quads(b_row, zeros):
    """Broadcast one value per row to `[BM, 4]`, in the layout that `quad_row_sums` returns for a tile like `zeros`."""
    b_tile = zeros + b_row[:, None]
    return gl.max(gl.max(b_tile.reshape([zeros.shape[0], zeros.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax_step(b_s, b_m, b_shift, b_sums, b_o, scale, update):
    """Exponentiate a tile of scores; if `update`, raise the row maxima and rescale the sums and the accumulator first.

    Returns:
        the unnormalised probabilities, the maxima, the shift, the quad row sums and the accumulator.
    """
    if update:
        b_m, b_shift, b_shrink = update_row_max(b_s, b_m, scale)
        b_sums *= expand_to_quads(b_shrink, gl.zeros(b_s.shape, gl.float32, mma_layout(b_s.shape[1], gl.num_warps())))
        b_o *= gl.convert_layout(b_shrink, gl.SliceLayout(1, mma_layout(b_o.shape[1], gl.num_warps())))[:, None]
    b_p = gl.exp2(b_s * scale - b_shift[:, None])
    return b_p, b_m, b_shift, b_sums + quad_row_sums(b_p), b_o


@gluon.jit
def sums_in_range(b_l):
    """True if all row sums and their reciprocals are at most `LIMIT`; false if a row sees no key."""
    return gl.sum(((b_l <= LIMIT) & (b_l * LIMIT >= 1.0)).to(gl.int32), 0) == b_l.shape[0]


@gluon.jit
def finalize(b_shift, b_l):
    """Return the accumulator's normalising factor, and the natural log-sum-exp; if a row sees no key, 1 and −∞."""
    empty = b_l == 0.0
    b_l = gl.where(empty, 1.0, b_l)
    return 1.0 / b_l, gl.where(empty, float("-inf"), (b_shift + gl.log2(b_l)) * 0.6931471805599453)
