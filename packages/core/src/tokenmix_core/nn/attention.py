"""Softmax attention with grouped heads: full or windowed, with rotary positions and optional q/k norms."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.nn.dtypes import at_least_float32
from tokenmix_core.nn.head_padding import attention_heads
from tokenmix_core.nn.mixer import Mixer, MixerOutput, stepping
from tokenmix_core.nn.norm import RMSNorm
from tokenmix_core.nn.projections import output_linear, projected
from tokenmix_core.nn.rotary import Rotation, apply_rotary, normed_for_step
from tokenmix_core.nn.state import KVState, LayerState, Span
from tokenmix_core.ops import attention_decode, rotate_step
from tokenmix_core.ops.softmax_attention.backends import AttentionImpl
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.parallel import attention, current_shard, gather_rows


class Attention(Mixer):
    """Causal attention: W_o softmax(R(q) R(k)ᵀ / √K) v, where R rotates each q and k by its token's position.

    Args:
        hidden_size: D.
        num_heads: query heads HQ.
        num_kv_heads: key and value heads H, a divisor of HQ; None for HQ.
        head_dim: K; None for D / HQ.
        window: number of last tokens that a token sees, itself included; None for all tokens.
        sinks: number of first tokens of a sequence that stay visible in addition to the window.
        rope: whether queries and keys are rotated by position.
        qk_norm: whether every head of q and k is RMS-normalised before the rotation (as in Qwen3).
        qkv_bias: whether the q, k and v projections have biases (as in Qwen2).
        norm_eps: epsilon of the q/k norms, unless `qk_norm_eps` is given.
        qk_norm_eps: epsilon of the q/k norms, if it differs from that of the model's other norms.
        impl: implementation of the operation, as for `tokenmix_core.ops.attention`.

    Raises:
        ValueError: head counts that do not divide D or each other, an odd rotated head size, a window below 1, sinks
            below 0 or without a window.
    """

    takes_more_tokens = True
    splits_sequences = splits_prompts = True
    joint_layers = ("q_proj", "k_proj", "v_proj")
    attention_impls: ClassVar[dict[str, str]] = {
        "eager": "reference",
        "sdpa": "sdpa",
        "flash_attention_2": "flash_attn",
    }

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 16,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        rope: bool = True,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-6,
        qk_norm_eps: float | None = None,
        impl: AttentionImpl | None = None,
    ):
        super().__init__()
        num_kv_heads, head_dim = attention_heads("Attention", hidden_size, num_heads, num_kv_heads, head_dim)
        if head_dim < 1:
            raise ValueError(f"Attention: head_dim must be at least 1, got {head_dim}")
        if rope and head_dim % 2:
            raise ValueError(f"Attention: rotary positions need an even head_dim, got {head_dim}")
        if window is not None and window < 1:
            raise ValueError(f"Attention: window must be None or at least 1, got {window}")
        if sinks < 0 or (sinks and window is None):
            raise ValueError(
                f"Attention: sinks go with a window and are at least 0, got sinks={sinks}, window={window}"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.sinks = window, sinks
        self.impl: AttentionImpl | None = impl
        self.rotary_dim = head_dim if rope else None
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        norm_eps = norm_eps if qk_norm_eps is None else qk_norm_eps
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None

    @classmethod
    def layer_type(cls, options: dict[str, Any]) -> str:
        return "full_attention" if options.get("window") is None else "sliding_attention"

    def make_state(self) -> LayerState:
        return LayerState(
            kv=KVState(self.num_kv_heads, self.head_dim, self.head_dim, window=self.window, sinks=self.sinks)
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        q, k, v = projected(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k, v = (x.unflatten(-1, (self.num_kv_heads, self.head_dim)) for x in (k, v))
        if state is not None and state.kv.fixed and self.rotary_dim is not None:
            # only a decoding step, which has one token per sequence, runs while the state's addresses are fixed
            q = self._store(q, k, v, state, rotary)
            return output_linear(decoded(q, state.kv, state.span, impl=self.impl).o.flatten(-2), self.o_proj), None
        q, k = self.positioned(q, k, rotary)
        if state is None:
            o = attention(q, k, v, window=self.window, sinks=self.sinks, cu_seqlens=cu_seqlens, impl=self.impl).o
        else:
            step = stepping(hidden_states, state)
            o = cached_attention(q, k, v, state.kv, state.span, step=step, impl=self.impl)
        return output_linear(o.flatten(-2), self.o_proj), None

    def positioned(self, q: Tensor, k: Tensor, rotary: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return q and k `[B, T, heads, K]` after the layer's q/k norms and rotation.

        A layer without these skips them.
        """
        if self.rotary_dim is not None:
            assert rotary is not None
            return apply_rotary(q, rotary, self.q_norm), apply_rotary(k, rotary, self.k_norm)
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        return q, k

    def _store(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, rotary: Rotation | None) -> Tensor:
        """Store the rotated k and the v of each sequence's one new token in the cache; return the rotated q."""
        assert rotary is not None
        norms: dict[str, Any] = {}
        if self.q_norm is not None and self.k_norm is not None:
            q, k, norms = normed_for_step(q, k, self.q_norm, self.k_norm)
        q, k, v, cos, sin = (x.squeeze(1) for x in (q, k, v, *rotary))
        kv, slots = state.kv, state.kv.slot(state.span.positions)
        return rotate_step(q, k, v, cos, sin, kv.keys, kv.values, slots, **norms).unsqueeze(1)

    def mixing_flops(self, seq_len: int) -> float:
        # q kᵀ and the weighted sum of v take 2 K operations each, per visible key and query head
        return 4.0 * self.num_heads * self.head_dim * mean_visible(seq_len, self.window, self.sinks)


def mean_visible(seq_len: int, window: int | None = None, sinks: int = 0) -> float:
    """Return the number of keys that a token sees, averaged over the positions of one causal sequence."""
    if window is None or seq_len <= window + sinks:
        return (seq_len + 1) / 2
    reach = window + sinks
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def cached_attention(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    kv: KVState,
    span: Span,
    *,
    step: bool,
    scale: float | None = None,
    impl: AttentionImpl | None = None,
) -> Float[Tensor, "B T HQ V"]:
    """Return only the output o of `cached_attention_lse`, which takes the same arguments."""
    return cached_attention_lse(q, k, v, kv, span, step=step, scale=scale, impl=impl).o


def cached_attention_lse(
    q: Float[Tensor, "B T HQ K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    kv: KVState,
    span: Span,
    *,
    step: bool,
    scale: float | None = None,
    impl: AttentionImpl | None = None,
) -> AttentionOutput:
    """Attend causally over the keys in `kv` and the call's own keys `k`; then store `k` and `v` in `kv`.

    Window and sinks are those of `kv`. `step`: use the decoding kernel, which requires one token of each sequence.
    """
    options = {"window": kv.window, "sinks": kv.sinks, "scale": scale, "impl": impl}
    if step:
        kv.write(k, v, span)
        return decoded(q, kv, span, scale=scale, impl=impl)
    if span.uniform and span.past and kv.window is None and not k.requires_grad:
        kv.write(k, v, span)
        length = span.past + span.tokens
        return attention(q, kv.keys[:, :length], kv.values[:, :length], **options)
    if span.past == 0:
        out = attention(q, k, v, cu_seqlens=span.cu_seqlens, **options)
    elif span.uniform:
        keys, values = (torch.cat(pair, 1) for pair in zip(kv.read(span), (k, v), strict=True))
        out = attention(q, keys, values, **options)
    else:
        out = _ragged_attention(q, k, v, kv, span, scale)
    if (shard := current_shard()) is not None:
        k, v = gather_rows(shard, k, "keys of the cache"), gather_rows(shard, v, "values of the cache")
    kv.write(k, v, span)
    return out


def decoded(
    q: Float[Tensor, "N 1 HQ K"],
    kv: KVState,
    span: Span,
    *,
    scale: float | None = None,
    impl: AttentionImpl | None = None,
) -> AttentionOutput:
    """Attend with one query per sequence over the keys in `kv`, which already contain the query's own key and value."""
    # upper bound of the number of stored tokens, known without synchronisation; the order of keys in a ring buffer does
    # not matter
    slots = min(span.past + 1, kv.num_slots)
    # other implementations have no decoding kernel: None selects the default kernel
    kernel = impl if impl in ("triton", "reference") else None
    return attention_decode(q, kv.keys[:, :slots], kv.values[:, :slots], kv.filled(span), scale=scale, impl=kernel)


def _ragged_attention(q: Tensor, k: Tensor, v: Tensor, kv: KVState, span: Span, scale: float | None) -> AttentionOutput:
    """Attend with an explicit mask, for several new tokens of sequences of unequal lengths (padded prompts)."""
    q, k, v = (span.unpack(x) for x in (q, k, v))
    positions = span.unpack(span.positions.view(span.layout))
    real = torch.ones_like(positions, dtype=torch.bool) if span.mask is None else span.mask
    key_positions = torch.cat((kv.positions(span)[: span.batch], positions.masked_fill(~real, -1)), 1)
    distance = positions.unsqueeze(2) - key_positions.unsqueeze(1)
    visible = (key_positions.unsqueeze(1) >= 0) & (distance >= 0)
    if kv.window is not None:
        visible &= (distance < kv.window) | (key_positions.unsqueeze(1) < kv.sinks)
    # padding queries see all keys: a softmax over no key would be NaN
    visible |= ~real.unsqueeze(2)
    keys, values = torch.cat((kv.keys[: span.batch], k), 1), torch.cat((kv.values[: span.batch], v), 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    grouped = at_least_float32(q).unflatten(2, (k.shape[2], -1))
    scores = factor * torch.einsum("nihgk,njhk->nhgij", grouped, at_least_float32(keys))
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    o = torch.einsum("nhgij,njhv->nihgv", scores.softmax(-1).to(v.dtype), values).flatten(2, 3)
    lse = scores.logsumexp(-1).flatten(1, 2).transpose(1, 2)
    return AttentionOutput(span.pack(o), span.pack(lse))
