"""What the launchers share: the chunk length, the numbers of sequences and chunk slots, and the precision of products."""

from torch import Tensor

from tokenmix_core.chunking import cdiv

CHUNK = 64


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """N, for x of shape `[B, T, ...]`."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1


def chunk_slots(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """How many slots the chunks of x `[B, T, ...]` take: see `tile.sequences.first_chunk`."""
    B, T = x.shape[:2]
    return B * cdiv(T, CHUNK) if cu_seqlens is None else T // CHUNK + cu_seqlens.numel() - 1


def dot_precision(x: Tensor) -> str:
    """float32 inputs are multiplied to nearly float32's precision; for others the argument has no effect."""
    return "tf32x3" if x.element_size() == 4 else "tf32"
