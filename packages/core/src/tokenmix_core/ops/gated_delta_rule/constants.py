"""Common parts of the launchers: the chunk length, the shapes of what is kept, and the precision of products."""

import torch
from torch import Tensor

from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops.dispatch import interpreting
from tokenmix_core.ops.types import Layout

CHUNK = 64

# sizes that Triton would otherwise compile anew for: those equal to 1, and those divisible by 16
SIZES = ("T", "N", "H", "group", "tokens")


def term_layouts(k: Tensor, HV: int) -> tuple[Layout, ...]:
    """Ã and the gates of `prepare`."""
    B, T = k.shape[:2]
    return ((B, T, HV, CHUNK), k.dtype), ((HV, B * T, 4), torch.float32)


def state_layouts(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Layout, ...]:
    """R and the state entering each chunk, of `forward`."""
    B, T, HV, V = v.shape
    return (tuple(v.shape), v.dtype), ((chunk_slots(B, T, CHUNK, cu_seqlens), HV, k.shape[-1], V), v.dtype)


def narrowed_heads(x: Tensor, parts: int) -> Tensor:
    """Values `[B, T, HV, V]` as `[B, T, HV · parts, V / parts]`."""
    return x.unflatten(-1, (parts, -1)).flatten(2, 3)


def dot_precision(x: Tensor) -> str:
    """float32 inputs are multiplied to nearly float32's precision; other products ignore the argument."""
    return "tf32x3" if x.element_size() == 4 else "tf32"


def solve_precision(x: Tensor) -> str:
    """The inverse amplifies rounding where keys repeat, so its products are finer than the inputs."""
    # three products of two bfloat16 parts keep 16 bits, enough for bfloat16 alone; the interpreter needs no parts
    return "bf16x3" if x.dtype == torch.bfloat16 and not interpreting() else "tf32x3"
