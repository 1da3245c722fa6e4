"""Mamba-2 (Dao and Gu 2024): one input projection, a short convolution, SSD, a skip and a gated norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.nn.dtypes import at_least_float32
from tokenmix_core.nn.fold_documents import as_one_sequence
from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.nn.init import init_decay_, init_time_step_
from tokenmix_core.nn.mixer import Mixer, MixerOutput, stepping
from tokenmix_core.nn.norm import GatedRMSNorm
from tokenmix_core.nn.projections import output_linear, split_linear
from tokenmix_core.nn.rotary import Rotation
from tokenmix_core.nn.short_conv import ShortConv
from tokenmix_core.nn.state import LayerState, TensorState
from tokenmix_core.ops import ssd_prefill, ssd_step
from tokenmix_core.ops.dispatch import unless_gluon
from tokenmix_core.ops.types import Impl
from tokenmix_core.parallel import chunk_ssd


class Mamba2(Mixer):
    """S_t = exp(Δ_t A) S_{t−1} + B_t (Δ_t x_t)ᵀ, y_t = S_tᵀ C_t + D x_t; output W_o norm(y · silu(z)).

    (z, x, B, C, Δ) = W_in u; x, B and C are convolved along time and passed through SiLU; Δ = softplus(Δ + dt_bias),
    A = −exp(A_log).

    Args:
        hidden_size: width of u.
        expand: inner width divided by `hidden_size`.
        head_dim: P, channels of x in a head.
        state_size: N, channels of B and C.
        num_groups: groups G of B and C, which the heads share.
        conv_size: width of the convolution, which has a bias.
        norm_eps: epsilon of the output norm, which normalises each group separately.
        impl: implementation of the operations, None, "gluon", "triton" or "reference". "gluon" applies to whole
            sequences; single tokens and the convolution then take the default.

    Raises:
        ValueError: sizes that do not divide.
    """

    takes_more_tokens = True
    splits_sequences = splits_prompts = True
    packs_states = uses_slots = True

    float32 = ("A_log", "dt_bias", "D")

    def __init__(
        self,
        hidden_size: int,
        *,
        expand: float = 2.0,
        head_dim: int = 64,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        inner = round(hidden_size * expand)
        if head_dim < 1 or inner < 1 or inner != hidden_size * expand or inner % head_dim:
            raise ValueError(
                f"Mamba2: head_dim must divide expand · hidden_size, got head_dim={head_dim}, expand={expand}, "
                f"hidden_size={hidden_size}"
            )
        heads = inner // head_dim
        if num_groups < 1 or heads % num_groups or state_size < 1:
            raise ValueError(
                f"Mamba2: num_groups must divide the {heads} heads and state_size be positive, "
                f"got num_groups={num_groups}, state_size={state_size}"
            )
        self.inner, self.num_heads, self.head_dim = inner, heads, head_dim
        self.state_size, self.num_groups = state_size, num_groups
        self.impl: Impl | None = impl
        self.fit = HeadFit(state_size, head_dim, (16, 32, 64, 128, 256))
        self.mixed = inner + 2 * num_groups * state_size
        self.in_proj = nn.Linear(hidden_size, inner + self.mixed + heads, bias=False)
        self.conv = ShortConv(self.mixed, conv_size, bias=True, impl=unless_gluon(impl))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(inner, norm_eps, gate="before", groups=num_groups)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        self.init_weights_()

    def init_weights_(self) -> None:
        init_decay_(self.A_log)
        init_time_step_(self.dt_bias)
        nn.init.ones_(self.D)

    def make_state(self) -> LayerState:
        return LayerState(
            conv=self.conv.make_state(),
            recurrent=TensorState(*self.fit.state_shape(self.num_heads), dtype=torch.float32),
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        step = stepping(hidden_states, state)
        z, mixed, dt = split_linear(hidden_states, self.in_proj, (self.inner, self.mixed, self.num_heads))
        mixed = self.conv(mixed, state=state and state.conv, cu_seqlens=cu_seqlens, step=step)
        groups = self.num_groups * self.state_size
        x, B, C = mixed.split((self.inner, groups, groups), -1)
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        B = self.fit.keys(B.unflatten(-1, (self.num_groups, self.state_size)))
        C = self.fit.keys(C.unflatten(-1, (self.num_groups, self.state_size)))
        dt = F.softplus(at_least_float32(dt) + self.dt_bias)
        x = self.fit.values(x)
        g = -self.A_log.exp() * dt
        if state is None:
            g, cu_seqlens = as_one_sequence(g, cu_seqlens, x.dtype)
        g, dt, D = (self.fit.gates(gate) for gate in (g, dt, self.D))
        if step and state is not None:
            recurrent = state.recurrent.get(hidden_states.shape[0], hidden_states)
            C, B, x, g, dt = (t.squeeze(1) for t in (C, B, x, g, dt))
            options = {"slots": state.recurrent.slots, "impl": unless_gluon(self.impl)}
            y = ssd_step(C, B, x, g, recurrent, dt=dt, D=D, **options).unsqueeze(1)
        elif state is not None and state.recurrent.slots is not None:
            held = state.recurrent
            options = {"slots": held.slots, "fresh": held.fresh, "cu_seqlens": cu_seqlens, "impl": self.impl}
            y = ssd_prefill(C, B, x, g, held.get(len(x), x), dt=dt, D=D, **options)
        else:
            before = None if state is None else state.recurrent.value
            y, after = chunk_ssd(C, B, x, g, dt=dt, D=D, initial_state=before, cu_seqlens=cu_seqlens, impl=self.impl)
            if state is not None:
                state.recurrent.set(after)
        y = self.fit.outputs(y, self.num_heads).flatten(-2)
        return output_linear(self.norm(y, z), self.out_proj), None

    def mixing_flops(self, seq_len: int) -> float:
        # per head, the update b xᵀ and Sᵀc take 2NP operations each; the convolution takes 2W per channel
        return 4.0 * self.num_heads * self.head_dim * self.state_size + 2 * self.conv.weight.numel()
