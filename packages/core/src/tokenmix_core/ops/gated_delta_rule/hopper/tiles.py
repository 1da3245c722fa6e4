"""What the steps share: tiles between global and shared memory, gates, and where a program's tokens lie."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# its name in newer versions of Triton, and in older ones
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def rows_of(D, warps):
    """Rows of D 16-bit elements, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def product(N, warps):
    """Products of N columns, 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, N, 16])


@gluon.jit
def fetch_rows(s_x, p_rows, stride, rows, WARPS: gl.constexpr):
    """Begin to copy rows that lie `stride` elements apart; rows from `rows` on become zero."""
    layout: gl.constexpr = rows_of(s_x.shape[1], WARPS)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))[:, None]
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    copy_to_shared(s_x, p_rows + o_t * stride + o_d, mask=o_t < rows)


@gluon.jit
def store_rows(p_rows, s_x, stride, rows, WARPS: gl.constexpr):
    """Store a tile from shared memory as rows that lie `stride` elements apart, up to row `rows`."""
    layout: gl.constexpr = rows_of(s_x.shape[1], WARPS)
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))[:, None]
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.store(p_rows + o_t * stride + o_d, s_x.load(layout), mask=o_t < rows)


@gluon.jit
def load_gate(p_gate, rows, layout: gl.constexpr):
    """One of a chunk's four gates; past the end its last value, where all rows that it scales are zero."""
    return gl.load(p_gate + gl.minimum(gl.arange(0, 64, layout), rows - 1) * 4)


@gluon.jit
def causal_decay(b_row, b_col, o_row, o_col):
    """`exp2(b_row − b_col)` where the row's token is at or after the column's, else 0."""
    return gl.exp2(gl.where(o_row[:, None] >= o_col[None, :], b_row[:, None] - b_col[None, :], float("-inf")))


@gluon.jit
def locate_chunk(i_c, T, C, N, cu_seqlens, PACKED: gl.constexpr, WARPS: gl.constexpr):
    """As `tile.sequences.locate_chunk`: a slot's sequence, its first row and length, and the chunk's first token."""
    if PACKED:
        BN: gl.constexpr = 256
        sequences = 0
        for i in range(0, N, BN):
            o_n = i + gl.arange(0, BN, gl.BlockedLayout([2], [32], [WARPS], [0]))
            slots = gl.load(cu_seqlens + o_n, mask=o_n < N, other=0).to(gl.int64) // C + o_n
            sequences += gl.sum(((slots <= i_c) & (o_n < N)).to(gl.int32), 0)
        i_n = sequences - 1
        begin = gl.load(cu_seqlens + i_n).to(gl.int64)
        length = (gl.load(cu_seqlens + i_n + 1).to(gl.int64) - begin).to(gl.int32)
        first = ((i_c - (begin // C + i_n)) * C).to(gl.int32)
    else:
        chunks = gl.cdiv(T, C)
        i_n = i_c // chunks
        begin = i_n.to(gl.int64) * T
        length = T
        first = (i_c - i_n * chunks) * C
    return i_n, begin, length, first
