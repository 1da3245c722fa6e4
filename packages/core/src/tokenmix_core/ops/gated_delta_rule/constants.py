"""The chunk length, the shapes of saved tensors, and the precision of MMAs."""

import torch
from torch import Tensor

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.kernels.tuning import FLOAT32_DOT
from tokenmix_core.ops.dispatch import interpreting
from tokenmix_core.ops.types import Layout

CHUNK = 64
# precision of MMAs of 16-bit inputs, which ignore it; "ieee" for AMD, because some AMD compilers reject "tf32"
_HALF_DOT = "ieee" if torch.version.hip else "tf32"

# integer arguments without specialisation: Triton would otherwise compile again if one is 1 or divisible by 16
SIZES = ("T", "N", "H", "group", "tokens")


def term_layouts(k: Tensor, HV: int) -> tuple[Layout, ...]:
    """Return shapes and dtypes of `prepare`'s results, `Terms.inverse` (Ã) and `Terms.gates` (b, β r, r and β)."""
    B, T = k.shape[:2]
    return ((B, T, HV, CHUNK), k.dtype), ((HV, B * T, 4), torch.float32)


def state_layouts(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Layout, ...]:
    """Return shapes and dtypes of the residuals R and of the states that enter chunks, which `forward` computes."""
    B, T, HV, V = v.shape
    return (tuple(v.shape), v.dtype), ((chunk_slots(B, T, CHUNK, cu_seqlens), HV, k.shape[-1], V), v.dtype)


def split_values(x: Tensor, parts: int) -> Tensor:
    """Return values `[B, T, HV, V]` as `[B, T, HV · parts, V / parts]`."""
    # one call of torch instead of `unflatten` and `flatten`
    return x.reshape(*x.shape[:2], x.shape[2] * parts, x.shape[3] // parts)


def dot_precision(x: Tensor) -> str:
    """Return the precision setting for MMAs of float32 inputs, near float32 accuracy; 16-bit inputs ignore it."""
    return FLOAT32_DOT if x.element_size() == 4 else _HALF_DOT


def solve_precision(x: Tensor) -> str:
    """Return the precision of the MMAs that invert I + L̃, higher than the inputs': repeated keys amplify rounding."""
    # bf16x3 (three MMAs) keeps 16 bits, enough for bfloat16 inputs only; the interpreter computes in float32 anyway
    return "bf16x3" if x.dtype == torch.bfloat16 and not interpreting() else FLOAT32_DOT
