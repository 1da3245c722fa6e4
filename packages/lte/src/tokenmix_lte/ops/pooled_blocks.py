"""Blocks of tokens as their means, and attention to those that are complete: NSA's compressed branch.

Query i sees the m = ⌊(i + 1) / block⌋ complete blocks of its sequence. The `block` queries with one m are taken for as
many heads of one query, which stands at block m − 1: that is causal attention among blocks, which core's kernels do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn.precision import at_least_float32
from tokenmix_core.ops import attention
from tokenmix_core.ops.common import AttentionOutput, Impl
from tokenmix_lte.ops.selected_blocks.reference import first_slots, places


def pool_blocks(
    x: Float[Tensor, "B T H K"], block: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None
) -> Float[Tensor, "B U H K"]:
    """The mean of each block of tokens, made in float32, of a sequence's last one over the tokens there are.

    Blocks of packed sequences stand as in `select_blocks`; those that belong to none are 0. Differentiable.
    """
    if cu_seqlens is None:
        T, U = x.shape[1], cdiv(x.shape[1], block)
        parts = F.pad(at_least_float32(x), (0, 0, 0, 0, 0, U * block - T)).unflatten(1, (U, block))
        sizes = (T - torch.arange(U, device=x.device) * block).clamp(max=block)
        return (parts.sum(2) / sizes.view(-1, 1, 1)).to(x.dtype)
    index, there = _tokens_of_blocks(x.shape[1], block, cu_seqlens, 0)
    parts = at_least_float32(x[:, index]) * there[..., None, None]
    return (parts.sum(2) / there.sum(1).clamp(min=1).view(-1, 1, 1)).to(x.dtype)


def compressed_attention(
    q: Float[Tensor, "B T HQ K"],
    pooled_k: Float[Tensor, "B U H K"],
    pooled_v: Float[Tensor, "B U H V"],
    block: int,
    *,
    shift: int = 0,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: Impl | None = None,
) -> AttentionOutput:
    """Attention of each query to the means of its sequence's blocks that end with it or before it; 0 and −∞ for none.

    Args:
        q: queries, of which the first stands at position `shift`.
        pooled_k, pooled_v: as `pool_blocks` gives them, of at least all complete blocks.
        block: tokens of a block.
        shift: tokens before the first query, without `cu_seqlens`.
        cu_seqlens: borders of packed sequences, for B = 1.
        impl: implementation of attention.
    """
    if cu_seqlens is not None:
        return _packed(q, pooled_k, pooled_v, block, cu_seqlens, impl)
    T, complete = q.shape[1], (shift + q.shape[1]) // block
    # the first queries of a sequence see nothing
    blind = min(T, max(0, block - 1 - shift))
    if blind == T:
        return AttentionOutput(
            pooled_v.new_zeros(*q.shape[:3], pooled_v.shape[3]), at_least_float32(q[..., 0]).new_full((), -torch.inf)
            .expand(q.shape[:3])
        )  # fmt: skip
    first = (shift + blind + 1) % block
    rows = cdiv(first + T - blind, block)
    grouped = F.pad(q[:, blind:], (0, 0, 0, 0, first, rows * block - first - (T - blind))).unflatten(1, (rows, block))
    out = _among_blocks(grouped, pooled_k[:, :complete], pooled_v[:, :complete], None, impl)
    o, lse = (x.flatten(1, 2)[:, first : first + T - blind] for x in out)
    return AttentionOutput(F.pad(o, (0, 0, 0, 0, blind, 0)), F.pad(lse, (0, 0, blind, 0), value=-torch.inf))


def _packed(q, pooled_k, pooled_v, block: int, cu_seqlens: Tensor, impl: Impl | None) -> AttentionOutput:
    T, U = q.shape[1], pooled_k.shape[1]
    index, _ = _tokens_of_blocks(T, block, cu_seqlens, block - 1)
    slots = first_slots(cu_seqlens, block)
    out = _among_blocks(q[:, index], pooled_k, pooled_v, slots.to(torch.int32), impl)
    at = places(T, cu_seqlens, q.device)
    complete = (at.position + 1) // block
    place = ((slots[at.sequence] + complete - 1) * block + (at.position + 1) % block).clamp(0, U * block - 1)
    o, lse = (x.flatten(1, 2)[:, place] for x in out)
    blind = complete == 0
    return AttentionOutput(o.masked_fill(blind[:, None, None], 0), lse.masked_fill(blind[:, None], -torch.inf))


def _among_blocks(
    grouped: Float[Tensor, "B rows block HQ K"], pooled_k: Tensor, pooled_v: Tensor, slots: Tensor | None, impl
) -> tuple[Float[Tensor, "B rows block HQ V"], Float[Tensor, "B rows block HQ"]]:
    """Causal attention of groups of queries to blocks, the last group standing at the last block."""
    H, block = pooled_k.shape[2], grouped.shape[2]
    heads = grouped.unflatten(3, (H, -1)).transpose(2, 3)
    o, lse = attention(heads.flatten(2, 4), pooled_k, pooled_v, cu_seqlens=slots, impl=impl)
    o, lse = (x.unflatten(2, (H, block, -1)).transpose(2, 3).flatten(3, 4) for x in (o, lse))
    return o, lse


def _tokens_of_blocks(
    T: int, block: int, cu_seqlens: Tensor, offset: int
) -> tuple[Int[Tensor, "U block"], Bool[Tensor, "U block"]]:
    """The tokens `offset` after those of each block of packed sequences, and which of them exist."""
    slots = first_slots(cu_seqlens, block)
    U = T // block + len(cu_seqlens) - 1
    block_of = torch.arange(U, device=cu_seqlens.device, dtype=slots.dtype)
    sequence = torch.searchsorted(slots[1:].contiguous(), block_of, right=True)
    local = (block_of - slots[sequence]).unsqueeze(1) * block + offset + torch.arange(block, device=slots.device)
    there = local < cu_seqlens.diff()[sequence].unsqueeze(1)
    return (cu_seqlens[sequence].unsqueeze(1) + local).clamp(max=T - 1), there
