"""Attention to listed blocks, and their selection, in eager PyTorch, on any device, up to float64: the specification.

A slice of queries at a time attends to all keys under a mask: memory is linear in the length, and work is quadratic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, packed_positions, sequence_ids
from tokenmix_core.ops import AttentionOutput, attended, drops_padding, joined, wide

# maximum number of scores computed at once, for a slice of queries: 64 MiB in float32
_RUN_SCORES = 1 << 24


class SequencePositions(NamedTuple):
    """For each token, its sequence and its position in that sequence, both `[T]`."""

    sequence: Tensor
    position: Tensor


def sequence_positions(T: int, cu_seqlens: Tensor | None, device: torch.device, *, shift: int = 0) -> SequencePositions:
    """Return sequence and position of each of T tokens; without `cu_seqlens` the first token's position is `shift`."""
    if cu_seqlens is None:
        position = torch.arange(shift, shift + T, device=device)
        return SequencePositions(torch.zeros_like(position), position)
    return SequencePositions(sequence_ids(cu_seqlens, T), packed_positions(cu_seqlens, T))


def first_slots(cu_seqlens: Int[Tensor, "N_plus_1"], block_size: int) -> Int[Tensor, "N_plus_1"]:
    """Return the index of each packed sequence's first block, ⌊begin / block_size⌋ + n; sequences share no block."""
    return cu_seqlens // block_size + torch.arange(len(cu_seqlens), device=cu_seqlens.device)


@drops_padding("q", "k", "v", "blocks", results=2)
def block_attention_reference(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    blocks: Int[Tensor, "B TQ H S"],
    *,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> AttentionOutput:
    """Compute `block_attention`, differentiable by autograd."""
    (B, TQ, HQ, K), (TK, H) = q.shape, k.shape[1:3]
    scale = float(K**-0.5) if scale is None else scale
    queries = sequence_positions(TQ, cu_seqlens, q.device, shift=TK - TQ)
    keys = sequence_positions(TK, cu_seqlens, q.device)
    size, found = max(16, _RUN_SCORES // max(1, B * HQ * TK)), []
    # one additional block collects the entries of `blocks` that name no valid block
    C = cdiv(TK, block_size)
    listed = torch.where((blocks >= 0) & (blocks < C), blocks, C).long()
    for i in range(0, TQ, size):
        run = slice(i, i + size)
        counts = listed.new_zeros(B, listed[:, run].shape[1], H, C + 1, dtype=wide(q).dtype)
        counts = counts.scatter_add(3, listed[:, run], torch.ones_like(listed[:, run], dtype=counts.dtype))
        counts = counts[..., keys.position // block_size].permute(0, 2, 1, 3).unsqueeze(2)
        own = keys.sequence == queries.sequence[run, None]
        mask = (counts > 0) & own & (keys.position <= queries.position[run, None])
        found.append(attended(q[:, run], k, v, mask, scale, counts.clamp(min=1).log()))
    return joined(found, q, v)


@torch.no_grad()
@drops_padding("q", "lse")
def select_blocks_reference(
    q: Float[Tensor, "B TQ HQ K"],
    pooled: Float[Tensor, "B U H K"],
    lse: Float[Tensor, "B TQ HQ"],
    count: int,
    *,
    block_size: int = 64,
    shift: int = 0,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> Int[Tensor, "B TQ H count"]:
    """Compute `select_blocks` with torch operations."""
    (B, TQ, HQ, K), (U, H) = q.shape, pooled.shape[1:3]
    scale = float(K**-0.5) if scale is None else scale
    at = sequence_positions(TQ, cu_seqlens, q.device, shift=shift)
    own, selected = at.position // block_size, []
    size = max(16, _RUN_SCORES // max(1, B * HQ * U))
    for i in range(0, TQ, size):
        run = slice(i, i + size)
        b_own = own[run, None]
        block = torch.arange(U, device=q.device).expand(len(b_own), -1)
        if cu_seqlens is not None:
            block = block - first_slots(cu_seqlens, block_size)[at.sequence[run], None]
        grouped = wide(q[:, run]).unflatten(2, (H, -1))
        s = scale * torch.einsum("bihgk,buhk->bihgu", grouped, wide(pooled))
        selected.append(most_attended(s, lse[:, run].to(s), block, b_own, count))
    return torch.cat(selected, 1) if selected else torch.empty(B, 0, H, count, dtype=torch.int32, device=q.device)


def most_attended(
    scores: Float[Tensor, "*T H G U"],
    lse: Float[Tensor, "*T HQ"],
    block: Int[Tensor, "... U"],
    own: Int[Tensor, "... 1"],
    count: int,
) -> Int[Tensor, "*T H count"]:
    """Select block 0, each query's own block and the block before it, then the most attended of the others.

    `own` is each query's own block, `block` the block to which each score belongs; both broadcast over the first
    dimensions. Blocks below 0 or above `own` are never selected. The result is in ascending order, then filled with −1.
    """
    p = (scores - lse.unflatten(-1, scores.shape[-3:-1]).unsqueeze(-1)).exp()
    block, own = block.unsqueeze(-2), own.unsqueeze(-2)
    before: Bool[Tensor, "*T 1 U"] = (block >= 0) & (block < own)
    # blocks that a query does not see get 0, because their exponentials may overflow
    p = torch.where(before.unsqueeze(-2), p, 0.0).sum(-2)
    forced = (block == 0) | (block == own) | (block == own - 1)
    rank = torch.where(forced, torch.inf, torch.where(before, p, -1.0))
    rank = torch.where((block >= 0) & (block <= own), rank, -1.0)
    # a stable sort: of two blocks with equal attention, the lower one comes first
    order = rank.sort(dim=-1, descending=True, stable=True)
    last = torch.iinfo(torch.int32).max
    chosen = block.to(torch.int32).expand_as(order.indices).gather(-1, order.indices)
    chosen = torch.where(order.values >= 0, chosen, last)[..., :count].sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=last)
    return torch.where(chosen == last, -1, chosen)
