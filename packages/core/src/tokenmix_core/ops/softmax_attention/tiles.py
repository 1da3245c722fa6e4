"""Which tiles a tile of queries or of keys has to meet, and how tiles are read and written.

The tiles that are seen entirely lie in one run and need no mask. The softmax does not mind the order of its keys, so
those that need one, though they lie apart, share a second loop.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of_queries(tiles, HQ, H):
    """The row, head, head of keys (int64) and tile of queries that a program takes.

    Tiles of one head run together, to share its keys in the cache; the last, which see most keys, start first.
    """
    pid = tl.program_id(0)
    i_t = tiles - 1 - pid % tiles
    i_h = (pid // tiles % HQ).to(tl.int64)
    i_b = (pid // tiles // HQ).to(tl.int64)
    return i_b, i_h, i_h // (HQ // H), i_t


@triton.jit
def key_tiles(first, last, keys, window, sinks, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Tiles of keys for queries at positions `first` … `last`.

    Returns:
        `(far_sinks, near, full, end, stop)`: the sinks' tiles [0, far_sinks), masked [near, full), seen entirely
        [full, end), masked [end, stop).
    """
    stop = tl.cdiv(keys, BN)
    end = keys // BN
    near = 0
    full = 0
    far_sinks = 0
    if CAUSAL:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(last + 1, 0), BN))
        end = tl.minimum(end, tl.maximum(first + 1, 0) // BN)
    if WINDOW:
        near = tl.minimum(tl.maximum(first - window + 1, 0) // BN, stop)
        full = tl.cdiv(tl.maximum(last - window + 1, 0), BN)
        if sinks is not None:
            far_sinks = tl.minimum(tl.cdiv(tl.minimum(sinks, keys), BN), near)
    full = tl.minimum(tl.maximum(full, near), stop)
    end = tl.minimum(tl.maximum(end, full), stop)
    return far_sinks, near, full, end, stop


@triton.jit
def query_tiles(
    first, last, queries, shift, window, sinks, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Tiles of queries for the keys `first` … `last`, with query i at position i + shift.

    Returns:
        `(near, full, end, stop)`: masked [near, full), seen entirely [full, end), masked [end, stop).
    """
    stop = tl.cdiv(queries, BM)
    end = queries // BM
    near = 0
    full = 0
    if CAUSAL:
        near = tl.maximum(first - shift, 0) // BM
        full = tl.cdiv(tl.maximum(last - shift, 0), BM)
    if WINDOW:
        # a sink is seen by every query behind it
        if sinks is None:
            sinks = 0
        if first >= sinks:
            stop = tl.minimum(stop, tl.cdiv(tl.maximum(last + window - shift, 0), BM))
        if last >= sinks:
            end = tl.minimum(end, tl.maximum(first + window - shift, 0) // BM)
    near = tl.minimum(near, stop)
    full = tl.minimum(tl.maximum(full, near), stop)
    end = tl.minimum(tl.maximum(end, full), stop)
    return near, full, end, stop


@triton.jit
def masked_tile(i, far_sinks, near, full, end):
    """The i-th of the tiles that need a mask: the sinks', then [near, full), then from `end` on."""
    i_near = near + i - far_sinks
    return tl.where(i < far_sinks, i, tl.where(i_near < full, i_near, end + i_near - full))


@triton.jit
def tile_from_last(i, count, far_sinks, hidden):
    """The i-th tile of keys from the last one on: the window's, then, `hidden` tiles before, the sinks'."""
    i_k = tl.maximum(count - 1 - i, 0)
    return i_k + tl.where(i_k < far_sinks, 0, hidden)


@triton.jit
def load_tile(p_x, first, rows, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr):
    """Rows `first` … `first + BT − 1` of a matrix of `rows` rows and D columns, as a tile `[BT, BD]`.

    Columns beyond D are 0, and so are rows beyond the last one where `CHECK` is set.
    """
    p_x += tl.cast(first, tl.int64) * stride
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    p_x += o_t[:, None] * stride + o_d[None, :]
    if CHECK:
        if D == BD:
            return tl.load(p_x, mask=(first + o_t < rows)[:, None], other=0.0)
        else:
            return tl.load(p_x, mask=(first + o_t < rows)[:, None] & (o_d < D)[None, :], other=0.0)
    elif D == BD:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def store_tile(p_x, b_x, first, rows, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Write the rows and columns of a tile that exist."""
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    p_x += tl.cast(first, tl.int64) * stride + o_t[:, None] * stride + o_d[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=(first + o_t < rows)[:, None] & (o_d < D)[None, :])


@triton.jit
def add_dot(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """`b_sum + b_x · b_y`.

    In full precision the product is summed by itself first: sums of sums lose less than one sum over all tiles. The
    select stands between the two, for else the compiler joins them.
    """
    if PRECISION == "ieee":
        b_xy = tl.dot(b_x, b_y, input_precision=PRECISION)
        return b_sum + tl.where(b_xy == b_xy, b_xy, float("nan"))
    else:
        return tl.dot(b_x, b_y, b_sum, input_precision=PRECISION)
