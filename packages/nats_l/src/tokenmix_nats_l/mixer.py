"""Neural Attention Search Linear: each chunk of tokens either stays visible to softmax or is written to the state."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.nn import LayerState, MixerOutput, Rotation, output_linear
from tokenmix_core.ops import is_exporting
from tokenmix_nats_l.ablations import chunk_by_chunk, past_chunk_attention, past_chunk_delta_rule
from tokenmix_nats_l.chunks import ChunkTypes, Tokens
from tokenmix_nats_l.decoding import create_lists, step
from tokenmix_nats_l.exporting import exports, mix_exported
from tokenmix_nats_l.layer import NatsLLayer
from tokenmix_nats_l.packed import extend
from tokenmix_nats_l.split import mix_sequences


@exports
class NatsL(NatsLLayer):
    """y = W_o ((w_l · RMS(o_l) + w_s · RMS(o_s)) · silu(W_g x)): two operations on the same q, k and v.

    A chunk of `chunk` tokens has a type for each head of the delta rule, which also holds for the softmax heads on the
    same channels: the type with the higher score of the chunk's mean input (eq. 8). Keys and values of a *softmax*
    chunk stay visible to later tokens; its writes are removed from the state, which only decays (eq. 19). The writes of
    a *linear* chunk stay in the state; its keys and values are evicted. A token sees earlier tokens of its own chunk by
    both operations. o_l is the output of the gated delta rule, o_s that of softmax attention; w = softmax(W q) (eq.
    20).

    `NatsLLayer` documents the arguments.
    """

    splits_sequences = True
    float32 = ("A_log", "dt_bias")
    per_chunk = ("score_proj",)
    # appended tokens must lie after `cu_seqlens`, since a chunk's mean input and the auxiliary losses cover all tokens
    takes_more_tokens = bounds_more_tokens = True

    def prepare_steps(self, state: LayerState) -> None:
        create_lists(state)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        x, auxiliary = hidden_states, None
        one = state is not None and state.span.tokens == 1 and state.span.mask is None and not torch.is_grad_enabled()
        tokens, gate = self.project(x, state, cu_seqlens, rotary, step=one)
        if state is not None:
            turn = (rotary if self.rotary_dim else None,) if one else ()
            linear, softmax = (step if one else extend)(self, x, tokens, state, *turn)
        elif cu_seqlens is None and is_exporting():
            linear, softmax, auxiliary = mix_exported(self, x, tokens)
        else:
            linear, softmax, auxiliary = mix_sequences(self, x, tokens, cu_seqlens)
        return output_linear(self._merge(linear, softmax, x, tokens.flat_q, gate), self.o_proj), auxiliary

    def mix(self, tokens: Tokens, types: ChunkTypes, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, T, HA, VA]` of both operations for whole sequences."""
        if not self.decay:
            linear = chunk_by_chunk(self, tokens, types.linear, cu_seqlens)
        elif self.own_chunk == "softmax":
            linear = past_chunk_delta_rule(self, tokens, types.linear, cu_seqlens)
        else:
            linear, _ = self.delta_rule(tokens, types.linear, None, cu_seqlens)
        if self.own_chunk == "linear":
            return linear, past_chunk_attention(self, tokens, types.softmax, cu_seqlens)
        return linear, self.attend(tokens, types.softmax, cu_seqlens)
