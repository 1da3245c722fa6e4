"""The KV tiles that a query tile visits, the query tiles that a KV tile visits, and loads and stores of tiles.

One loop visits the tiles in which every query sees every key: they are contiguous and need no mask. A second loop
visits the others, which are not contiguous; softmax does not depend on the order of keys.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of_queries(tiles, HQ, H):
    """Return a program's batch row, query head and key head (int64), and query tile.

    Consecutive programs take tiles of one head, so they share the head's keys in the L2 cache. Tiles of the last
    queries start first, because with a causal mask they see the most keys.
    """
    pid = tl.program_id(0)
    i_t = tiles - 1 - pid % tiles
    i_h = (pid // tiles % HQ).to(tl.int64)
    i_b = (pid // tiles // HQ).to(tl.int64)
    return i_b, i_h, i_h // (HQ // H), i_t


@triton.jit
def key_tiles(first, last, keys, window, sinks, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Find the KV tiles that queries at positions `first` … `last` visit.

    Returns:
        `(sink_tiles, n_min, full_min, full_max, n_max)`: tiles [0, sink_tiles) of the sinks, masked tiles
        [n_min, full_min), unmasked tiles [full_min, full_max), masked tiles [full_max, n_max).
    """
    n_max = tl.cdiv(keys, BN)
    full_max = keys // BN
    n_min = 0
    full_min = 0
    sink_tiles = 0
    if CAUSAL:
        n_max = tl.minimum(n_max, tl.cdiv(tl.maximum(last + 1, 0), BN))
        full_max = tl.minimum(full_max, tl.maximum(first + 1, 0) // BN)
    if WINDOW:
        n_min = tl.minimum(tl.maximum(first - window + 1, 0) // BN, n_max)
        full_min = tl.cdiv(tl.maximum(last - window + 1, 0), BN)
        if sinks is not None:
            sink_tiles = tl.minimum(tl.cdiv(tl.minimum(sinks, keys), BN), n_min)
    full_min = tl.minimum(tl.maximum(full_min, n_min), n_max)
    full_max = tl.minimum(tl.maximum(full_max, full_min), n_max)
    return sink_tiles, n_min, full_min, full_max, n_max


@triton.jit
def query_tiles(
    first, last, queries, shift, window, sinks, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Find the query tiles that see the keys `first` … `last`; query i is at position i + shift.

    Returns:
        `(m_min, full_min, full_max, m_max)`: masked tiles [m_min, full_min), unmasked tiles [full_min, full_max), and
        masked tiles [full_max, m_max).
    """
    m_max = tl.cdiv(queries, BM)
    full_max = queries // BM
    m_min = 0
    full_min = 0
    if CAUSAL:
        m_min = tl.maximum(first - shift, 0) // BM
        full_min = tl.cdiv(tl.maximum(last - shift, 0), BM)
    if WINDOW:
        # a tile with a sink is seen by all later queries, so the window does not end its range of queries
        if sinks is None:
            sinks = 0
        if first >= sinks:
            m_max = tl.minimum(m_max, tl.cdiv(tl.maximum(last + window - shift, 0), BM))
        if last >= sinks:
            full_max = tl.minimum(full_max, tl.maximum(first + window - shift, 0) // BM)
    m_min = tl.minimum(m_min, m_max)
    full_min = tl.minimum(tl.maximum(full_min, m_min), m_max)
    full_max = tl.minimum(tl.maximum(full_max, full_min), m_max)
    return m_min, full_min, full_max, m_max


@triton.jit
def masked_tile(i, sink_tiles, n_min, full_min, full_max):
    """Return the i-th masked tile: first sink tiles, then tiles [n_min, full_min), then tiles from `full_max` on."""
    i_k = n_min + i - sink_tiles
    return tl.where(i < sink_tiles, i, tl.where(i_k < full_min, i_k, full_max + i_k - full_min))


@triton.jit
def tile_from_last(i, count, sink_tiles, gap):
    """Return the i-th of `count` KV tiles in descending order: the window's, then, `gap` tiles lower, the sinks'."""
    i_k = tl.maximum(count - 1 - i, 0)
    return i_k + tl.where(i_k < sink_tiles, 0, gap)


@triton.jit
def _load(p_x, o_t, o_d, rows, D: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr):
    """Load the tile at `p_x` of the matrix's rows `o_t` and columns `o_d`; masks are omitted where they are true."""
    if CHECK:
        if D == BD:
            return tl.load(p_x, mask=(o_t < rows)[:, None], other=0.0)
        else:
            return tl.load(p_x, mask=(o_t < rows)[:, None] & (o_d < D)[None, :], other=0.0)
    elif D == BD:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def load_tile(p_x, first, rows, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr):
    """Load rows `first` … `first + BT − 1` of a matrix of `rows` rows and D columns as a tile `[BT, BD]`.

    Columns beyond D are 0; with `CHECK`, rows beyond the last one are 0, too.
    """
    p_x += tl.cast(first, tl.int64) * stride
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    p_x += o_t[:, None] * stride + o_d[None, :]
    return _load(p_x, first + o_t, o_d, rows, D, BD, CHECK)


@triton.jit
def load_rows(p_x, o_t, rows, stride, D: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr):
    """Gather the rows `o_t` of a matrix of `rows` rows and D columns into a tile `[len(o_t), BD]`.

    Columns beyond D are 0; with `CHECK`, rows beyond the last one are 0, too.
    """
    o_d = tl.arange(0, BD)
    p_x += o_t.to(tl.int64)[:, None] * stride + o_d[None, :]
    return _load(p_x, o_t, o_d, rows, D, BD, CHECK)


@triton.jit
def store_tile(p_x, b_x, first, rows, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Store a tile; rows and columns beyond the matrix are dropped."""
    o_t = tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    p_x += tl.cast(first, tl.int64) * stride + o_t[:, None] * stride + o_d[None, :]
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), mask=(first + o_t < rows)[:, None] & (o_d < D)[None, :])


@triton.jit
def add_dot(b_x, b_y, b_sum, PRECISION: tl.constexpr):
    """Return `b_sum + b_x · b_y`, for a sum over many tiles.

    With PRECISION "ieee", `b_x · b_y` is computed first and then added: separate sums per tile lose less
    precision than one running sum. The `tl.where` prevents the compiler from accumulating into `b_sum` in the matmul.
    """
    if PRECISION == "ieee":
        b_xy = tl.dot(b_x, b_y, input_precision=PRECISION)
        return b_sum + tl.where(b_xy == b_xy, b_xy, float("nan"))
    else:
        return tl.dot(b_x, b_y, b_sum, input_precision=PRECISION)
