"""Which operation a chunk of tokens takes: the mean of its inputs, scores, a type with a straight-through gradient."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_places, chunk_slots
from tokenmix_core.nn import at_least_float32, moved

Types = Literal["learned", "softmax", "linear", "alternate"]


class ChunkTypes(NamedTuple):
    """The operation of each chunk and group of heads, `[B, slots, H]`; exactly 0 or 1, one of the two for each.

    Attributes:
        softmax: 1 where later tokens see the chunk's keys.
        linear: 1 where the chunk's writes enter the state.
        probability: of softmax, as the scores say; None where types are forced.
    """

    softmax: Tensor
    linear: Tensor
    probability: Tensor | None


def chunk_means(
    x: Float[Tensor, "B T D"], size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None
) -> Float[Tensor, "B slots D"]:
    """The mean of each chunk's tokens, a last partial one's over those that it has; at least float32.

    Chunks are counted from each sequence's start; of a packed batch their slots are `chunking.slot_ids`'.
    """
    T = x.shape[1]
    # sums widen what they read: nothing is copied in float32
    wide = torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is None:
        whole = T // size * size
        sums = x[:, :whole].unflatten(1, (whole // size, size)).sum(2, dtype=wide)
        if whole == T:
            return sums / size
        return torch.cat((sums / size, x[:, whole:].sum(1, dtype=wide, keepdim=True) / (T - whole)), 1)
    places, back = chunk_places(cu_seqlens, T, size)
    # tokens side by side, not sums by slot: a fixed order, so that a forward pass made again finds the same types
    chunks = moved(x[0], places, back, holes=True)
    return (chunks.sum(1, dtype=wide) / (places >= 0).sum(1).clamp(min=1).unsqueeze(-1)).unsqueeze(0)


def learned_types(scores: Float[Tensor, "B slots two_H"]) -> ChunkTypes:
    """The operation with the higher score, linear first; gradients pass to the softmax of the scores.

    An operation that is not chosen has no gradient: types are factors of what each does, and one of 0 stays out.
    """
    shares = at_least_float32(scores).unflatten(-1, (2, -1)).softmax(-2)
    of_linear, of_softmax = shares.unbind(-2)
    # by comparing, where torch's own function would wait for the device
    softmax = (of_softmax > of_linear).to(shares.dtype)
    linear = 1 - softmax
    if not torch.is_grad_enabled():
        return ChunkTypes(softmax, linear, of_softmax)
    # s − sg(s) is exactly 0
    softmax, linear = softmax + (of_softmax - of_softmax.detach()), linear + (of_linear - of_linear.detach())
    return ChunkTypes(softmax, _only_where_active(linear), of_softmax)


def forced_types(kind: Types, numbers: Int[Tensor, "B slots"], H: int, dtype: torch.dtype) -> ChunkTypes:
    """The same types for all heads, of chunks with these numbers in their sequences; "alternate" begins linear."""
    softmax = {
        "softmax": torch.ones_like(numbers),
        "linear": torch.zeros_like(numbers),
        "alternate": numbers % 2,
    }[kind]
    softmax = softmax.to(dtype).unsqueeze(-1).expand(*numbers.shape, H)
    return ChunkTypes(softmax, 1 - softmax, None)


def chunk_numbers(
    B: int, T: int, size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None, device: torch.device
) -> Int[Tensor, "B slots"]:
    """The number of each slot's chunk in its sequence."""
    if cu_seqlens is None:
        return torch.arange(cdiv(T, size), device=device).expand(B, -1)
    slots, firsts, sequence = _packed_slots(T, size, cu_seqlens)
    return (slots - firsts[sequence]).unsqueeze(0)


def real_chunks(
    B: int, T: int, size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None, device: torch.device
) -> Bool[Tensor, "B slots"]:
    """Which slots hold a chunk: all of them, but for those between packed sequences."""
    if cu_seqlens is None:
        return torch.ones(B, cdiv(T, size), dtype=torch.bool, device=device)
    slots, firsts, sequence = _packed_slots(T, size, cu_seqlens)
    return ((slots - firsts[sequence]) * size < cu_seqlens.diff()[sequence]).unsqueeze(0)


def _packed_slots(T: int, size: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slots of a packed batch, the first one of each sequence, and the sequence of each slot."""
    slots = torch.arange(chunk_slots(1, T, size, cu_seqlens), device=cu_seqlens.device)
    firsts = cu_seqlens[:-1] // size + torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return slots, firsts, torch.searchsorted(firsts, slots, right=True) - 1


def _only_where_active(linear: Tensor) -> Tensor:
    """The same numbers; where they are 0 no gradient passes."""
    return linear * linear.detach()
