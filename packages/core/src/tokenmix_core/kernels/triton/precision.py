"""The precision of float32 MMAs as a constexpr, which kernels can read."""

import triton.language as tl

from tokenmix_core.kernels import tuning

FLOAT32_DOT = tl.constexpr(tuning.FLOAT32_DOT)
