"""Gated DeltaNet (Yang et al. 2025): short convolutions, the gated delta rule, a gated norm for each head."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.nn.fold_documents import as_one_sequence
from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.nn.init import init_decay_, init_time_step_
from tokenmix_core.nn.mixer import Mixer, MixerOutput, stepping
from tokenmix_core.nn.norm import GatedRMSNorm, RMSNorm
from tokenmix_core.nn.plain import is_plain, warn_slower
from tokenmix_core.nn.projections import output_linear, projected
from tokenmix_core.nn.rotary import Rotation
from tokenmix_core.nn.short_conv import ShortConv, convolved
from tokenmix_core.nn.state import LayerState, TensorState
from tokenmix_core.ops import delta_gates, delta_layer_step, gated_delta_rule_prefill, gated_delta_rule_step
from tokenmix_core.ops.dispatch import unless_gluon
from tokenmix_core.ops.types import Impl
from tokenmix_core.parallel import chunk_gated_delta_rule


class GatedDeltaNet(Mixer):
    """S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t / √K; y = W_o (norm(o) · silu(W_g x)).

    q, k and v are projections of x, convolved along time and passed through SiLU; q and k have unit length.
    g = −exp(A_log) · softplus(W_a x + dt_bias), β = sigmoid(W_b x).

    Args:
        hidden_size: D.
        num_heads: heads H of q and k.
        head_dim: K.
        expand_v: V = expand_v · K.
        num_v_heads: heads HV of v, gates and state, a multiple of H; None for H.
        conv_size: width of the convolutions.
        allow_neg_eigval: whether β = 2 · sigmoid(W_b x), which allows negative eigenvalues of the transition.
        output_gate: whether outputs are gated by silu(W_g x); without the gate they are only normalised.
        norm_eps: epsilon of the output norm.
        impl: implementation of the operations, None, "gluon", "triton" or "reference". "gluon" applies to whole
            sequences; single tokens and the convolution then take the default.

    Raises:
        ValueError: head counts that do not divide, sizes that are not positive integers, K above 256, or a width of
            the convolutions outside 2 to 8.
    """

    takes_more_tokens = True
    splits_sequences = splits_prompts = True
    packs_states = uses_slots = True
    joint_layers = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")

    float32 = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 6,
        head_dim: int = 256,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        output_gate: bool = True,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        value_dim = round(head_dim * expand_v)
        if num_heads < 1 or num_v_heads < 1 or num_v_heads % num_heads:
            raise ValueError(
                f"GatedDeltaNet: num_v_heads must be a multiple of num_heads, got {num_v_heads} and {num_heads}"
            )
        if head_dim < 1 or value_dim < 1 or value_dim != head_dim * expand_v:
            raise ValueError(
                f"GatedDeltaNet: head_dim and expand_v · head_dim must be whole and positive, "
                f"got head_dim={head_dim}, expand_v={expand_v}"
            )
        self.num_heads, self.num_v_heads, self.head_dim, self.value_dim = num_heads, num_v_heads, head_dim, value_dim
        self.max_beta = 2.0 if allow_neg_eigval else 1.0
        self.impl: Impl | None = impl
        self.fit = HeadFit(head_dim, value_dim, (64, 128, 256))
        keys, values = num_heads * head_dim, num_v_heads * value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.q_conv = ShortConv(keys, conv_size, impl=unless_gluon(impl))
        self.k_conv = ShortConv(keys, conv_size, impl=unless_gluon(impl))
        self.v_conv = ShortConv(values, conv_size, impl=unless_gluon(impl))
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.g_proj = nn.Linear(hidden_size, values, bias=False) if output_gate else None
        self.o_norm = GatedRMSNorm(value_dim, norm_eps) if output_gate else RMSNorm(value_dim, norm_eps)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.init_weights_()

    def init_weights_(self) -> None:
        init_decay_(self.A_log)
        init_time_step_(self.dt_bias)

    def make_state(self) -> LayerState:
        return LayerState(
            q_conv=self.q_conv.make_state(),
            k_conv=self.k_conv.make_state(),
            v_conv=self.v_conv.make_state(),
            recurrent=TensorState(*self.fit.state_shape(self.num_v_heads), dtype=torch.float32),
            # counters of finished programs: the decoding kernel resets them to zero at the end of each step
            arrivals=TensorState(self.num_heads, dtype=torch.int32),
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
        if step and state is not None and self._in_one_launch(hidden_states):
            return output_linear(self._step(hidden_states, state), self.o_proj), None
        q, k, v, a, b, z = self._projected(hidden_states)
        q, k, v = convolved(
            (self.q_conv, self.k_conv, self.v_conv),
            (q, k, v),
            (None, None, None) if state is None else (state.q_conv, state.k_conv, state.v_conv),
            cu_seqlens=cu_seqlens,
            step=step,
        )
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_v_heads, self.value_dim))
        g, beta = delta_gates(a, b, self.A_log, self.dt_bias, max_beta=self.max_beta)
        if state is None:
            g, cu_seqlens = as_one_sequence(g, cu_seqlens, v.dtype)
        q, k, v, g, beta = (
            self.fit.keys(q),
            self.fit.keys(k),
            self.fit.values(v),
            self.fit.gates(g),
            self.fit.gates(beta),
        )
        options: dict[str, Any] = {"scale": self.head_dim**-0.5, "qk_l2norm": True, "impl": self.impl}
        if step and state is not None:
            recurrent = state.recurrent.get(hidden_states.shape[0], hidden_states)
            state.arrivals.get(hidden_states.shape[0], hidden_states)
            q, k, v, g, beta = (x.squeeze(1) for x in (q, k, v, g, beta))
            options |= {"impl": unless_gluon(self.impl), "slots": state.recurrent.slots}
            o = gated_delta_rule_step(q, k, v, g, beta, recurrent, **options).unsqueeze(1)
        elif state is not None and state.recurrent.slots is not None:
            held = state.recurrent
            options |= {"slots": held.slots, "fresh": held.fresh, "cu_seqlens": cu_seqlens}
            o = gated_delta_rule_prefill(q, k, v, g, beta, held.get(len(q), q), **options)
            state.arrivals.reset(len(q), q)
        else:
            before = None if state is None else state.recurrent.value
            o, after = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=before, cu_seqlens=cu_seqlens, **options)
            if state is not None:
                state.recurrent.set(after)
                state.arrivals.get(after.shape[0], after)
        o = self.fit.outputs(o, self.num_v_heads)
        # z may be a slice of a wider tensor: as rows of all heads it is not copied
        o = self.o_norm(o).flatten(-2) if z is None else self.o_norm(o.flatten(-2), z)
        return output_linear(o, self.o_proj), None

    def _projected(self, x: Tensor) -> tuple[Any, ...]:
        """Return q, k and v before their convolutions, the inputs of decay and β, and the output gate or None."""
        return projected(x, self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj)

    def _in_one_launch(self, x: Tensor) -> bool:
        """True if one kernel can compute everything between the input and the output projections of a decoding step.

        Warns once if only a hook, an adapter or another class of tensors prevents this.
        """
        if self.impl == "reference" or not (x.is_cuda or self.impl == "triton"):
            return False
        plain = is_plain(ShortConv, self.q_conv, self.k_conv, self.v_conv)
        if plain and is_plain((GatedRMSNorm, RMSNorm), self.o_norm):
            return True
        warn_slower("GatedDeltaNet's decoding step", ("a convolution", "o_norm"))
        return False

    def _step(self, x: Float[Tensor, "B 1 D"], state: LayerState) -> Float[Tensor, "B 1 values"]:
        """Return the gated outputs, before the output projection, of each sequence's one new token."""
        x, heads, values = x.squeeze(1), (self.num_heads, self.head_dim), (self.num_v_heads, self.value_dim)
        q, k, v, a, b, z = self._projected(x)
        convs, last = (self.q_conv, self.k_conv, self.v_conv), (state.q_conv, state.k_conv, state.v_conv)
        y = delta_layer_step(
            q.unflatten(-1, heads),
            k.unflatten(-1, heads),
            v.unflatten(-1, values),
            a,
            b,
            None if z is None else z.unflatten(-1, values),
            [conv.weight for conv in convs],
            [part.get(x.shape[0], y) for part, y in zip(last, (q, k, v), strict=True)],
            self.A_log,
            self.dt_bias,
            self.o_norm.weight,
            state.recurrent.get(x.shape[0], x),
            state.arrivals.get(x.shape[0], x),
            slots=state.recurrent.slots,
            scale=self.head_dim**-0.5,
            max_beta=self.max_beta,
            eps=self.o_norm.eps,
            impl=unless_gluon(self.impl),
        )
        return y.flatten(1).unsqueeze(1)

    def mixing_flops(self, seq_len: int) -> float:
        # per head, Sᵀk, the update k vᵀ and Sᵀq take 2KV operations each; the convolutions take 2W per channel
        convs = sum(2 * conv.weight.numel() for conv in (self.q_conv, self.k_conv, self.v_conv))
        return 6.0 * self.num_v_heads * self.head_dim * self.value_dim + convs
