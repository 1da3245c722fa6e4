"""The Oryx layer: keys, values, gate and output shared by attention and a linear recurrence, a query for each."""

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
    cached_attention,
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
    attention,
    attention_decode,
    chunk_gated_delta_rule,
    chunk_ssd,
    gated_delta_rule_step,
    resolve_impl,
    ssd_step,
    unless_gluon,
)
from tokenmix_oryx.modes import ATTENTION, LINEAR, Modes, of_step, resolve
from tokenmix_oryx.ops import MixOptions, mix, selected_attention
from tokenmix_oryx.options import FAMILIES, MAMBA2, Activation, LinearMixer, Normalised, Rotated
from tokenmix_oryx.projection import TokenOrder, can_group, project_by_mode, project_in_order
from tokenmix_oryx.state import DroppableKV

# of a call that names no mode
ALL_ATTEND = Modes(ATTENTION)
# so many tokens make up for putting them in order
GROUPED_TOKENS = 512


class OryxMixer(Mixer):
    """o_t = attention(q^A, k, v)_t or linear(q^L, k, v)_t by the token's mode; y = W_o norm(o, silu(W_g x)).

    k and v are projections of x, convolved along time, and q^A, q^L projections of their own. Linear is Mamba-2 with
    B = k, C = q^L and x = v,

        S_t = exp(−Δ_t A) S_{t−1} + k_t (Δ_t v_t)ᵀ,   o_t = S_tᵀ q_t + D v_t,   Δ = softplus(W_Δ x + b), A = exp(A_log)

    or the gated delta rule with q and k of unit length,

        S_t = exp(−Δ_t A) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t / √K,   β = sigmoid(W_β x)

    The norm acts after the gate for Mamba-2 and before it for the delta rule. Whatever the mode, every token enters the
    KV cache, the convolution's inputs and S. A call that names no mode attends.

    Args:
        hidden_size: D.
        linear_mixer: "mamba2" (ORYX-TM) or "gated_delta_net" (ORYX-TG).
        head_dim: K = V, of both mixers; even.
        num_heads: heads H of queries, keys and values; None for D / K.
        conv_size: width of the short convolution on keys and values, from 2 to 8; 0 for none.
        output_gate: multiply with silu(W_g x); without it outputs are only normalised.
        shared_query: one query projection for both mixers.
        grouped_norm: normalise each head on its own rather than the whole width; None for the family's choice.
        rope: rotate the queries and keys of "both" mixers or of "attention" only; None for the family's choice.
        attention_l2_norm: unit length for "none" of attention's inputs, its "key", or "query_key".
        kv_activation: of keys and values after the convolution, "silu" or "none"; None for the family's choice.
        attention_query_activation, linear_query_activation: of the queries; None for the family's choice.
        attention_probability: share of tokens in attention mode that floating-point operations are counted for; in an
            Oryx model by default its own.
        norm_eps: of the norm.
        impl: implementation of the operations, None, "gluon", "triton" or "reference".

    Raises:
        ValueError: an unknown choice, or sizes that do not fit.
    """

    inputs = ("mode",)

    # its kernels do both its kinds of mixing: only all of them can be replaced
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
        """The modes of a call's tokens, of a mode in any form that `resolve` takes."""
        modes = resolve(value, span, cu_seqlens)
        attention = modes.attention
        grouped = attention is not None and attention.is_cuda and attention.numel() >= GROUPED_TOKENS
        return modes.ordered() if grouped else modes

    @classmethod
    def step_input(cls, name: str, value: Any, lengths: Callable[[], list[int]]) -> str | Tensor:
        """The modes of the tokens of a decoding step."""
        return of_step(value, lengths)

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
            assert rotary is not None, "the model turns every call's positions"
            mixed = self._mix(hidden_states, mode.attention, mode.order, rotary, cu_seqlens)
            return output_linear(mixed, self.o_proj), None
        # without a cache nobody will read the state that attention leaves behind
        recurs = mode.uniform != ATTENTION or state is not None
        rates = (self.dt_proj, self.beta_proj) if recurs else (None, None)
        of_q = self._query_layer(_name_of(mode)) if mode.attention is None else None
        q, k, v, gate, *rates = projected(hidden_states, of_q, self.k_proj, self.v_proj, self.g_proj, *rates)
        q = self._query(hidden_states, q, mode)
        k, v = self._shared(k, v, state, cu_seqlens, step)
        rotated = (q, k)
        if self.rope_both or mode.may_attend or state is not None:
            assert rotary is not None, "the model turns every call's positions"
            rotated = apply_rotary_to_both(q, k, rotary)
        o = self._attend(*rotated, v, mode, state, cu_seqlens, step)
        if recurs:
            linear = self._recur(rates, *(rotated if self.rope_both else (q, k)), v, state, cu_seqlens, step)
            if o is None:
                o = linear
            elif mode.attention is not None:
                # attention is 0 where it does not answer, and looks at no gradient there
                o = o + linear.masked_fill(mode.attention[..., None, None], 0.0)
        assert o is not None, "a mode has one mixer at least"
        return output_linear(self.norm(o.flatten(-2), gate), self.o_proj), None

    def _fuses(self, x: Tensor) -> bool:
        """Tell whether what lies between the projections is one operation: kernels, and none of some ablations."""
        parts = (self.k_conv, self.v_conv, self.g_proj)
        kernels = resolve_impl("OryxMixer", self.impl, x, GLUON) != "reference"
        if not kernels or None in parts or self.attention_l2_norm != "none":
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
        """The input of the output projection in a call of mixed modes without a cache."""
        k_conv, v_conv, linear_q, attention_q = self.k_conv, self.v_conv, self.linear_q_proj, self.attention_q_proj
        assert k_conv is not None, "asked for beforehand"
        assert v_conv is not None, "asked for beforehand"
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
            turn_linear=self.rope_both,
            gate_before=self.norm.gate == "before",
            groups=self.norm.groups,
            eps=self.norm.eps,
        )
        return mix(
            rows.reshape(-1, rows.shape[-1]), self._project_shared(x), A_log=self.A_log, dt_bias=self.dt_bias, D=self.D,
            k_weight=k_conv.weight, v_weight=v_conv.weight, norm_weight=self.norm.weight, attends=attends,
            rotation=rotary, options=options, places=None if order is None else order.places, cu_seqlens=cu_seqlens,
            impl=self.impl,
        )  # fmt: skip

    def _project_shared(self, x: Tensor) -> Float[Tensor, "B T C"]:
        """Project what both modes project alike, side by side: one product where layers are plain.

        Rows are padded to whole lines of 128 bytes, as torch.compile would else do behind a copy.
        """
        layers = (self.k_proj, self.v_proj, self.g_proj, self.dt_proj, self.beta_proj)
        layers = [layer for layer in layers if layer is not None]
        if all(is_plain_linear(layer) for layer in layers):
            weight = torch.cat([layer.weight for layer in layers])
            return F.linear(x, F.pad(weight, (0, 0, 0, -len(weight) % 64)))
        y = torch.cat(projected(x, *layers), -1)
        return F.pad(y, (0, -y.shape[-1] % 64))

    def _rates(self, rates: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """g, Δ and β (None without a delta rule), float32 `[B, T, H]`, of their projections."""
        dt = F.softplus(at_least_float32(rates) + self.dt_bias)
        return -self.A_log.exp() * dt, dt, None if beta is None else at_least_float32(beta).sigmoid()

    def _query_layer(self, name: str) -> nn.Linear:
        """The projection of queries in a mode."""
        own = self.linear_q_proj if name == LINEAR else None
        return self.attention_q_proj if own is None else own

    def _query(self, x: Tensor, q: Tensor | None, mode: Modes) -> Float[Tensor, "B T H K"]:
        """Each token's query for the mixer of its mode: the other mixer's output of that token is never used.

        Where all tokens are in one mode, q is their projection.
        """

        def activated(q: Tensor, name: str) -> Tensor:
            return F.silu(q) if self.activations[name] == "silu" else q

        heads = self.num_heads, self.head_dim
        if mode.attention is None:
            assert q is not None, "projected with the others"
            return activated(q, _name_of(mode)).unflatten(-1, heads)
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
        """Keys, before rotation, and values, `[B, T, H, K]`, of their projections."""
        if self.k_conv is not None and self.v_conv is not None:
            past = (None, None) if state is None else (state.k_conv, state.v_conv)
            k, v = convolved((self.k_conv, self.v_conv), (k, v), past, cu_seqlens=cu_seqlens, step=step)
        elif self.kv_activation == "silu":
            k, v = F.silu(k), F.silu(v)
        heads = self.num_heads, self.head_dim
        return k.unflatten(-1, heads), v.unflatten(-1, heads)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mode: Modes,
        state: LayerState | None,
        cu_seqlens: Tensor | None,
        step: bool,
    ) -> Float[Tensor, "B T H K"] | None:
        """Attention's outputs, 0 for tokens in linear mode; None when no token is in attention mode."""
        if self.attention_l2_norm != "none":
            k = _unit(k)
        if self.attention_l2_norm == "query_key":
            q = _unit(q)
        if state is not None:
            return self._attend_cached(q, k, v, mode, state, step)
        if not mode.may_attend:
            return None
        if mode.attention is None:
            return attention(q, k, v, cu_seqlens=cu_seqlens, impl=self.impl).o
        return selected_attention(q, k, v, mode.attention, cu_seqlens=cu_seqlens, impl=self.impl)

    def _attend_cached(
        self, q: Tensor, k: Tensor, v: Tensor, mode: Modes, state: LayerState, step: bool
    ) -> Float[Tensor, "B T H K"] | None:
        """As `_attend`, over what the state holds and the call's own tokens, which are stored in any mode."""
        kv, span = state.kv, state.span
        if not mode.may_attend:
            kv.write(k, v, span)
            return None
        if mode.attention is None:
            return cached_attention(q, k, v, kv, span, step=step, impl=self.impl)
        if not (step or span.past == 0 or span.uniform):
            o = cached_attention(q, k, v, kv, span, step=False, impl=self.impl)
            return o.masked_fill(~mode.attention[..., None, None], 0.0)
        if span.past and k.requires_grad:
            keys, values = (torch.cat(pair, 1) for pair in zip(kv.read(span), (k, v), strict=True))
            kv.write(k, v, span)
            return selected_attention(q, keys, values, mode.attention, impl=self.impl)
        kv.write(k, v, span)
        if step:
            places = min(span.past + 1, kv.num_slots)
            # a sequence in linear mode reads no keys
            seen = kv.filled(span) * mode.attention.squeeze(1)
            return attention_decode(q, kv.keys[:, :places], kv.values[:, :places], seen, impl=unless_gluon(self.impl)).o
        if span.past:
            places = span.past + span.tokens
            k, v = kv.keys[:, :places], kv.values[:, :places]
        return selected_attention(q, k, v, mode.attention, cu_seqlens=span.cu_seqlens, impl=self.impl)

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
        """The linear mixer's outputs of all tokens, whose state advances over all of them."""
        g, dt, beta = self._rates(*rates)
        options: dict[str, Any] = {"impl": self.impl}
        chunked: Callable[..., ScanOutput] = chunk_ssd
        stepped: Callable[..., Tensor] = ssd_step
        inputs: tuple[Tensor, ...] = (q, k, v, g)
        if beta is None:
            options |= {"dt": dt, "D": self.D}
        else:
            chunked, stepped, options["qk_l2norm"] = chunk_gated_delta_rule, gated_delta_rule_step, True
            inputs = (q, k, v, g, beta)
        if state is not None and step:
            recurrent = state.recurrent.get(v.shape[0], v)
            if beta is None:
                options["dt"] = dt.squeeze(1)
            options["impl"] = unless_gluon(self.impl)
            o = stepped(*(t.squeeze(1) for t in inputs), recurrent, **options).unsqueeze(1)
        else:
            before = None if state is None else state.recurrent.value
            # all outputs are computed: a branch that skips some costs the kernels more than it saves them
            o, after = chunked(*inputs, initial_state=before, cu_seqlens=cu_seqlens, **options)
            if state is not None:
                state.recurrent.set(after)
        return o

    def mixing_flops(self, seq_len: int) -> float:
        # as trained: the state for every token (the delta rule also reads it with k), then the read-out or the visible
        # keys; 2 K² operations a product with the state, 4 K a key; the convolutions: 2 W a channel
        products = (1 if self.is_mamba2 else 2) + (1 - self.attention_probability)
        head = 2.0 * self.head_dim**2 * products
        head += self.attention_probability * 4.0 * self.head_dim * mean_visible(seq_len)
        convs = sum(2 * conv.weight.numel() for conv in (self.k_conv, self.v_conv) if conv is not None)
        return self.num_heads * head + convs


def _name_of(mode: Modes) -> str:
    """The mode of all tokens of a call."""
    return LINEAR if mode.uniform == LINEAR else ATTENTION


def _unit(x: Float[Tensor, "B T H K"]) -> Tensor:
    return F.normalize(at_least_float32(x), dim=-1, eps=1e-6).to(x.dtype)


register_mixer("oryx", OryxMixer)
