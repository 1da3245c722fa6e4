"""Products of 64 rows and the tiles they read, as the kernels of gradients share them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tokenmix_core.kernels.gluon.hopper import mma_layout_split_n


@gluon.jit
def multiply(a, b, N: gl.constexpr):
    """Begin A B."""
    zero = gl.zeros([64, N], gl.float32, mma_layout_split_n(N, gl.num_warps()))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)
