"""Native sparse attention: the gated sum of attention to blocks' means, to selected blocks, and to a window."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn import (
    KVState,
    LayerState,
    Mixer,
    MixerOutput,
    Rotation,
    TensorState,
    apply_rotary_to_both,
    at_least_float32,
    attention_heads,
    mean_visible,
    output_linear,
    projected,
    stepping,
)
from tokenmix_core.ops import Impl, attention, attention_decode, exportable
from tokenmix_core.parallel import HeadExchange, current_shard
from tokenmix_lte.joined import join_past
from tokenmix_lte.nsa_state import PooledKVState
from tokenmix_lte.ops import block_attention, gated_sum, select_blocks
from tokenmix_lte.ops.pooled_blocks import compressed_attention, pool_blocks
from tokenmix_lte.ops.selected_blocks.reference import most_attended


class Branches(NamedTuple):
    """The outputs `[B, T, HQ, K]` of the three branches, in the order of their gates: compressed, selected, window."""

    compressed: Tensor
    selected: Tensor
    window: Tensor


def _shapes(q: Tensor, v: Tensor, **_: object) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(*q.shape[:3], v.shape[3]) for _ in Branches._fields)


@functools.partial(exportable, shapes=_shapes)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pooled_k: Tensor | None = None,
    pooled_v: Tensor | None = None,
    *,
    block: int,
    count: int,
    window: int,
    impl: Impl | None = None,
    shift: int = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the three branches as one operator for torch.export: a trace of each operation on blocks would fix T."""
    if pooled_k is None or pooled_v is None:
        pooled_k, pooled_v = (pool_blocks(x, block, cu_seqlens) for x in (k, v))
    packed: dict[str, Any] = {"cu_seqlens": cu_seqlens, "impl": impl}
    compressed, lse = compressed_attention(q, pooled_k, pooled_v, block, shift=shift, **packed)
    blocks = select_blocks(q, pooled_k, lse, count, block_size=block, shift=shift, **packed)
    selected = block_attention(q, k, v, blocks, block_size=block, **packed).o
    return compressed, selected, attention(q, k, v, window=window, **packed).o


class Nsa(Mixer):
    """o = W_o Σ_branch g_branch ⊙ o_branch, with gates g = sigmoid(W_g x): one for each query head and branch.

    All three branches have the same rotated q and k and the same v. *Compressed*: attention to the means of keys and
    values of complete blocks. *Selected*: attention to `blocks` blocks: the first, the query's own, the one before its
    own, and the blocks with the most attention in the compressed branch, summed over the query heads of a key head.
    *Window*: attention to the newest tokens. The selection of blocks passes no gradient.

    Args:
        hidden_size: D.
        num_heads: query heads HQ.
        num_kv_heads: key heads H, a divisor of HQ; each key head selects its own blocks.
        head_dim: K, even.
        block: number of tokens in a block.
        blocks: number of blocks to which a query attends in the second branch, at least 3.
        window: number of tokens that a token sees in the third branch: itself and the tokens before it.
        norm_eps: accepted but not used, because the layer has no norms.
        impl: implementation of the operations, None, "triton" or "reference".

    Raises:
        ValueError: head counts that do not divide, an odd head size, a block or window below 1, fewer than 3 blocks.
    """

    attention_impls: ClassVar[dict[str, str]] = {"eager": "reference"}
    splits_sequences = True
    takes_more_tokens = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 32,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block: int = 64,
        blocks: int = 16,
        window: int = 512,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        attention_heads("Nsa", hidden_size, num_heads, num_kv_heads, head_dim)
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"Nsa: head_dim must be even and positive, got {head_dim}")
        for name, value, least in (("block", block, 1), ("blocks", blocks, 3), ("window", window, 1)):
            if value < least:
                raise ValueError(f"Nsa: {name} must be at least {least}, got {value}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.block, self.blocks, self.window = block, blocks, window
        self.impl: Impl | None = impl
        self.rotary_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.g_proj = nn.Linear(hidden_size, num_heads * len(Branches._fields), bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def make_state(self) -> LayerState:
        """Return an empty state for keys and values, means of complete blocks, and sums of the incomplete block."""
        size = self.num_kv_heads, self.head_dim
        return LayerState(
            kv=KVState(*size, self.head_dim),
            pooled=PooledKVState(*size, self.head_dim, block=self.block),
            open=TensorState(2, *size, dtype=torch.float32),
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        assert rotary is not None
        q, k, v, gates = projected(hidden_states, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, k = apply_rotary_to_both(q, k, rotary)
        gates = gates.unflatten(-1, (self.num_heads, -1)).sigmoid()
        if state is None:
            branches = self._whole(q, k, v, cu_seqlens)
        else:
            branches = (self._step if stepping(hidden_states, state) else self._extend)(q, k, v, state)
        return output_linear(gated_sum(*branches, gates, impl=self.impl).flatten(-2), self.o_proj), None

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Branches:
        """Return the branches' outputs for whole sequences; ranks that split rows compute some heads each."""
        shard = current_shard()
        if shard is None:
            return self._attend(q, k, v, cu_seqlens=cu_seqlens)
        heads = HeadExchange(shard, self.num_kv_heads, "nsa")
        q, k, v = heads.to_heads(q, k, v)
        branches = self._attend(q, k, v, cu_seqlens=shard.row_cu_seqlens(q.device))
        return Branches(*heads.to_tokens(torch.cat(branches, -1)).chunk(3, -1))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *pooled: Tensor, shift: int = 0, cu_seqlens: Tensor | None = None
    ) -> Branches:
        """Return the branches' outputs for queries from position `shift` on; pool all keys unless given `pooled`."""
        options = {"block": self.block, "count": self.blocks, "window": self.window, "impl": self.impl}
        return Branches(*_attend(q, k, v, *pooled, shift=shift, cu_seqlens=cu_seqlens, **options))

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState) -> Branches:
        """Return the branches' outputs for one token of each sequence; update the state without synchronisation."""
        kv, pooled, span, block = state.kv, state.pooled, state.span, self.block
        N, H, K = len(k), self.num_kv_heads, self.head_dim
        kv.write(k, v, span)
        before, after = span.before, span.after
        new = torch.stack((k, v), 2).squeeze(1).detach()
        sums = state.open.get(N, new)
        sums.copy_(torch.where((before % block == 0).view(-1, 1, 1, 1), 0.0, sums) + new)
        # this also writes the mean of an incomplete block; no query reads it
        bound = span.past // block + 1
        pooled.grow(k, N, bound)
        mean_k, mean_v = (sums / block).unbind(1)
        pooled.write_one(mean_k, mean_v, before // block)

        keys, values = (x[:, : span.past + 1] for x in (kv.keys, kv.values))
        means = pooled.keys[:, :bound]
        compressed, lse = attention_decode(q, means, pooled.values[:, :bound], after // block, impl=self.impl)
        window = attention_decode(q, keys, values, after, window=self.window, impl=self.impl).o

        grouped = at_least_float32(q).view(N, H, -1, K) * K**-0.5
        scores = torch.einsum("nhgk,nuhk->nhgu", grouped, at_least_float32(means))
        own = (before // block).unsqueeze(1)
        index = torch.arange(bound, device=q.device).unsqueeze(0)
        blocks = most_attended(scores, lse.squeeze(1).to(scores), index, own, self.blocks).long()
        # gather the selected blocks: the query's own block is the last of them, and ends with the new token
        listed = (blocks >= 0).sum(-1)
        filled = (listed - 1) * block + (before % block).unsqueeze(1) + 1
        tokens = blocks.clamp(min=0).unsqueeze(-1) * block + torch.arange(block, device=q.device)
        tokens = tokens.flatten(2).clamp(max=keys.shape[1] - 1).unsqueeze(-1).expand(-1, -1, -1, K)
        keys, values = (x.transpose(1, 2).gather(2, tokens).flatten(0, 1).unsqueeze(2) for x in (keys, values))
        selected = attention_decode(q.view(N * H, 1, -1, K), keys, values, filled.flatten(), impl=self.impl).o
        return Branches(compressed, selected.view_as(q), window)

    def _extend(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState) -> Branches:
        """Return the branches' outputs for the tokens of a call, in its layout, and add these tokens to the state."""
        kv, pooled, span = state.kv, state.pooled, state.span
        rows = span.sequences
        pooled.grow(k, rows, cdiv(span.past + span.tokens, self.block))
        sums = state.open.get(rows, k)
        if not span.past and span.cu_seqlens is not None and k.shape[1]:
            return self._begin_packed(q, k, v, state)
        if not k.shape[1]:
            return Branches(*[torch.zeros_like(q)] * 3)
        if not span.uniform:
            return self._continue_packed(q, k, v, state)
        past, known = span.past, span.past // self.block
        all_k, all_v = k, v
        if past:
            all_k, all_v = (torch.cat((x[:, :past], new), 1) for x, new in ((kv.keys, k), (kv.values, v)))
        # append the means of the new tokens' blocks to those of the blocks that were complete before
        means = [pool_blocks(x[:, known * self.block :], self.block) for x in (all_k, all_v)]
        held = (pooled.keys, pooled.values)
        means = [torch.cat((x[:, :known], new), 1) for x, new in zip(held, means, strict=True)]
        branches = self._attend(q, all_k, all_v, *means, shift=past)
        for x, new in zip(held, means, strict=True):
            x[:, known : new.shape[1]] = new[:, known:].detach()
        rest = all_k.shape[1] % self.block
        last = (at_least_float32(x[:, x.shape[1] - rest :].detach()).sum(1) for x in (all_k, all_v))
        sums.copy_(torch.stack(tuple(last), 1))
        kv.write(k, v, span)
        return branches

    def _continue_packed(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState) -> Branches:
        """Return the branches' outputs for sequences that continue from different lengths; store their tokens.

        Keys are gathered so that all sequences end in the last block. All queries then have the same shift, and no
        query's list of blocks has one before its sequence's first. Rows that have no token in the call get queries of
        0, whose outputs are discarded.
        """
        kv, pooled, span, block = state.kv, state.pooled, state.span, self.block
        rows, before, after, device = span.rows, span.before, span.after, q.device
        bound = cdiv(span.past + span.tokens, block)
        length, queries = bound * block, min(bound * block, span.tokens + block - 1)
        shift = bound - (after + block - 1) // block
        b_q, b_k, b_v = (x.flatten(0, 1) for x in (q, k, v))
        kv.write(k, v, span)
        N, at = len(after), span.positions + shift[rows] * block
        index = torch.arange(length, device=device) - (shift * block).unsqueeze(1)
        slots, sequence = index.clamp(0, kv.num_slots - 1), torch.arange(N, device=device).unsqueeze(1)
        keys, values = (
            x[sequence, slots].to(new.dtype).flatten(0, 1).index_copy(0, rows * length + at, new).unflatten(0, (N, -1))
            for x, new in ((kv.keys, b_k), (kv.values, b_v))
        )
        of_token = rows * queries + at - (length - queries)
        b_q = b_q.new_zeros(N * queries, *b_q.shape[1:]).index_copy(0, of_token, b_q).unflatten(0, (N, queries))

        # the means of each sequence's blocks, shifted so that its first block is at index 0
        of_block = (torch.arange(bound, device=device) + shift.unsqueeze(1)).clamp(max=bound - 1)
        means = [pool_blocks(x, block)[sequence, of_block] for x in (keys, values)]
        for held, new in zip((pooled.keys, pooled.values), means, strict=True):
            held[:, :bound] = new.detach().to(held.dtype)
        position = index[:, length - queries :, None]
        grouped = at_least_float32(b_q).unflatten(2, (self.num_kv_heads, -1)) * self.head_dim**-0.5
        scores = torch.einsum("nthgk,nuhk->nthgu", grouped, means[0].to(grouped.dtype))
        number = torch.arange(bound, device=device)
        unseen = (number >= (position + 1).div(block, rounding_mode="floor"))[:, :, None, None]
        seen = scores.masked_fill(unseen, -torch.inf)
        lse = seen.logsumexp(-1)
        weights = (seen - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        compressed = torch.einsum("nthgu,nuhk->nthgk", weights, means[1].to(weights.dtype)).flatten(2, 3)

        own = position.div(block, rounding_mode="floor")
        blocks = most_attended(scores.detach(), lse.detach().flatten(2), number, own, self.blocks)
        blocks = torch.where(blocks >= 0, blocks + shift.view(-1, 1, 1, 1), -1)
        selected = block_attention(b_q, keys, values, blocks, block_size=block, impl=self.impl).o

        rest = torch.arange(block, device=device) < (after % block).unsqueeze(1)
        sums = (
            torch.where(rest[..., None, None], at_least_float32(x[:, -block:].detach()), 0).sum(1)
            for x in (keys, values)
        )
        state.open.value.copy_(torch.stack(tuple(sums), 1))

        most = self.window - 1
        join = join_past(span, before.clamp(max=most), sum(min(n, most) for n in span.on_host[1]))
        sequence, slots = join.rows, join.positions
        near_k, near_v = (
            join.filled(x[sequence, slots], new.flatten(0, 1)).unsqueeze(0) for x, new in ((kv.keys, k), (kv.values, v))
        )
        near_q = join.filled(b_q.new_zeros(len(sequence), *b_q.shape[2:]), q.flatten(0, 1)).unsqueeze(0)
        window = attention(near_q, near_k, near_v, window=self.window, cu_seqlens=join.cu_seqlens, impl=self.impl).o
        found = (*(x.flatten(0, 1)[of_token] for x in (compressed.to(q.dtype), selected)), window[0, join.new])
        return Branches(*(x.view_as(q) for x in found))

    def _begin_packed(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState) -> Branches:
        """Return the branches' outputs for packed prompts and store their tokens, without waiting for the device."""
        kv, pooled, span, block = state.kv, state.pooled, state.span, self.block
        cu_seqlens, device = span.cu_seqlens, q.device
        means = [pool_blocks(x, block, cu_seqlens) for x in (k, v)]
        branches = self._attend(q, k, v, *means, cu_seqlens=cu_seqlens)
        # index of each sequence's first block: the means of a sequence's blocks are adjacent
        first = cu_seqlens[:-1] // block + torch.arange(span.sequences, device=device)
        bound = cdiv(span.tokens, block)
        slots = (first.unsqueeze(1) + torch.arange(bound, device=device)).clamp(max=means[0].shape[1] - 1)
        for held, new in zip((pooled.keys, pooled.values), means, strict=True):
            held[:, :bound] = new[0].detach()[slots].to(held.dtype)
        rest = span.after % block
        index = torch.arange(block, device=device)
        tokens = ((cu_seqlens[1:] - rest).unsqueeze(1) + index).clamp(max=k.shape[1] - 1)
        opened = (index < rest.unsqueeze(1))[..., None, None]
        sums = (torch.where(opened, at_least_float32(x[0].detach()[tokens]), 0).sum(1) for x in (k, v))
        state.open.value.copy_(torch.stack(tuple(sums), 1))
        kv.write(k, v, span)
        return branches

    def mixing_flops(self, seq_len: int) -> float:
        # a query sees half of all means on average; the selection of blocks computes their scores again, without values
        means = mean_visible(seq_len) / self.block
        seen = mean_visible(seq_len, self.window) + mean_visible(seq_len, self.blocks * self.block) + 1.5 * means
        return 4.0 * self.num_heads * self.head_dim * seen
