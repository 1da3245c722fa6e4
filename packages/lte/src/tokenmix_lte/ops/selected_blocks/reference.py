"""Attention to listed blocks and their choice, eager: the specification and its gradient, on any device, in float64.

Queries are taken in runs that see all keys through a mask: memory stays linear in the length, work does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, packed_positions, sequence_ids
from tokenmix_core.ops.common import AttentionOutput
from tokenmix_core.ops.softmax_attention.reference import attended, joined, wide

# scores of one run of queries: 2²⁴ of them are 64 MiB in float32
_RUN_SCORES = 1 << 24


class Places(NamedTuple):
    """Of tokens: the sequence that each belongs to, and its position there, `[T]`."""

    sequence: Tensor
    position: Tensor


def places(T: int, cu_seqlens: Tensor | None, device: torch.device, *, shift: int = 0) -> Places:
    """The places of T tokens, of which the first stands at position `shift` where they are one sequence."""
    if cu_seqlens is None:
        position = torch.arange(shift, shift + T, device=device)
        return Places(torch.zeros_like(position), position)
    return Places(sequence_ids(cu_seqlens, T), packed_positions(cu_seqlens, T))


def first_slots(cu_seqlens: Int[Tensor, "N_plus_1"], block_size: int) -> Int[Tensor, "N_plus_1"]:
    """Where the blocks of packed sequences begin among all, so that none is shared: ⌊begin / block_size⌋ + n."""
    return cu_seqlens // block_size + torch.arange(len(cu_seqlens), device=cu_seqlens.device)


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
    """Attention as `block_attention` defines it, differentiable by autograd; a block named n times weighs n times."""
    (B, TQ, HQ, K), (TK, H) = q.shape, k.shape[1:3]
    scale = float(K**-0.5) if scale is None else scale
    queries = places(TQ, cu_seqlens, q.device, shift=TK - TQ)
    keys = places(TK, cu_seqlens, q.device)
    size, found = max(16, _RUN_SCORES // max(1, B * HQ * TK)), []
    # one block more, which takes what names none
    C = cdiv(TK, block_size)
    named = torch.where((blocks >= 0) & (blocks < C), blocks, C).long()
    for i in range(0, TQ, size):
        run = slice(i, i + size)
        counts = named.new_zeros(B, named[:, run].shape[1], H, C + 1, dtype=wide(q).dtype)
        counts = counts.scatter_add(3, named[:, run], torch.ones_like(named[:, run], dtype=counts.dtype))
        counts = counts[..., keys.position // block_size].permute(0, 2, 1, 3).unsqueeze(2)
        own = keys.sequence == queries.sequence[run, None]
        mask = (counts > 0) & own & (keys.position <= queries.position[run, None])
        found.append(attended(q[:, run], k, v, mask, scale, counts.clamp(min=1).log()))
    return joined(found, q, v)


@torch.no_grad()
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
    """The choice as `select_blocks` defines it."""
    (B, TQ, HQ, K), (U, H) = q.shape, pooled.shape[1:3]
    scale = float(K**-0.5) if scale is None else scale
    at = places(TQ, cu_seqlens, q.device, shift=shift)
    own, chosen = at.position // block_size, []
    size = max(16, _RUN_SCORES // max(1, B * HQ * U))
    for i in range(0, TQ, size):
        run = slice(i, i + size)
        b_own = own[run, None]
        block = torch.arange(U, device=q.device).expand(len(b_own), -1)
        if cu_seqlens is not None:
            block = block - first_slots(cu_seqlens, block_size)[at.sequence[run], None]
        grouped = wide(q[:, run]).unflatten(2, (H, -1))
        s = scale * torch.einsum("bihgk,buhk->bihgu", grouped, wide(pooled))
        chosen.append(most_attended(s, lse[:, run].to(s), block, b_own, count))
    return torch.cat(chosen, 1) if chosen else torch.empty(B, 0, H, count, dtype=torch.int32, device=q.device)


def most_attended(
    scores: Float[Tensor, "*T H G U"],
    lse: Float[Tensor, "*T HQ"],
    block: Int[Tensor, "... U"],
    own: Int[Tensor, "... 1"],
    count: int,
) -> Int[Tensor, "*T H count"]:
    """The choice among blocks whose numbers in the sequence of a query with block `own` are `block`.

    `block` and `own` broadcast against the first dimensions; numbers below 0 and above `own` are never chosen.
    """
    p = (scores - lse.unflatten(-1, scores.shape[-3:-1]).unsqueeze(-1)).exp()
    block, own = block.unsqueeze(-2), own.unsqueeze(-2)
    before: Bool[Tensor, "*T 1 U"] = (block >= 0) & (block < own)
    # what a query does not see may exceed all bounds
    p = torch.where(before.unsqueeze(-2), p, 0.0).sum(-2)
    forced = (block == 0) | (block == own) | (block == own - 1)
    rank = torch.where(forced, torch.inf, torch.where(before, p, -1.0))
    rank = torch.where((block >= 0) & (block <= own), rank, -1.0)
    # sorting keeps the lower of equal ones in front
    order = rank.sort(dim=-1, descending=True, stable=True)
    last = torch.iinfo(torch.int32).max
    chosen = block.to(torch.int32).expand_as(order.indices).gather(-1, order.indices)
    chosen = torch.where(order.values >= 0, chosen, last)[..., :count].sort(-1).values
    chosen = torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=last)
    return torch.where(chosen == last, -1, chosen)
