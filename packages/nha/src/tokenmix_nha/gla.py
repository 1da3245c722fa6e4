"""Gated linear attention (Yang et al. 2023) as a mixer: the baseline GLA of the paper."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.modeling import LayerState, Mixer, MixerOutput, TensorState, register_mixer
from tokenmix_core.nn import GatedRMSNorm, Rotation, output_linear, projected
from tokenmix_nha.ops import log_forget_gates
from tokenmix_nha.split import chunk_gla

_GATE_RANK = 16


class GatedLinearAttention(Mixer):
    """S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √K; y = W_o (norm(o) · silu(W_g x)).

    q, k and v are projections of x; α = sigmoid(W_2 W_1 x + b)^(1/τ) with W_1 of rank 16.

    Args:
        hidden_size: D.
        num_heads: heads H.
        expand_k, expand_v: K and V of all heads together, divided by D.
        gate_normalizer: τ.
        norm_eps: epsilon of the output norm.

    Raises:
        ValueError: a head size is not a positive integer, or `gate_normalizer` is not positive.
    """

    takes_more_tokens = True
    splits_sequences = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        gate_normalizer: float = 16.0,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        keys, values = round(hidden_size * expand_k), round(hidden_size * expand_v)
        if num_heads < 1 or keys < 1 or values < 1 or keys % num_heads or values % num_heads:
            raise ValueError(
                "GatedLinearAttention: num_heads must divide expand_k and expand_v times hidden_size, "
                f"got {num_heads}, {keys} and {values}"
            )
        if not gate_normalizer > 0:
            raise ValueError(f"GatedLinearAttention: gate_normalizer must be positive, got {gate_normalizer}")
        self.num_heads, self.key_dim, self.value_dim = num_heads, keys // num_heads, values // num_heads
        self.gate_normalizer = gate_normalizer
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_down_proj = nn.Linear(hidden_size, _GATE_RANK, bias=False)
        self.a_up_proj = nn.Linear(_GATE_RANK, keys)
        self.g_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_norm = GatedRMSNorm(self.value_dim, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def make_state(self) -> LayerState:
        return LayerState(recurrent=TensorState(self.num_heads, self.key_dim, self.value_dim, dtype=torch.float32))

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        q, k, v, a, z = projected(hidden_states, self.q_proj, self.k_proj, self.v_proj, self.a_down_proj, self.g_proj)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        g = log_forget_gates(output_linear(a, self.a_up_proj), normalizer=self.gate_normalizer).unflatten(
            -1, (self.num_heads, -1)
        )
        before = None if state is None else state.recurrent.value
        o, after = chunk_gla(q, k, v, g, initial_state=before, cu_seqlens=cu_seqlens)
        if state is not None:
            state.recurrent.set(after)
        o = self.o_norm(o, z.view_as(o))
        return output_linear(o.flatten(-2), self.o_proj), None

    def mixing_flops(self, seq_len: int) -> float:
        # k vᵀ and Sᵀ q take 2 K V FLOPs each
        return 4.0 * self.num_heads * self.key_dim * self.value_dim


register_mixer("gla", GatedLinearAttention)
