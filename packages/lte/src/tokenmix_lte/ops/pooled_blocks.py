"""NSA's compressed branch: means of blocks of tokens, and attention to the means of complete blocks.

Query i sees the m = ⌊(i + 1) / block⌋ complete blocks of its sequence. The `block` queries with the same m form a
group, which is treated as one query at block m − 1 with `block` times as many heads. The branch is then causal
attention among blocks, which core's kernels compute. Each of the `block` queries of a group has its own copy of the
pooled keys, so that queries need no permutation and the gradient of a key head is a sum over few query heads. All
copies together are as large as k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_places, inverse
from tokenmix_core.nn import at_least_float32, moved
from tokenmix_core.ops import AttentionOutput, Impl, attention
from tokenmix_lte.ops.selected_blocks.reference import first_slots, sequence_positions


def pool_blocks(
    x: Float[Tensor, "B T H K"], block: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None
) -> Float[Tensor, "B U H K"]:
    """Return the mean of each block of tokens, computed in float32 (float64 for float64 x) and rounded to x's dtype.

    For an incomplete last block this is the mean of its tokens.
    Blocks of packed sequences are numbered as in `select_blocks`; blocks that belong to no sequence are 0.
    Differentiable.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is None:
        T, U = x.shape[1], cdiv(x.shape[1], block)
        parts = F.pad(x, (0, 0, 0, 0, 0, U * block - T)).unflatten(1, (U, block))
        sizes = (T - torch.arange(U, device=x.device) * block).clamp(max=block)
        return (parts.sum(2, dtype=dtype) / sizes.view(-1, 1, 1)).to(x.dtype)
    tokens, back = chunk_places(cu_seqlens, x.shape[1], block)
    parts = moved(x[0], tokens, back, holes=True)
    means = parts.sum(1, dtype=dtype) / (tokens >= 0).sum(1).clamp(min=1).view(-1, 1, 1)
    return means.to(x.dtype).unsqueeze(0)


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
    """Attend from each query to the means of complete blocks in its sequence; without any, o = 0 and lse = −∞.

    Args:
        q: queries; the position of the first is `shift`.
        pooled_k, pooled_v: results of `pool_blocks` that include all complete blocks.
        block: number of tokens in a block.
        shift: number of tokens before the first query; 0 with `cu_seqlens`.
        cu_seqlens: boundaries of packed sequences, for B = 1.
        impl: implementation of attention.
    """
    if cu_seqlens is not None:
        return _packed(q, pooled_k, pooled_v, block, cu_seqlens, impl)
    # divide the queries into four parts: those that see no block, the rest of a group that began earlier, whole groups,
    # and the beginning of a last group
    T = q.shape[1]
    num_blind = min(T, max(0, block - 1 - shift))
    first = min(T - num_blind, -(shift + num_blind + 1) % block)
    groups = (T - num_blind - first) // block
    blind, *parts = q.split([num_blind, first, groups * block, T - num_blind - first - groups * block], 1)
    none = torch.full_like(at_least_float32(blind[..., 0]), -torch.inf)
    outputs, end = [(pooled_v.new_zeros(*blind.shape[:3], pooled_v.shape[3]), none)], shift + num_blind
    for part, rows in zip(parts, (1, groups, 1), strict=True):
        if not part.shape[1]:
            continue
        end += part.shape[1]
        complete = end // block
        grouped = part.unflatten(1, (rows, part.shape[1] // rows))
        out = _among_blocks(grouped, pooled_k[:, :complete], pooled_v[:, :complete], None, impl)
        outputs.append(tuple(x.flatten(1, 2) for x in out))
    o, lse = (torch.cat(x, 1) for x in zip(*outputs, strict=True))
    return AttentionOutput(o, lse)


def _packed(q, pooled_k, pooled_v, block: int, cu_seqlens: Tensor, impl: Impl | None) -> AttentionOutput:
    """Compute `compressed_attention` for packed sequences; their groups, at most ⌊T / block⌋, are concatenated."""
    T, rows = q.shape[1], q.shape[1] // block
    if not rows:
        o = pooled_v.new_zeros(*q.shape[:3], pooled_v.shape[3])
        return AttentionOutput(o, torch.full_like(at_least_float32(q[..., 0]), -torch.inf))
    at, slots = sequence_positions(T, cu_seqlens, q.device), first_slots(cu_seqlens, block)
    complete = cu_seqlens.diff() // block
    begins = F.pad(complete.cumsum(0), (1, 0))
    # a row stands for one block: `sequence` is the block's sequence, `slot` its index among the pooled keys
    row = torch.arange(rows, device=q.device)
    used = row < begins[-1]
    sequence = torch.searchsorted(begins[1:].contiguous(), row, right=True).clamp(max=len(complete) - 1)
    slot = torch.where(used, slots[sequence] + row - begins[sequence], -1)
    # padding tokens get group 0, which sees no block
    group = torch.where(at.sequence < len(complete), (at.position + 1) // block, 0)
    target = torch.where(group > 0, (begins[at.sequence] + group - 1) * block + (at.position + 1) % block, -1)
    tokens = inverse(target, rows * block).view(rows, block)
    # boundaries of the sequences that have rows; each unused row is a sequence of its own
    first = ~used | (row == begins[sequence])
    firsts = torch.where(first, row, rows).sort().values[: len(cu_seqlens)]
    boundaries = F.pad(firsts, (0, 1), value=rows).to(torch.int32)
    of_slot = inverse(slot, pooled_k.shape[1])
    k, v = (moved(x[0], slot, of_slot, holes=True).unsqueeze(0) for x in (pooled_k, pooled_v))
    grouped = moved(q[0], tokens, target, holes=True).unsqueeze(0)
    out = _among_blocks(grouped, k, v, boundaries, impl)
    o, lse = (moved(x[0].flatten(0, 1), target, tokens.flatten(), holes=True).unsqueeze(0) for x in out)
    return AttentionOutput(o, lse.masked_fill((group == 0)[:, None], -torch.inf))


def _among_blocks(
    grouped: Float[Tensor, "B rows block HQ K"], pooled_k: Tensor, pooled_v: Tensor, slots: Tensor | None, impl
) -> tuple[Float[Tensor, "B rows block HQ V"], Float[Tensor, "B rows block HQ"]]:
    """Compute causal attention of groups of queries to blocks; the last group is at the position of the last block."""
    block = grouped.shape[2]
    k, v = (x.unsqueeze(2).expand(-1, -1, block, -1, -1).flatten(2, 3) for x in (pooled_k, pooled_v))
    o, lse = attention(grouped.flatten(2, 3), k, v, cu_seqlens=slots, impl=impl)
    return o.unflatten(2, (block, -1)), lse.unflatten(2, (block, -1))
