"""TOVA (token omission via attention): in evaluation, attention evicts the token that gets the least attention."""

from __future__ import annotations

import functools
import warnings
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn import (
    Attention,
    LayerState,
    MixerOutput,
    Rotation,
    TensorState,
    at_least_float32,
    mean_visible,
    output_linear,
    projected,
)

# number of tokens whose scores are computed at once
_BLOCK = 64


class Held(NamedTuple):
    """Keys and values `[N, held, H, K]` of the held tokens, and the number `[N]` of them that exist so far."""

    keys: Tensor
    values: Tensor
    filled: Tensor


class Tova(Attention):
    """Core's attention layer with the same weights, which in evaluation holds at most `held` tokens.

    If a new token would exceed that number, all heads evict the token that gets the least attention from the new query,
    averaged over query heads; of tokens with equal attention (up to rounding), the one in the first slot. In training
    the layer is full attention, because the method needs no training. Evaluation runs in PyTorch's own operations, with
    or without a cache, and token by token after the first eviction.

    Args:
        hidden_size: D.
        held: maximum number of tokens that the layer holds.
        num_heads, num_kv_heads, head_dim, rope, qk_norm, qkv_bias, norm_eps: the same as for `Attention`.

    Raises:
        ValueError: the reasons given at `Attention`, or `held` is below 1.
    """

    # evaluation computes attention by torch operations, so transformers' `attn_implementation` has no kernel to select
    attention_impls: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        hidden_size: int,
        *,
        held: int = 1024,
        num_heads: int = 16,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope: bool = True,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-6,
    ):
        if held < 1:
            raise ValueError(f"Tova: held must be at least 1, got {held}")
        super().__init__(
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            norm_eps=norm_eps,
        )
        self.held = held

    def make_state(self) -> LayerState:
        size = (self.held, self.num_kv_heads, self.head_dim)
        return LayerState(keys=TensorState(*size), values=TensorState(*size))

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        if self.training and state is None:
            return super().forward(hidden_states, cu_seqlens=cu_seqlens, rotary=rotary)
        q, k, v = self._heads(hidden_states, rotary)
        if state is not None:
            span = state.span
            N, filled = span.batch, span.before.clamp(max=self.held)
            keys, values = state.keys.get(span.sequences, k), state.values.get(span.sequences, v)
            # drop the rows from N on, which belong to no sequence
            held = Held(keys[:N], values[:N], filled[:N])
            o, held = self._attend(tuple(span.unpack(x) for x in (q, k, v)), held, span.mask, span.past)
            state.keys.set(torch.cat((held.keys, keys[N:])))
            state.values.set(torch.cat((held.values, values[N:])))
            o = span.pack(o)
        elif cu_seqlens is None:
            o, _ = self._attend((q, k, v), self._empty(k), None)
        else:
            parts = [slice(i, j) for i, j in pairwise(cu_seqlens.tolist()) if i < j]
            o = q.new_zeros(q.shape)
            for p in parts:
                o[:, p] = self._attend(tuple(x[:, p] for x in (q, k, v)), self._empty(k), None)[0]
        return output_linear(o.flatten(-2), self.o_proj), None

    def mixing_flops(self, seq_len: int) -> float:
        # a query sees as many tokens as it would with a window of held + 1
        return 4.0 * self.num_heads * self.head_dim * mean_visible(seq_len, self.held + 1)

    def _heads(self, x: Tensor, rotary: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected(x, self.q_proj, self.k_proj, self.v_proj))
        return *self.positioned(q, k, rotary), v

    def _empty(self, k: Tensor) -> Held:
        empty = k.new_zeros(len(k), self.held, *k.shape[2:])
        return Held(empty, empty, torch.zeros(len(k), dtype=torch.int64, device=k.device))

    def _attend(
        self, heads: tuple[Tensor, ...], held: Held, mask: Bool[Tensor, "N T"] | None, past: int = 0
    ) -> tuple[Float[Tensor, "N T HQ K"], Held]:
        """Return the outputs for q, k and v, zero at padding, and the tokens that are held afterwards.

        `past` is an upper bound of each sequence's length before the call.
        """
        T, outputs = heads[0].shape[1], []
        if T > 1 and past + T > self.held:
            _warn_once()
        for start in range(0, T, _BLOCK):
            block = slice(start, start + _BLOCK)
            q, k, v = (x[:, block] for x in heads)
            o, held = self._attend_block(q, k, v, held, None if mask is None else mask[:, block], past + start)
            outputs.append(o)
        return torch.cat(outputs, 1), held

    def _attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, held: Held, mask: Tensor | None, past: int
    ) -> tuple[Float[Tensor, "N Q HQ K"], Held]:
        """Compute `_attend` for a block of tokens, with all scores (with held tokens and each other) at once."""
        N, Q = k.shape[:2]
        keys, values = torch.cat((held.keys, k), 1), torch.cat((held.values, v), 1)
        grouped = at_least_float32(q).unflatten(2, (self.num_kv_heads, -1)) * self.head_dim**-0.5
        scores = torch.einsum("nqhgk,nphk->nhgqp", grouped, at_least_float32(keys))
        real = k.new_ones(N, Q, dtype=torch.bool) if mask is None else mask
        # a decoding step always runs `_evict`: its CUDA graph may be captured before the first eviction
        update = self._fill if Q > 1 and past + Q <= self.held else self._evict
        visible, at = update(scores, held.filled, real)
        # padding sees itself: otherwise its softmax would be NaN
        visible = visible | torch.eye(Q, self.held + Q, dtype=torch.bool, device=k.device).roll(self.held, 1)
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        o = torch.einsum("nhgqp,nphk->nqhgk", weights, at_least_float32(values)).flatten(2, 3).to(v.dtype)
        if mask is not None:
            o = torch.where(mask[..., None, None], o, 0.0)
        filled = (held.filled + real.sum(1)).clamp(max=self.held)
        stay = at[..., None, None]
        keys, values = (x.gather(1, stay.expand(-1, -1, *x.shape[2:])) for x in (keys, values))
        return o, Held(keys, values, filled)

    def _fill(
        self, scores: Float[Tensor, "N H G Q P"], filled: Int[Tensor, "N"], real: Bool[Tensor, "N Q"]
    ) -> tuple[Bool[Tensor, "N Q P"], Int[Tensor, "N held"]]:
        """Return which held and new tokens each query sees, and each slot's token afterwards; nothing is evicted."""
        Q = real.shape[1]
        before = self._slots(real) < filled.unsqueeze(1)
        causal = torch.ones(Q, Q, dtype=torch.bool, device=real.device).tril()
        visible = torch.cat((before.unsqueeze(1).expand(-1, Q, -1), causal & real.unsqueeze(1)), 2)
        # padding is assigned to an additional slot, which is cut off
        to = torch.where(real, filled.unsqueeze(1) + real.cumsum(1) - 1, self.held)
        new = self.held + torch.arange(Q, device=real.device)
        at = F.pad(self._slots(real).expand(len(real), -1), (0, 1))
        return visible, at.scatter(1, to, new.expand_as(to))[:, :-1]

    def _evict(
        self, scores: Float[Tensor, "N H G Q P"], filled: Int[Tensor, "N"], real: Bool[Tensor, "N Q"]
    ) -> tuple[Bool[Tensor, "N Q P"], Int[Tensor, "N held"]]:
        """Return the same values as `_fill`, computed token by token, because each token may evict another one."""
        scores, slots = scores.detach(), self._slots(real)
        visible, at = torch.zeros_like(scores[:, 0, 0], dtype=torch.bool), slots.expand(len(real), -1)
        for t, (seen, is_real) in enumerate(zip(visible.unbind(1), real.unbind(1), strict=True)):
            listed = F.pad(at, (0, 1), value=self.held + t)
            exists = F.pad(slots < filled.unsqueeze(1), (0, 1), value=True)
            seen.scatter_(1, listed, exists)
            own_scores = scores[..., t, :].gather(-1, listed[:, None, None].expand(*scores.shape[:3], -1))
            weights = own_scores.masked_fill(~exists[:, None, None], -torch.inf).softmax(-1)
            # the token takes the first empty slot; if none is empty, the slot of the token with the least attention,
            # which may be the new token itself
            to = torch.where(filled < self.held, filled, weights.mean((1, 2)).argmin(1)).unsqueeze(1)
            after = listed.scatter(1, to, self.held + t)[:, :-1]
            at = torch.where(is_real.unsqueeze(1), after, at)
            filled = (filled + is_real).clamp(max=self.held)
        return visible, at

    def _slots(self, like: Tensor) -> Int[Tensor, "held"]:
        return torch.arange(self.held, device=like.device)


@functools.cache
def _warn_once() -> None:
    warnings.warn("TOVA runs token by token once it evicts tokens, which is slow for long prompts", stacklevel=4)
