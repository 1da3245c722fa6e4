"""The precision setting of float32 MMAs as a constexpr, the only form that kernels can read."""

import triton.language as tl

from tokenmix_core.kernels import tuning

FLOAT32_DOT = tl.constexpr(tuning.FLOAT32_DOT)
