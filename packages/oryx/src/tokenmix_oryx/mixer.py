"""The Oryx layer: attention and a linear recurrence share keys, values, gate and output, but have separate queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenmix_core.modeling import Mixer, MixerOutput, register_mixer
from tokenmix_core.nn import (
    GatedRMSNorm,
    LayerState,
    Rotation,
    ShortConv,
    Span,
    TensorState,
    apply_rotary_to_both,
    at_least_float32,
    convolved,
    init_decay_,
    init_time_step_,
    is_plain,
    is_plain_linear,
    mean_visible,
    output_linear,
    projected,
    stepping,
    warn_slower,
)
from tokenmix_core.ops import (
    GLUON,
    Impl,
    ScanOutput,
    gated_delta_rule_step,
    resolve_impl,
    ssd_step,
    unless_gluon,
)
from tokenmix_core.parallel import chunk_gated_delta_rule, chunk_ssd, current_shard
from tokenmix_oryx.mode_attention import attend, attend_cached, unit_length
from tokenmix_oryx.modes import ATTENTION, LINEAR, Modes, RequestMode, batch_mode, request_mode, resolve, step_mode
from tokenmix_oryx.ops import MixOptions, mix
from tokenmix_oryx.options import FAMILIES, MAMBA2, Activation, LinearMixer, Normalised, Rotated
from tokenmix_oryx.projection import TokenOrder, can_group, project_by_mode, project_in_order
from tokenmix_oryx.state import DroppableKV

ALL_ATTEND = Modes(ATTENTION)
# minimum number of tokens with which a grouped GEMM saves more time than sorting the tokens by mode costs
GROUPED_TOKENS = 512


class OryxMixer(Mixer):
    """o_t = attention(q^A, k, v)_t or linear(q^L, k, v)_t, by the token's mode; y = W_o norm(o, silu(W_g x)).

    k and v are projections of x, convolved along time; q^A and q^L are separate projections. The linear mixer is
    Mamba-2 with B = k, C = q^L and x = v,

        S_t = exp(−Δ_t A) S_{t−1} + k_t (Δ_t v_t)ᵀ,   o_t = S_tᵀ q_t + D v_t,   Δ = softplus(W_Δ x + b), A = exp(A_log)

    or the gated delta rule with q and k of unit length,

        S_t = exp(−Δ_t A) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t / √K,   β = sigmoid(W_β x)

    The norm acts after the gate for Mamba-2, and before the gate for the delta rule. A token of either mode enters the
    KV cache, the inputs of the convolutions, and S. Calls without a mode are in attention mode.

    Args:
        hidden_size: D.
        linear_mixer: "mamba2" (ORYX-TM) or "gated_delta_net" (ORYX-TG).
        head_dim: K = V, of both mixers; even.
        num_heads: heads H of queries, keys and values; None for D / K.
        conv_size: width of the short convolution of keys and values, from 2 to 8; 0 for no convolution.
        output_gate: whether to multiply by silu(W_g x); if False, outputs are only normalised.
        shared_query: whether both mixers have the same query projection.
        grouped_norm: normalise each head separately instead of the whole width; None for the family's default.
        rope: mixers whose queries and keys are rotated, "both" or "attention"; None for the family's default.
        attention_l2_norm: which inputs of attention are L2-normalised: "none", "key" or "query_key".
        kv_activation: activation of keys and values after the convolution, "silu" or "none"; None for the family's
            default.
        attention_query_activation, linear_query_activation: activations of q^A and q^L; None for the family's default.
        attention_probability: fraction of tokens in attention mode, to count FLOPs; None for the configuration's value.
        norm_eps: epsilon of the norm.
        impl: implementation of the operations, None, "gluon", "triton" or "reference".

    Raises:
        ValueError: an unknown value of an option, or sizes that do not fit together.
    """

    inputs = ("mode",)
    splits_sequences = True

    # "eager" replaces both mixers: `impl` selects the kernels of both, so attention's cannot be replaced separately
    attention_impls: ClassVar[dict[str, str]] = {"eager": "reference"}

    def __init__(
        self,
        hidden_size: int,
        *,
        linear_mixer: LinearMixer = MAMBA2,
        head_dim: int = 128,
        num_heads: int | None = None,
        conv_size: int = 4,
        output_gate: bool = True,
        shared_query: bool = False,
        grouped_norm: bool | None = None,
        rope: Rotated | None = None,
        attention_l2_norm: Normalised = "none",
        kv_activation: Activation | None = None,
        attention_query_activation: Activation | None = None,
        linear_query_activation: Activation | None = None,
        attention_probability: float = 0.25,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        if linear_mixer not in FAMILIES:
            raise ValueError(f"linear_mixer must be one of {', '.join(map(repr, FAMILIES))}, got {linear_mixer!r}")
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim must be even and positive, for rotary positions, got {head_dim!r}")
        if num_heads is None:
            if hidden_size % head_dim:
                raise ValueError(
                    f"without num_heads, head_dim must divide hidden_size, got {head_dim} and {hidden_size}"
                )
            num_heads = hidden_size // head_dim
        if num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {num_heads!r}")
        if conv_size != 0 and not 2 <= conv_size <= 8:
            raise ValueError(f"conv_size must be 0 or lie from 2 to 8, got {conv_size!r}")
        family = FAMILIES[linear_mixer]
        grouped_norm = family["grouped_norm"] if grouped_norm is None else grouped_norm
        self.num_heads, self.head_dim, self.rotary_dim = num_heads, head_dim, head_dim
        self.is_mamba2 = linear_mixer == MAMBA2
        self.rope_both = (rope or family["rope"]) == "both"
        self.attention_l2_norm = attention_l2_norm
        self.kv_activation = kv_activation or family["kv_activation"]
        self.activations = {
            ATTENTION: attention_query_activation or family["attention_query_activation"],
            LINEAR: linear_query_activation or family["linear_query_activation"],
        }
        self.attention_probability = attention_probability
        self.impl: Impl | None = impl
        inner = num_heads * head_dim
        self.attention_q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.linear_q_proj = None if shared_query else nn.Linear(hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.g_proj = nn.Linear(hidden_size, inner, bias=False) if output_gate else None
        self.o_proj = nn.Linear(inner, hidden_size, bias=False)
        activation = "silu" if self.kv_activation == "silu" else None
        self.k_conv = ShortConv(inner, conv_size, activation=activation, impl=unless_gluon(impl)) if conv_size else None
        self.v_conv = ShortConv(inner, conv_size, activation=activation, impl=unless_gluon(impl)) if conv_size else None
        self.dt_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.beta_proj = None if self.is_mamba2 else nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(num_heads, dtype=torch.float32)) if self.is_mamba2 else None
        self.float32 = ("A_log", "dt_bias", "D") if self.is_mamba2 else ("A_log", "dt_bias")
        groups = num_heads if grouped_norm else 1
        self.norm = GatedRMSNorm(inner, norm_eps, gate="before" if self.is_mamba2 else "after", groups=groups)
        self.init_weights_()

    @classmethod
    def from_config(cls, config: Any, layer_idx: int, **options: Any) -> OryxMixer:
        if hasattr(config, "attention_probability"):
            options = {"attention_probability": config.attention_probability} | options
        return cls(config.hidden_size, norm_eps=config.norm_eps, **options)

    @classmethod
    def prepare_input(cls, name: str, value: Any, span: Span, cu_seqlens: Tensor | None) -> Modes:
        attention = (modes := resolve(value, span, cu_seqlens).split(current_shard())).attention
        grouped = attention is not None and attention.is_cuda and attention.numel() >= GROUPED_TOKENS
        return modes.ordered() if grouped else modes

    @classmethod
    def step_input(cls, name: str, value: Any, lengths: Callable[[], list[int]]) -> str | Tensor:
        return step_mode(value, lengths)

    @classmethod
    def request_input(cls, name: str, value: Any, prompt: int) -> RequestMode:
        return request_mode(ATTENTION if value is None else value, None, prompt)

    @classmethod
    def batch_input(cls, name: str, values: Sequence[Any], ranges: Sequence[tuple[int, int]]) -> str | Tensor:
        return batch_mode(values, ranges)

    def init_weights_(self) -> None:
        init_decay_(self.A_log)
        init_time_step_(self.dt_bias)
        if self.D is not None:
            nn.init.ones_(self.D)

    def make_state(self) -> LayerState:
        shape = (self.num_heads, self.head_dim, self.head_dim)
        parts: dict[str, Any] = {"kv": DroppableKV(*shape), "recurrent": TensorState(*shape, dtype=torch.float32)}
        if self.k_conv is not None and self.v_conv is not None:
            parts |= {"k_conv": self.k_conv.make_state(), "v_conv": self.v_conv.make_state()}
        return LayerState(**parts)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
        mode: Modes = ALL_ATTEND,
    ) -> MixerOutput:
        step = stepping(hidden_states, state)
        if state is None and mode.attention is not None and self._fuses(hidden_states):
            assert rotary is not None, "the model computes rotation angles in every call"
            mixed = self._mix(hidden_states, mode.attention, mode.order, rotary, cu_seqlens)
            return output_linear(mixed, self.o_proj), None
        # without a cache no final state is needed, so calls in attention mode skip the recurrence
        recurs = mode.uniform != ATTENTION or state is not None
        rates = (self.dt_proj, self.beta_proj) if recurs else (None, None)
        of_q = self._query_layer(mode.uniform) if mode.attention is None else None
        q, k, v, gate, *rates = projected(hidden_states, of_q, self.k_proj, self.v_proj, self.g_proj, *rates)
        q = self._query(hidden_states, q, mode)
        k, v = self._shared(k, v, state, cu_seqlens, step)
        rotated = (q, k)
        if self.rope_both or mode.may_attend or state is not None:
            assert rotary is not None, "the model computes rotation angles in every call"
            rotated = apply_rotary_to_both(q, k, rotary)
        o = self._attend(*rotated, v, mode, state, cu_seqlens, step)
        if recurs:
            linear = self._recur(rates, *(rotated if self.rope_both else (q, k)), v, state, cu_seqlens, step)
            if o is None:
                o = linear
            elif mode.attention is not None:
                # attention's outputs are 0 for tokens in linear mode, and its backward pass ignores their gradients
                o = o + linear.masked_fill(mode.attention[..., None, None], 0.0)
        assert o is not None, "every mode has at least one mixer"
        return output_linear(self.norm(o.flatten(-2), gate), self.o_proj), None

    def _fuses(self, x: Tensor) -> bool:
        """True if `mix` can compute this layer: kernels run, rows are not split over ranks, attention has no L2 norm,
        the layer has a gate and convolutions, and its convolutions and its norm are plain (`is_plain`; else, warn)."""
        parts = (self.k_conv, self.v_conv, self.g_proj)
        kernels = resolve_impl("OryxMixer", self.impl, x, GLUON) != "reference"
        if current_shard() is not None or not kernels or None in parts or self.attention_l2_norm != "none":
            return False
        if is_plain(ShortConv, self.k_conv, self.v_conv) and is_plain(GatedRMSNorm, self.norm):
            return True
        warn_slower("Oryx's operation for mixed modes", ("k_conv", "v_conv", "norm"))
        return False

    def _mix(
        self,
        x: Tensor,
        attends: Bool[Tensor, "B T"],
        order: TokenOrder | None,
        rotary: Rotation,
        cu_seqlens: Tensor | None,
    ) -> Float[Tensor, "B T E"]:
        """Return the input of the output projection, for a call without a cache whose tokens have different modes."""
        k_conv, v_conv, linear_q, attention_q = self.k_conv, self.v_conv, self.linear_q_proj, self.attention_q_proj
        assert k_conv is not None, "checked by _fuses"
        assert v_conv is not None, "checked by _fuses"
        if linear_q is None:
            rows, order = output_linear(x, attention_q), None
        elif order is not None and can_group(x, linear_q, attention_q):
            rows = project_in_order(x, linear_q.weight, attention_q.weight, order)
        else:
            rows, order = torch.where(attends[..., None], *projected(x, attention_q, linear_q)), None
        options = MixOptions(
            heads=self.num_heads,
            silu_shared=self.kv_activation == "silu",
            silu_attention_query=self.activations[ATTENTION] == "silu",
            silu_linear_query=self.activations[LINEAR] == "silu",
            rotate_linear=self.rope_both,
            gate_before=self.norm.gate == "before",
            groups=self.norm.groups,
            eps=self.norm.eps,
        )
        return mix(
            rows.reshape(-1, rows.shape[-1]), self._project_shared(x), A_log=self.A_log, dt_bias=self.dt_bias, D=self.D,
            k_weight=k_conv.weight, v_weight=v_conv.weight, norm_weight=self.norm.weight, attends=attends,
            rotation=rotary, options=options, row_ids=None if order is None else order.rows, cu_seqlens=cu_seqlens,
            impl=self.impl,
        )  # fmt: skip

    def _project_shared(self, x: Tensor) -> Float[Tensor, "B T C"]:
        """Return the projections that both modes use, concatenated; a single GEMM if all layers are plain (`is_plain`).

        A token's outputs are padded to a multiple of 64 elements (128 bytes in 16 bits); otherwise torch.compile would
        pad them by a copy.
        """
        layers = (self.k_proj, self.v_proj, self.g_proj, self.dt_proj, self.beta_proj)
        layers = [layer for layer in layers if layer is not None]
        if all(is_plain_linear(layer) for layer in layers):
            weight = torch.cat([layer.weight for layer in layers])
            return F.linear(x, F.pad(weight, (0, 0, 0, -len(weight) % 64)))
        y = torch.cat(projected(x, *layers), -1)
        return F.pad(y, (0, -y.shape[-1] % 64))

    def _rates(self, rates: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return g, Δ and β (None for Mamba-2) `[B, T, H]` from `rates` and `beta`, at least in float32."""
        dt = F.softplus(at_least_float32(rates) + self.dt_bias)
        return -self.A_log.exp() * dt, dt, None if beta is None else at_least_float32(beta).sigmoid()

    def _query_layer(self, name: str | None) -> nn.Linear:
        """Return the query projection of mode `name`; None stands for attention."""
        own = self.linear_q_proj if name == LINEAR else None
        return self.attention_q_proj if own is None else own

    def _query(self, x: Tensor, q: Tensor | None, mode: Modes) -> Float[Tensor, "B T H K"]:
        """Return each token's query from the projection for its mode; a grouped GEMM computes no other for a token.

        `q` has the projected queries if all tokens have the same mode, else it is None.
        """

        def activated(q: Tensor, name: str) -> Tensor:
            return F.silu(q) if self.activations[name] == "silu" else q

        heads = self.num_heads, self.head_dim
        if mode.attention is None:
            assert q is not None, "projected with the others"
            return activated(q, mode.uniform or ATTENTION).unflatten(-1, heads)
        attends = mode.attention[..., None]
        attention_q, linear_q = self._query_layer(ATTENTION), self._query_layer(LINEAR)
        if linear_q is attention_q:
            found = output_linear(x, attention_q)
        elif mode.order is not None and can_group(x, linear_q, attention_q):
            found = project_by_mode(x, linear_q.weight, attention_q.weight, mode.order)
        else:
            found = torch.where(attends, *projected(x, attention_q, linear_q))
        if self.activations[ATTENTION] == self.activations[LINEAR]:
            found = activated(found, LINEAR)
        else:
            found = torch.where(attends, activated(found, ATTENTION), activated(found, LINEAR))
        return found.unflatten(-1, heads)

    def _shared(
        self, k: Tensor, v: Tensor, state: LayerState | None, cu_seqlens: Tensor | None, step: bool
    ) -> tuple[Tensor, Tensor]:
        """Return keys, not rotated, and values, both `[B, T, H, K]`, from the projections k and v."""
        if self.k_conv is not None and self.v_conv is not None:
            past = (None, None) if state is None else (state.k_conv, state.v_conv)
            k, v = convolved((self.k_conv, self.v_conv), (k, v), past, cu_seqlens=cu_seqlens, step=step)
        elif self.kv_activation == "silu":
            k, v = F.silu(k), F.silu(v)
        heads = self.num_heads, self.head_dim
        return k.unflatten(-1, heads), v.unflatten(-1, heads)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mode: Modes, state: LayerState | None, cu_seqlens: Any, step: bool
    ) -> Float[Tensor, "B T H K"] | None:
        """Return attention's outputs, which are 0 for tokens in linear mode; None if no token is in attention mode."""
        if self.attention_l2_norm != "none":
            k = unit_length(k)
        if self.attention_l2_norm == "query_key":
            q = unit_length(q)
        if state is None:
            return attend(q, k, v, mode, cu_seqlens=cu_seqlens, impl=self.impl)
        return attend_cached(q, k, v, mode, state.kv, state.span, step=step, impl=self.impl)

    def _recur(
        self,
        rates: Sequence[Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LayerState | None,
        cu_seqlens: Tensor | None,
        step: bool,
    ) -> Float[Tensor, "B T H K"]:
        """Return the linear mixer's outputs for all tokens, and advance the state."""
        g, dt, beta = self._rates(*rates)
        chunked: Callable[..., ScanOutput] = chunk_ssd if beta is None else chunk_gated_delta_rule
        stepped: Callable[..., Tensor] = ssd_step if beta is None else gated_delta_rule_step
        options: dict[str, Any] = {"dt": dt, "D": self.D} if beta is None else {"qk_l2norm": True}
        inputs = (q, k, v, g) if beta is None else (q, k, v, g, beta)
        if state is not None and step:
            recurrent = state.recurrent.get(v.shape[0], v)
            options |= {"dt": dt.squeeze(1)} if beta is None else {}
            tokens = (t.squeeze(1) for t in inputs)
            return stepped(*tokens, recurrent, impl=unless_gluon(self.impl), **options).unsqueeze(1)
        before = None if state is None else state.recurrent.value
        # compute outputs of all tokens: a branch that skips chunks in attention mode would cost more than it saves
        o, after = chunked(*inputs, initial_state=before, cu_seqlens=cu_seqlens, impl=self.impl, **options)
        if state is not None:
            state.recurrent.set(after)
        return o

    def mixing_flops(self, seq_len: int) -> float:
        # every token updates the state (for the delta rule, it also reads Sᵀk), and computes Sᵀq or attention, by its
        # mode: 2 K² FLOPs per matmul with the state, 4 K per visible key; a convolution of width W adds 2 W per channel
        matmuls = (1 if self.is_mamba2 else 2) + (1 - self.attention_probability)
        head = 2.0 * self.head_dim**2 * matmuls
        head += self.attention_probability * 4.0 * self.head_dim * mean_visible(seq_len)
        convs = sum(2 * conv.weight.numel() for conv in (self.k_conv, self.v_conv) if conv is not None)
        return self.num_heads * head + convs


register_mixer("oryx", OryxMixer)
