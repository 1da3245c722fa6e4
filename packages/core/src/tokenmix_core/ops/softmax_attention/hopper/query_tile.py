"""Query tiles of the Hopper attention kernels: their location in a packed batch, stores of tiles, and delta."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import barrier, locate_chunk, row_layout, store_rows, wait_async_copies
from tokenmix_core.ops.softmax_attention.steps import QueryTile


@gluon.jit
def locate_query_tile(indices, TQ, TK, N, cu_seqlens, BM: gl.constexpr, PACKED: gl.constexpr):
    """Return the `QueryTile` of `indices`: batch row, query head, key head, and tile in the batch row."""
    i_b, i_h, i_hk, i_t = indices
    i_n = 0
    start = i_b * 0
    queries = TQ
    keys = TK
    first_row = i_t * BM
    if PACKED:
        i_n, start, queries, first_row = locate_chunk(i_t, TQ, BM, N, cu_seqlens, PACKED, gl.num_warps())
        i_t = first_row // BM
        keys = queries
    return QueryTile(i_b, i_h, i_hk, i_n, i_t, first_row, start, queries, keys)


@gluon.jit
def store_tile(p_x, s_x, b_x, stride, rows):
    """Store the first `rows` rows of an accumulator through the smem buffer `s_x`, so that a thread stores 16 bytes."""
    s_x.store(b_x.to(s_x.dtype))
    barrier()
    store_rows(p_x, s_x, stride, rows, gl.num_warps())


@gluon.jit
def load_delta(p_o, stride, do_s, dlse, o_row, first, queries):
    """Wait for dO, the older of two copies in flight, and return delta = rowsum(dO ∘ O) − dlse of a query tile.

    `o_row` is the offset of the sequence's first query in `dlse`, which may be None.

    Returns:
        delta and the queries' indices, in the row layout.
    """
    layout: gl.constexpr = row_layout(do_s.shape[1], gl.num_warps())
    o_t = first + gl.arange(0, do_s.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, do_s.shape[1], gl.SliceLayout(0, layout))
    p_o = p_o + o_t.to(gl.int64)[:, None] * stride + o_d[None, :]
    b_o = gl.load(p_o, mask=(o_t < queries)[:, None], other=0.0).to(gl.float32)
    wait_async_copies(1)
    b_delta = gl.sum(b_o * do_s.load(layout).to(gl.float32), 1)
    if dlse is not None:
        b_delta -= gl.load(dlse + o_row + o_t, mask=o_t < queries, other=0.0)
    return b_delta, o_t
