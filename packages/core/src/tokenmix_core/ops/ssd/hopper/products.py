"""Products of 64 rows and the tiles they read, as the kernels of gradients share them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.constexpr_function
def product(N, warps):
    """A product `[64, N]`: 16 rows a warp of a group, and a part of the columns each group."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, N * 4 // warps, 16])


@gluon.jit
def multiply(a, b, N: gl.constexpr):
    """Begin A B."""
    zero = gl.zeros([64, N], gl.float32, product(N, gl.num_warps()))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
