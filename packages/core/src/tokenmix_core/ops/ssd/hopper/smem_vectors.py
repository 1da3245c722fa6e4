"""Vectors of a chunk in shared memory, one element per token and head; each reader loads them in its own layout.

Row sums stay partial, per warp or warpgroup, until `gather` adds them, so that no warp waits for another warp's sum.
The module also has `multiply`, which starts an MMA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tokenmix_core.kernels.gluon.hopper import LOG2_E, LOWEST, add, mma_layout_split_n, reinterpret


@gluon.jit
def multiply(a, b, N: gl.constexpr):
    """Issue the WGMMA A B for 64 rows of A; return the pending accumulator."""
    zero = gl.zeros([64, N], gl.float32, mma_layout_split_n(N, gl.num_warps()))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.constexpr_function
def head_rows(warps):
    """Return the register layout of `[R, 64]` in which each warp holds one head's vector."""
    return gl.BlockedLayout([1, 2], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def allocate_vectors(R: gl.constexpr, C: gl.constexpr):
    """Allocate shared memory for a vector of C elements for each of R heads."""
    return gl.allocate_shared_memory(gl.float32, [R, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def allocate_parts(R: gl.constexpr, P: gl.constexpr):
    """Allocate shared memory for P partial sums of a vector of 64 elements, for each of R heads."""
    return gl.allocate_shared_memory(gl.float32, [R, P, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def as_matrix(x_h, R: gl.constexpr, C: gl.constexpr):
    """Return a view of the vectors of all heads as a matrix `[R, C]`."""
    return reinterpret(x_h, gl.float32, [R, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def load_vectors(p_x, stride, rows, R: gl.constexpr):
    """Load `[R, 64]` from global memory: one element per head and token of a chunk; tokens from `rows` on get 0."""
    layout: gl.constexpr = head_rows(gl.num_warps())
    o_h = gl.arange(0, R, gl.SliceLayout(1, layout))[:, None]
    o_t = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    return gl.load(p_x + o_t.to(gl.int64) * stride + o_h, mask=o_t < rows, other=0.0).to(gl.float32)


@gluon.jit
def store_decays(b_h, from_h, to_h, b_g, scale):
    """Store each head's cumulative log2 decay b, `scale 2^b`, `2^(b_C − b)`; return b_C (the last b), `2^(b_C − b)`."""
    R: gl.constexpr = b_g.shape[0]
    b_g = gl.maximum(b_g * LOG2_E, LOWEST)
    b_b, b_total = gl.associative_scan(b_g, 1, add), gl.sum(b_g, 1)
    as_matrix(b_h, R, 64).store(b_b)
    as_matrix(from_h, R, 64).store(gl.exp2(b_b) * scale)
    b_to = gl.exp2(b_total[:, None] - b_b)
    as_matrix(to_h, R, 64).store(b_to)
    return b_total, b_to


@gluon.jit
def column(x_h, r, layout: gl.constexpr):
    """Load the vector of head r as a column of a matrix of this layout."""
    return x_h.index(r).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def store_row_sums(x_h, r, b_x):
    """Store the sums of x's rows in head r's vector, one partial sum per warpgroup that holds some of the columns."""
    P: gl.constexpr = x_h.shape[1]
    x_h.index(r).permute((1, 0)).store(gl.sum(b_x.reshape([b_x.shape[0], P, b_x.shape[1] // P]), 2))


@gluon.jit
def gather(x_h):
    """Return each vector with its partial sums added, `[R, 64]`."""
    R: gl.constexpr = x_h.shape[0]
    P: gl.constexpr = x_h.shape[1]
    b_x = as_matrix(x_h, R, P * 64).load(head_rows(gl.num_warps()))
    return gl.convert_layout(gl.sum(b_x.reshape([R, P, 64]), 1), head_rows(gl.num_warps()))


@gluon.jit
def store_decay_gradients(p_dg, HV, rows, crossing_h, later_h):
    """Store dg_t = Σ_{i ≥ t} crossing_i + Σ_{j < t} later_j of each head, the gradient of the log decays.

    `later_j` are the terms from token j to the state after the chunk; `crossing_i` includes all others (README.md).
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    col: gl.constexpr = gl.SliceLayout(0, layout)
    o_i, o_j = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, col)
    for r in range(crossing_h.shape[0]):
        crossing_j, later_j = crossing_h.index(r).load(col), later_h.index(r).load(col)
        dg_i = gl.sum(gl.where(o_i[:, None] <= o_j[None, :], crossing_j[None, :], later_j[None, :]), 1)
        gl.store(p_dg + o_i.to(gl.int64) * HV + r, dg_i, mask=o_i < rows)
