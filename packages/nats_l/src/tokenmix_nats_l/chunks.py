"""Types of chunks (softmax or linear): scores of chunks' mean inputs, trained by a straight-through gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_places, chunk_slots
from tokenmix_core.nn import at_least_float32, moved
from tokenmix_nats_l.share import ShareThreshold

# patterns of forced types by name; s: softmax, l: linear
PATTERNS = {"softmax": "s", "linear": "l", "alternate": "ls"}


class Tokens(NamedTuple):
    """Inputs of the delta rule, and of softmax attention over the same channels, for the tokens of a call."""

    # inputs of the delta rule: [B, T, H, K], [B, T, H, K], [B, T, H, V]
    q: Tensor
    k: Tensor
    v: Tensor
    # the same channels as heads of softmax attention: [B, T, HA, KA], [B, T, HA, KA], [B, T, HA, VA]
    softmax_q: Tensor
    softmax_k: Tensor
    softmax_v: Tensor
    # log decay and write strength of the delta rule: [B, T, H]
    g: Tensor
    beta: Tensor
    # q before the split into heads, from which the weights of both operations are projected: [B, T, H · K]
    flat_q: Tensor


class ChunkTypes(NamedTuple):
    """The type of each chunk for each head of the delta rule, `[B, slots, H]`; either `softmax` or `linear` is 1.

    Here and below, a slot is an entry of a tensor with one entry per chunk (`chunking.chunk_slots`).

    Attributes:
        softmax: 1 if later tokens see the chunk's keys, else 0.
        linear: 1 if the chunk's writes enter the state, else 0.
        probability: probability of softmax by the scores; None for forced types.
        margin: softmax score − linear score − threshold, detached; None for forced types.
    """

    softmax: Tensor
    linear: Tensor
    probability: Tensor | None
    margin: Tensor | None = None


def chunk_means(
    x: Float[Tensor, "B T D"], size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None
) -> Float[Tensor, "B slots D"]:
    """Return the mean over the tokens of each chunk, complete or not, in float32 or a wider dtype.

    Chunks are counted from the start of each sequence; in packed batches, a chunk's index in the result is that
    of `chunking.slot_ids`.
    """
    T = x.shape[1]
    # `dtype` converts elements while they are read, without a float32 copy of x
    wide = torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is None:
        whole = T // size * size
        sums = x[:, :whole].unflatten(1, (whole // size, size)).sum(2, dtype=wide)
        if whole == T:
            return sums / size
        return torch.cat((sums / size, x[:, whole:].sum(1, dtype=wide, keepdim=True) / (T - whole)), 1)
    source, back = chunk_places(cu_seqlens, T, size)
    # gather and sum instead of index_add, which sums in varying order: a recomputed forward pass must give equal types
    chunks = moved(x[0], source, back, holes=True)
    return (chunks.sum(1, dtype=wide) / (source >= 0).sum(1).clamp(min=1).unsqueeze(-1)).unsqueeze(0)


def learned_types(scores: Float[Tensor, "B slots two_H"], threshold: ShareThreshold | None = None) -> ChunkTypes:
    """Give each chunk the type with the higher score, linear if equal; gradients pass to the types' probabilities.

    First, a threshold is subtracted from the softmax scores. The type that is not chosen gets no gradient: attention
    has none for chunks that it does not retain, and `_only_where_active` drops that of writes that are masked out.
    """
    both = at_least_float32(scores).unflatten(-1, (2, -1))
    if threshold is not None:
        both = both - torch.stack((torch.zeros_like(threshold.threshold), threshold.threshold))
    of_linear, of_softmax = both.softmax(-2).unbind(-2)
    margin = (both[..., 1, :] - both[..., 0, :]).detach()
    # compare scores, because torch.argmax with one_hot would wait for the device
    softmax = (of_softmax > of_linear).to(both.dtype)
    linear = 1 - softmax
    if not torch.is_grad_enabled():
        return ChunkTypes(softmax, linear, of_softmax, margin)
    # s − stop_gradient(s) adds exactly 0 to the value, and passes the gradient of s
    softmax, linear = softmax + (of_softmax - of_softmax.detach()), linear + (of_linear - of_linear.detach())
    return ChunkTypes(softmax, _only_where_active(linear), of_softmax, margin)


def check_types(types: str) -> None:
    """Raise a ValueError unless `types` is "learned", a name in `PATTERNS`, or a pattern of l and s."""
    if types not in ("learned", *PATTERNS) and (not types or set(types) - {"l", "s"}):
        raise ValueError(
            f"NatsL: types must be one of {', '.join(map(repr, ('learned', *PATTERNS)))}, or a pattern of l and "
            f"s such as 'lls', got {types!r}"
        )


def forced_types(types: str, indices: Int[Tensor, "B slots"], H: int, dtype: torch.dtype) -> ChunkTypes:
    """Return the types that a repeated pattern gives to chunks by their index in the sequence, for all heads alike."""
    pattern = PATTERNS.get(types, types)
    place, softmax = indices % len(pattern), torch.zeros_like(indices, dtype=torch.bool)
    for i, kind in enumerate(pattern):
        if kind == "s":
            softmax = softmax | (place == i)
    softmax = softmax.to(dtype).unsqueeze(-1).expand(*indices.shape, H)
    return ChunkTypes(softmax, 1 - softmax, None)


def chunk_indices(
    B: int, T: int, size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None, device: torch.device
) -> Int[Tensor, "B slots"]:
    """Return, for each chunk of a batch, its index in its sequence."""
    if cu_seqlens is None:
        return torch.arange(cdiv(T, size), device=device).expand(B, -1)
    slots, firsts, sequence = _packed_slots(T, size, cu_seqlens)
    return (slots - firsts[sequence]).unsqueeze(0)


def real_chunks(
    B: int, T: int, size: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None, device: torch.device
) -> Bool[Tensor, "B slots"]:
    """Return a mask of the entries that belong to a chunk; entries between packed sequences may belong to none."""
    if cu_seqlens is None:
        return torch.ones(B, cdiv(T, size), dtype=torch.bool, device=device)
    slots, firsts, sequence = _packed_slots(T, size, cu_seqlens)
    return ((slots - firsts[sequence]) * size < cu_seqlens.diff()[sequence]).unsqueeze(0)


def type_statistics(
    layer: Any, types: ChunkTypes, x: Float[Tensor, "B T D"], cu_seqlens: Tensor | None
) -> dict[str, Tensor]:
    """Return each head's fraction of softmax chunks, the number of chunks, and the loss for `layer.budget`, if any.

    The loss is multiplied by the number of tokens.
    """
    real = real_chunks(x.shape[0], x.shape[1], layer.chunk, cu_seqlens, x.device).to(types.softmax.dtype)
    weight = real.unsqueeze(-1) / real.sum().clamp(min=1)
    found = {"softmax_share": (types.softmax.detach() * weight).sum((0, 1)), "chunks": real.sum()}
    if layer.budget is not None and types.probability is not None:
        share = (types.probability * weight).sum((0, 1)).mean()
        # count no padding after packed sequences
        tokens = x.shape[0] * x.shape[1] if cu_seqlens is None else cu_seqlens[-1]
        found["budget_loss"] = layer.budget_weight * tokens * (share - layer.budget).square()
    return found


def _packed_slots(T: int, size: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for a packed batch all slots, the slot of each sequence's first chunk, and the sequence of each slot."""
    slots = torch.arange(chunk_slots(1, T, size, cu_seqlens), device=cu_seqlens.device)
    firsts = cu_seqlens[:-1] // size + torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    return slots, firsts, torch.searchsorted(firsts, slots, right=True) - 1


def _only_where_active(linear: Tensor) -> Tensor:
    """Return the values of `linear` and pass no gradient where they are 0."""
    return linear * linear.detach()
