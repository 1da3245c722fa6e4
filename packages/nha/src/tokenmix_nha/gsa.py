"""Gated slot attention (Zhang et al. 2024) as a mixer: the layer of FLA's GSA models."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.modeling import LayerState, Mixer, MixerOutput, register_mixer
from tokenmix_core.nn import RMSNorm, Rotation, attention_heads, output_linear, projected, stepping
from tokenmix_core.ops import Impl, unless_gluon
from tokenmix_nha.ops import log_forget_gates, slot_window_attention_prefill, slot_window_attention_step
from tokenmix_nha.split import slot_window_attention
from tokenmix_nha.state import SlotWindowPart


class GatedSlotAttention(Mixer):
    """o_t = softmax(q_t S^K_tᵀ) S^V_t over M slots, S_t = Diag(α_t) S_{t−1} + (1 − α_t) ⊗ k_t; y = W_o norm(silu(o)).

    The recurrence of S is that of the slots of keys, S^K; S^V has the same with v. q, k and v are projections of x,
    passed through SiLU; α = sigmoid(W_f x)^(1/τ). There is no window: a token enters the slots before its own query
    reads them.

    Args:
        hidden_size: D.
        num_heads: query heads HQ, which divide D.
        num_kv_heads: heads H of keys, values and slots, a divisor of HQ; None for HQ.
        slots: M.
        gate_normalizer: τ.
        norm_eps: not used; the output norm uses `out_norm_eps`.
        out_norm_eps: epsilon of the output norm.
        impl: implementation of the operation, as for `tokenmix_nha.ops.slot_window_attention`.

    Raises:
        ValueError: head counts do not divide, or `slots` or `gate_normalizer` is not positive.
    """

    takes_more_tokens = True
    splits_sequences = True
    packs_states = uses_slots = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        slots: int = 64,
        gate_normalizer: float = 8.0,
        norm_eps: float = 1e-6,
        out_norm_eps: float = 1e-5,
        impl: Impl | None = None,
    ):
        super().__init__()
        num_kv_heads, head_dim = attention_heads("GatedSlotAttention", hidden_size, num_heads, num_kv_heads, None)
        if slots < 1 or not gate_normalizer > 0:
            raise ValueError(
                f"GatedSlotAttention: slots and gate_normalizer must be positive, got {slots} and {gate_normalizer}"
            )
        self.num_heads, self.num_kv_heads, self.slots = num_heads, num_kv_heads, slots
        self.head_dim, self.gate_normalizer = head_dim, gate_normalizer
        self.impl: Impl | None = impl
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.f_proj = nn.Linear(hidden_size, num_kv_heads * slots, bias=False)
        self.o_norm = RMSNorm(hidden_size, out_norm_eps)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def make_state(self) -> LayerState:
        return LayerState(slots=SlotWindowPart(self.num_kv_heads, self.slots, self.head_dim, self.head_dim, 0))

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        q, k, v, f = projected(hidden_states, self.q_proj, self.k_proj, self.v_proj, self.f_proj)
        q, k, v = (F.silu(x).unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        f = f.unflatten(-1, (self.num_kv_heads, self.slots))
        if state is not None and stepping(hidden_states, state):
            past = state.slots.get(len(q), q)
            q, k, v, f = (x.squeeze(1) for x in (q, k, v, f))
            options = {"scale": 1.0, "normalizer": self.gate_normalizer, "impl": unless_gluon(self.impl)}
            options["slots"] = state.slots.slots
            o = slot_window_attention_step(q, k, v, f, past, **options).unsqueeze(1)
        else:
            f = log_forget_gates(f, normalizer=self.gate_normalizer)
            options = {"scale": 1.0, "cu_seqlens": cu_seqlens, "impl": self.impl}
            if state is not None and (held := state.slots).slots is not None:
                past = held.get(len(q), q)
                o = slot_window_attention_prefill(q, k, v, f, past, slots=held.slots, fresh=held.fresh, **options)
                return self._output(o), None
            o, after = slot_window_attention(
                q, k, v, f, window=0, initial_state=None if state is None else state.slots.value,
                output_final_state=state is not None, **options,
            )  # fmt: skip
            if state is not None:
                state.slots.set(after)
        return self._output(o), None

    def _output(self, o: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T D"]:
        return output_linear(self.o_norm(F.silu(o).flatten(-2)), self.o_proj)

    def mixing_flops(self, seq_len: int) -> float:
        # reading the key and the value of a slot takes 2 K FLOPs each, and so does updating each
        return 4.0 * self.slots * self.head_dim * (self.num_heads + self.num_kv_heads)


register_mixer("gated_slot_attention", GatedSlotAttention)
