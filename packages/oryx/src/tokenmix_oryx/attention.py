"""Softmax attention with the norm, gate and convolutions of Oryx, but without a linear mixer (paper, Table 5, left)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.modeling import Mixer, MixerOutput, register_mixer
from tokenmix_core.nn import (
    GatedRMSNorm,
    KVState,
    LayerState,
    Rotation,
    ShortConv,
    apply_rotary_to_both,
    attention_heads,
    cached_attention,
    mean_visible,
    output_linear,
    projected,
    stepping,
)
from tokenmix_core.ops import Impl
from tokenmix_core.parallel import attention


class NormedAttention(Mixer):
    """y = W_o norm(attention(R(q), R(k), v) · silu(W_g x)), where k and v are convolved along time and R rotates.

    Args:
        hidden_size: D.
        num_heads: H.
        head_dim: K; None for D / H.
        conv_size: width of the short convolution of keys and values; 0 for no convolution.
        output_gate: whether to multiply by silu(W_g x) before the norm; if False, outputs are only normalised.
        norm_eps: epsilon of the norm.
        impl: implementation of the operations.

    Raises:
        ValueError: no heads, or a number of heads that does not divide D although head_dim is None.
    """

    takes_more_tokens = True
    splits_sequences = splits_prompts = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int | None = None,
        conv_size: int = 0,
        output_gate: bool = False,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        _, head_dim = attention_heads("NormedAttention", hidden_size, num_heads, None, head_dim)
        self.num_heads, self.head_dim, self.rotary_dim = num_heads, head_dim, head_dim
        self.impl: Impl | None = impl
        inner = num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, inner, bias=False) for _ in range(3))
        self.g_proj = nn.Linear(hidden_size, inner, bias=False) if output_gate else None
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)
        self.k_conv = ShortConv(inner, conv_size, activation=None, impl=impl) if conv_size else None
        self.v_conv = ShortConv(inner, conv_size, activation=None, impl=impl) if conv_size else None
        self.norm = GatedRMSNorm(inner, norm_eps, gate="before")

    def make_state(self) -> LayerState:
        convs = {name: getattr(self, name) for name in ("k_conv", "v_conv")}
        kept = {name: conv.make_state() for name, conv in convs.items() if conv is not None}
        return LayerState(kv=KVState(self.num_heads, self.head_dim, self.head_dim), **kept)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        assert rotary is not None, "the model computes rotation angles in every call"
        step = stepping(hidden_states, state)
        q, k, v, gate = projected(hidden_states, self.q_proj, self.k_proj, self.v_proj, self.g_proj)
        if self.k_conv is not None and self.v_conv is not None:
            past = (None, None) if state is None else (state.k_conv, state.v_conv)
            k = self.k_conv(k, state=past[0], cu_seqlens=cu_seqlens, step=step)
            v = self.v_conv(v, state=past[1], cu_seqlens=cu_seqlens, step=step)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v))
        q, k = apply_rotary_to_both(q, k, rotary)
        if state is None:
            o = attention(q, k, v, cu_seqlens=cu_seqlens, impl=self.impl).o
        else:
            o = cached_attention(q, k, v, state.kv, state.span, step=step, impl=self.impl)
        return output_linear(self.norm(o.flatten(-2), gate), self.o_proj), None

    def mixing_flops(self, seq_len: int) -> float:
        # FLOPs per token: 2 · 2 · K for each visible key and head; a convolution of width W adds 2 W for each channel
        convs = sum(2 * conv.weight.numel() for conv in (self.k_conv, self.v_conv) if conv is not None)
        return 4.0 * self.num_heads * self.head_dim * mean_visible(seq_len) + convs


register_mixer("normed_attention", NormedAttention)
