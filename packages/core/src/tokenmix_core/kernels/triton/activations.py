"""Activation functions for kernels: the sigmoid."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(b_x):
    """Return 1 / (1 + e^−x); 1 / y is computed as rsqrt(y)², two instructions, whereas a division takes ten."""
    b_r = tl.rsqrt(1.0 + tl.exp2(b_x * -1.4426950408889634))
    return b_r * b_r
