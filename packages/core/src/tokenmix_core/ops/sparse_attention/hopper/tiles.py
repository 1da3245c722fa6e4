"""Tiles of keys (columns) for Gluon: listed (retained) keys, gathered to smem, and local keys, which are contiguous."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import async_load, row_layout
from tokenmix_core.kernels.triton.masks import within
from tokenmix_core.ops.sparse_attention.mask import left_of

# position of a column without a key, as in `listed_keys/lists.py`
NOWHERE = gl.constexpr(1 << 30)


class KeyList(NamedTuple):
    """The retained units (keys, or chunks of keys) of a head and sequence, in order.

    Attributes:
        pointer: pointer to the first entry of the list.
        begin: index of the sequence's first unit; unit indices count from the start of the batch row.
        count: number of listed keys that a query tile may read.
    """

    pointer: gl.tensor
    begin: gl.tensor
    count: gl.tensor


@gluon.jit
def read_list(units: KeyList, o_c, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """Load the list entries of columns `o_c` … `o_c + BN − 1`: one each, or one for the unit that holds all columns."""
    if UNIT == 1:
        o_n = o_c + gl.arange(0, BN, layout)
        return gl.load(units.pointer + o_n, mask=o_n < units.count, other=0)
    else:
        return gl.load(units.pointer + o_c // UNIT, mask=o_c < units.count, other=0)


@gluon.jit
def columns_read(b_list, units: KeyList, o_c, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """Return the positions of columns `o_c` … `o_c + BN − 1` from their list entries; `NOWHERE` past the list's end."""
    o_n = gl.arange(0, BN, layout)
    if UNIT == 1:
        o_k = gl.where(o_c + o_n < units.count, b_list - units.begin, NOWHERE)
    else:
        o_k = gl.where(o_c < units.count, (b_list - units.begin) * UNIT + o_c % UNIT, NOWHERE) + o_n
    return o_k


@gluon.jit
def listed_columns(units: KeyList, o_c, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """Return the positions of the listed columns `o_c` … `o_c + BN − 1`, as in `listed_keys/lists.py`."""
    return columns_read(read_list(units, o_c, BN, UNIT, layout), units, o_c, BN, UNIT, layout)


@gluon.jit
def columns(units: KeyList, listed_tiles, i, n_min, BN: gl.constexpr, UNIT: gl.constexpr, layout: gl.constexpr):
    """Return the key positions of the i-th tile: tiles of listed keys come first, then local tiles from `n_min` on."""
    o_c = i * BN
    some = KeyList(units.pointer, units.begin, gl.where(i < listed_tiles, units.count, 0))
    o_k = listed_columns(some, o_c, BN, UNIT, layout)
    return gl.where(i < listed_tiles, o_k, (n_min + i - listed_tiles) * BN + gl.arange(0, BN, layout))


@gluon.jit
def async_gather_rows(s_x, p_x, o_t, rows, stride: gl.constexpr):
    """Start an async copy of the rows `o_t` (in the row layout) to an smem tile; indices from `rows` on give zeros."""
    layout: gl.constexpr = row_layout(s_x.shape[1], gl.num_warps())
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    m_t = o_t < rows
    # masked rows use the address of row 0, which is valid
    p_x += gl.where(m_t, o_t, 0).to(gl.int64)[:, None] * stride + o_d[None, :]
    async_load(s_x, p_x, mask=m_t[:, None])


@gluon.jit
def seen(o_q, o_k, listed, window, UNIT: gl.constexpr, WINDOW: gl.constexpr):
    """True if the query at `o_q` sees the key at `o_k`.

    If `listed`, the tile's keys are listed (retained) keys: a query sees those before its first local key (`left_of`).
    Otherwise they are local keys: a query sees those from its first local key to its own position.
    """
    b_left = left_of(o_q, window, UNIT, WINDOW)
    b_first = gl.where(listed, 0, b_left)
    b_end = gl.where(listed, b_left, o_q + 1)
    return within(o_k[None, :] - b_first[:, None], gl.maximum(b_end - b_first, 0)[:, None])
