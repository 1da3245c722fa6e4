"""Tiles of columns by position, for Gluon: which rows they are, copied to shared memory where they lie apart."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.ops.sparse_attention.mask import left_of
from tokenmix_core.tile.hopper import async_load, row_layout
from tokenmix_core.tile.masks import within

# as in `sparse_attention.tiles`
NOWHERE = gl.constexpr(1 << 30)


@gluon.jit
def read_list(p_list, o_c, count, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """What a list says of its columns `o_c` … `o_c + BN − 1`: their keys, or the unit of all of them."""
    if UNIT == 1:
        o_n = o_c + gl.arange(0, BN, layout)
        return gl.load(p_list + o_n, mask=o_n < count, other=0)
    else:
        # a tile lies in one unit
        return gl.load(p_list + o_c // UNIT, mask=o_c < count, other=0)


@gluon.jit
def columns_read(b_list, begin, o_c, count, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """The positions of columns of which a list says `b_list`; `NOWHERE` behind its end."""
    o_n = gl.arange(0, BN, layout)
    if UNIT == 1:
        o_k = gl.where(o_c + o_n < count, b_list - begin, NOWHERE)
    else:
        o_k = gl.where(o_c < count, (b_list - begin) * UNIT + o_c % UNIT, NOWHERE) + o_n
    return o_k


@gluon.jit
def listed_columns(p_list, begin, o_c, count, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """As `sparse_attention.tiles.listed_columns`, in a layout: the listed columns `o_c` … `o_c + BN − 1`."""
    b_list = read_list(p_list, o_c, count, BN, UNIT, layout)
    return columns_read(b_list, begin, o_c, count, BN, UNIT, layout)


@gluon.jit
def columns(p_list, begin, i, far, count, near, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """Positions of a query tile's i-th tile of columns: `far` tiles of the list's, then the keys' from `near` on."""
    o_k = listed_columns(p_list, begin, i * BN, gl.where(i < far, count, 0), BN, UNIT, layout)
    return gl.where(i < far, o_k, (near + i - far) * BN + gl.arange(0, BN, layout))


@gluon.jit
def begin_gather(s_x, p_x, o_t, rows, stride: gl.constexpr):
    """Begin to copy the rows `o_t` of a matrix, laid out as rows are, into a shared tile; from `rows` on they are 0."""
    layout: gl.constexpr = row_layout(s_x.shape[1], gl.num_warps())
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    # where nothing is copied the row may be any
    m_t = o_t < rows
    p_x += gl.where(m_t, o_t, 0).to(gl.int64)[:, None] * stride + o_d[None, :]
    async_load(s_x, p_x, mask=m_t[:, None])


@gluon.jit
def seen(o_q, o_k, far, window, UNIT: gl.constexpr, WINDOW: gl.constexpr):
    """Tell which queries at `o_q` see the columns at `o_k` of a tile, `far` or not."""
    b_left = left_of(o_q, window, UNIT, WINDOW)
    b_first = gl.where(far, 0, b_left)
    b_end = gl.where(far, b_left, o_q + 1)
    return within(o_k[None, :] - b_first[:, None], gl.maximum(b_end - b_first, 0)[:, None])
