"""What the launchers share: chunk length, numbers of sequences and chunk slots, precision of products."""

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.common import interpreting, on_hopper

CHUNK = 64

# sizes that Triton would otherwise compile anew for: those equal to 1, and those divisible by 16
SIZES = ("T", "N", "H", "group", "tokens")


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """N, for x of shape `[B, T, ...]`."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def chunk_slots(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many slots the chunks of x `[B, T, ...]` take: see `tile.sequences.first_chunk`."""
    B, T = x.shape[:2]
    return B * cdiv(T, CHUNK) if cu_seqlens is None else T // CHUNK + cu_seqlens.numel() - 1


def walks(k: Tensor, v: Tensor) -> int:
    """Programs along a sequence and value head: on Hopper heads of 256 are shared out by 64 columns of V."""
    wide = max(k.shape[-1], v.shape[-1]) > 128 and k.element_size() == 2
    return v.shape[-1] // 64 if wide and on_hopper(k.device) else 1


def dot_precision(x: Tensor) -> str:
    """float32 inputs are multiplied to nearly float32's precision; other products ignore the argument."""
    return "tf32x3" if x.element_size() == 4 else "tf32"


def solve_precision(x: Tensor) -> str:
    """The inverse amplifies rounding where keys repeat, so its products are finer than the inputs."""
    # three parts of bfloat16 make 16 bits, enough for bfloat16 alone; the interpreter knows no parts and needs none
    return "bf16x3" if x.dtype == torch.bfloat16 and not interpreting() else "tf32x3"
