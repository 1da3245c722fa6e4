"""Softmax over keys that arrive tile by tile, for Gluon: relative to the greatest scores of the first tile alone.

A softmax may subtract any number from a row's scores: in floating point a weight of 2⁶⁰ is as exact as one of 1, as
long as nothing overflows. Taking the greatest score so far, tile by tile, costs as many instructions as the
exponentials, and every tile waits for it and rescales what came before. So the first tile, which holds the queries' own
keys, says what is subtracted to the end, and sums tell whether that was right: a program in which one of them left what
`LIMIT` allows, or is not a number, begins again and takes maxima of all tiles.

float16 has no such range: its weights are always relative to the greatest score so far.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# of sums and of one by them: far from 1, the greatest weight of a first tile, and as far from where float32 ends
LIMIT = gl.constexpr(2.0**64)


@gluon.constexpr_function
def takes_all_maxima(dtype):
    """Tell whether every tile has to be asked for its greatest scores."""
    return dtype == gl.float16


@gluon.jit
def raise_greatest(b_s, b_m, scale):
    """Take a tile of scores into the greatest ones of each row.

    Returns:
        the greatest scores, what is subtracted from scaled ones, and by what older sums shrink.
    """
    b_top = gl.maximum(b_m, gl.max(b_s, 1))
    # −∞ while nothing was seen
    b_max = gl.where(b_top == float("-inf"), 0.0, b_top)
    # the difference first: exactly 1 where the maximum stays
    return b_top, b_max * scale, gl.exp2((b_m - b_max) * scale)


@gluon.jit
def thread_sums(b_p):
    """Sums of what each of the four threads that share a row of a product holds of it: `[BM, 4]`."""
    return gl.sum(gl.sum(b_p.reshape([b_p.shape[0], b_p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def for_threads(b_row, zeros):
    """A number for each row, laid out as `thread_sums` of a tile like `zeros`."""
    b_tile = zeros + b_row[:, None]
    return gl.max(gl.max(b_tile.reshape([zeros.shape[0], zeros.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def bounded(b_l):
    """Tell whether no sum, nor one by it, is beyond `LIMIT`: not so for a row that saw no key."""
    return gl.sum(((b_l <= LIMIT) & (b_l * LIMIT >= 1.0)).to(gl.int32), 0) == b_l.shape[0]


@gluon.jit
def finish(b_shift, b_l):
    """The factor that turns sums into outputs, and the natural log-sum-exp; 1 and −∞ for rows that saw no key."""
    blind = b_l == 0.0
    b_l = gl.where(blind, 1.0, b_l)
    return 1.0 / b_l, gl.where(blind, float("-inf"), (b_shift + gl.log2(b_l)) * 0.6931471805599453)
