"""What Gluon kernels for Hopper share: layouts, and copies into shared memory that run beside the matrix units.

Gluon is the part of Triton that names layouts and leaves the order of copies and products to the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

# names of newer versions of Triton, or of older ones
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def row_layout(columns, warps):
    """Rows of 64 or 128 elements of 16 bits, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(columns, warps):
    """A product of 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def begin_copy(s_x, p_x, first, rows, stride: gl.constexpr):
    """Begin to copy rows `first` … of a matrix into a shared tile; rows from `rows` on become 0."""
    layout: gl.constexpr = row_layout(s_x.shape[1], gl.num_warps())
    o_t = gl.arange(0, s_x.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, s_x.shape[1], gl.SliceLayout(0, layout))
    p_x += first.to(gl.int64) * stride
    async_load(s_x, p_x + o_t[:, None] * stride + o_d[None, :], mask=(first + o_t < rows)[:, None])


@gluon.jit
def begin_vector_copy(s_x, p_x, first, rows):
    """Begin to copy elements `first` … of a float32 vector; those from `rows` on become 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_t = first + gl.arange(0, s_x.shape[0], layout)
    async_load(s_x, p_x + o_t, mask=o_t < rows)


@gluon.jit
def await_copies(NEWER: gl.constexpr):
    """Wait until all groups of copies but the `NEWER` newest are there, for every warp and for the matrix units."""
    async_copy.wait_group(NEWER)
    fence_async_shared()
    barrier()
