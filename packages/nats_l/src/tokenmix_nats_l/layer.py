"""The parts of a NAtS-L layer: projections, chunk types, both operations for whole sequences, and their merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.nn import (
    HeadFit,
    LayerState,
    Mixer,
    PagedKVState,
    RMSNorm,
    Rotation,
    ShortConv,
    Span,
    TensorState,
    apply_rotary,
    convolved,
    init_decay_,
    init_time_step_,
    is_plain,
    is_plain_linear,
    output_linear,
    projected,
    warn_slower,
)
from tokenmix_core.ops import Impl, chunk_gated_delta_rule, delta_gates, kept_attention, unless_gluon
from tokenmix_nats_l.chunks import (
    ChunkTypes,
    Tokens,
    check_types,
    chunk_indices,
    chunk_means,
    forced_types,
    learned_types,
    real_chunks,
)
from tokenmix_nats_l.ops import merge_operations
from tokenmix_nats_l.ops.merge.reference import merge_by_norms
from tokenmix_nats_l.share import ShareThreshold, check_share

Norms = Literal["each", "sum"]
Weights = Literal["queries", "inputs", "none"]
OwnChunk = Literal["both", "softmax", "linear"]


class NatsLLayer(Mixer):
    """The parameters of a NAtS-L layer, and the functions of them that prompts, decoding steps and ablations share.

    Args:
        hidden_size: D.
        num_heads: heads H of the delta rule.
        head_dim, expand_v: K, and V / K.
        num_softmax_heads: HA, a multiple of H; a head's keys have H · K / HA channels, its values H · V / HA.
        chunk: number of tokens in a chunk, a multiple of 64.
        rope: whether to rotate the softmax heads' q and k by position (as in pure NAtS-L, not in the hybrid).
        conv_size: width of the convolutions.
        types: "learned", or for analysis all "softmax", all "linear", "alternate" (starting with linear), or a pattern
            of l and s that repeats, such as "lls". Assigning to the attribute `types` forces types on a layer that has
            learned them.
        own_chunk: operations by which a token sees earlier tokens of its own chunk: "both", "softmax" or "linear"
            (Table 4, *SAttn Out* and *GDN Out*).
        decay: whether the state decays over softmax chunks; if False (*w/o LAttn Decay*), softmax chunks leave the
            state unchanged.
        norm: whether to normalise the outputs of "each" operation or only their "sum" (*w/o Attn Norm*).
        weights: the input of the operations' weights: "queries", the layer's "inputs" (*Weights From X*), or "none".
        softmax_share: fraction of softmax chunks that each head should have; a threshold adapts to it
            (`ShareThreshold`).
        budget: target of the mean *probability* of softmax in an auxiliary loss; None for no such loss. The fraction of
            softmax chunks may differ widely from this target. The paper has neither `softmax_share` nor `budget`.
        budget_weight: factor of the auxiliary loss.
        norm_eps: epsilon of all norms.
        impl: implementation of the operations, None, "triton" or "reference".

    Raises:
        ValueError: head counts that do not divide, sizes that are not integers, or an unknown option value.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 6,
        head_dim: int = 128,
        expand_v: float = 2.0,
        num_softmax_heads: int = 12,
        chunk: int = 64,
        rope: bool = False,
        conv_size: int = 4,
        types: str = "learned",
        own_chunk: OwnChunk = "both",
        decay: bool = True,
        norm: Norms = "each",
        weights: Weights = "queries",
        softmax_share: float | None = None,
        budget: float | None = None,
        budget_weight: float = 1.0,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        value_dim = round(head_dim * expand_v)
        if head_dim < 1 or value_dim < 1 or value_dim != head_dim * expand_v:
            raise ValueError(
                f"NatsL: head_dim and expand_v · head_dim must be whole and positive, got {head_dim} and {expand_v}"
            )
        if num_heads < 1 or num_softmax_heads < 1 or num_softmax_heads % num_heads:
            raise ValueError(
                f"NatsL: num_softmax_heads must be a multiple of num_heads, got {num_softmax_heads} and {num_heads}"
            )
        group = num_softmax_heads // num_heads
        if head_dim % group or value_dim % group or head_dim // group % 2:
            raise ValueError(
                f"NatsL: a head's {head_dim} and {value_dim} channels must divide into {group} softmax heads, those of "
                "keys of even size"
            )
        if chunk < 64 or chunk % 64:
            raise ValueError(f"NatsL: chunk must be a multiple of 64, got {chunk}")
        check_share(softmax_share, budget, budget_weight, types)
        named = {"own_chunk": own_chunk, "norm": norm, "weights": weights}
        for (name, value), choices in zip(named.items(), map(get_args, (OwnChunk, Norms, Weights)), strict=True):
            if value not in choices:
                raise ValueError(f"NatsL: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        self.num_heads, self.head_dim, self.value_dim = num_heads, head_dim, value_dim
        self.num_softmax_heads, self.group, self.chunk = num_softmax_heads, group, chunk
        self.softmax_dim, self.softmax_value_dim = head_dim // group, value_dim // group
        self.own_chunk, self.decay = own_chunk, decay
        self.norm, self.weights, self.budget, self.budget_weight = norm, weights, budget, budget_weight
        self.impl: Impl | None = impl
        self.rotary_dim = self.softmax_dim if rope else None
        self.fit = HeadFit(head_dim, value_dim, (64, 128, 256))
        keys, values = num_heads * head_dim, num_heads * value_dim
        self.q_proj, self.k_proj = (nn.Linear(hidden_size, keys, bias=False) for _ in range(2))
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.q_conv = ShortConv(keys, conv_size, impl=impl)
        self.k_conv = ShortConv(keys, conv_size, impl=impl)
        self.v_conv = ShortConv(values, conv_size, impl=impl)
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32))
        self.q_norm = RMSNorm(self.softmax_dim, norm_eps)
        self.k_norm = RMSNorm(self.softmax_dim, norm_eps)
        # outputs: first the linear scores of all heads, then their softmax scores
        self.score_proj = nn.Linear(hidden_size, 2 * num_heads, bias=False) if types == "learned" else None
        self.types = types
        self.threshold = None if softmax_share is None else ShareThreshold(hidden_size, num_heads, softmax_share)
        source = {"queries": keys, "inputs": hidden_size, "none": 0}[weights]
        self.weight_proj = nn.Linear(source, 2 * num_softmax_heads, bias=False) if source else None
        self.linear_norm = RMSNorm(self.softmax_value_dim, norm_eps)
        self.softmax_norm = RMSNorm(self.softmax_value_dim, norm_eps) if norm == "each" else None
        self.g_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.init_weights_()

    def init_weights_(self) -> None:
        init_decay_(self.A_log)
        init_time_step_(self.dt_bias)

    @property
    def types(self) -> str:
        """The option `types`; assigning a pattern forces types, and assigning "learned" restores the learned types."""
        return self._types

    @types.setter
    def types(self, types: str) -> None:
        check_types(types)
        if types == "learned" and self.score_proj is None:
            raise ValueError("NatsL: a layer built with forced types has no scores and cannot learn types")
        self._types = types

    def make_state(self) -> LayerState:
        """Return an empty state.

        The state has the last inputs of the convolutions, and the running state; of the open chunk, keys, values and
        the sum of inputs, the state at its start and the decay since then; and for each head, the keys and values of
        softmax chunks.
        """
        heads, state = self.num_softmax_heads, self.fit.state_shape(self.num_heads)
        sizes = self.softmax_dim, self.softmax_value_dim
        return LayerState(
            q_conv=self.q_conv.make_state(),
            k_conv=self.k_conv.make_state(),
            v_conv=self.v_conv.make_state(),
            recurrent=TensorState(*state, dtype=torch.float32),
            start=TensorState(*state, dtype=torch.float32),
            decay=TensorState(state[0], dtype=torch.float32),
            inputs=TensorState(self.q_proj.in_features, dtype=torch.float32),
            open_keys=TensorState(self.chunk, heads, sizes[0]),
            open_values=TensorState(self.chunk, heads, sizes[1]),
            kept=PagedKVState(heads, *sizes, page=self.chunk),
        )

    def step_form(self, span: Span) -> bool:
        """Return whether this decoding step ends a chunk of any sequence; a chunk gets its type at its last token."""
        return span.ends(self.chunk)

    def project(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None, rotary: Rotation | None, *, step: bool
    ) -> tuple[Tokens, Tensor]:
        """Return the inputs of both operations (gates, and q, k and v after convolution and SiLU), and the output gate.

        In a decoding step (`step`), q and k of the softmax heads are not yet normalised and rotated.
        """
        q, k, v, a, b, gate = projected(x, self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj)
        q, k, v = convolved(
            (self.q_conv, self.k_conv, self.v_conv),
            (q, k, v),
            (None, None, None) if state is None else (state.q_conv, state.k_conv, state.v_conv),
            cu_seqlens=cu_seqlens,
            step=step,
        )
        softmax_q, softmax_k = (y.unflatten(-1, (self.num_softmax_heads, -1)) for y in (q, k))
        if not step:
            softmax_q = self._rotated(softmax_q, self.q_norm, rotary)
            softmax_k = self._rotated(softmax_k, self.k_norm, rotary)
        return Tokens(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_heads, -1)),
            softmax_q,
            softmax_k,
            v.unflatten(-1, (self.num_softmax_heads, -1)),
            *delta_gates(a, b, self.A_log, self.dt_bias),
            q,
        ), gate

    def _rotated(self, heads: Tensor, norm: RMSNorm, rotary: Rotation | None) -> Tensor:
        """Normalise the vectors of softmax heads, and rotate them if the layer has rotary positions."""
        if self.rotary_dim is None:
            return norm(heads)
        assert rotary is not None
        return apply_rotary(heads, rotary, norm)

    def types_of(self, x: Tensor, cu_seqlens: Tensor | None, means: Tensor | None = None) -> ChunkTypes:
        """Return the types of the chunks of whole sequences.

        In training with gradients enabled, the threshold, if there is one, observes the scores of learned types.
        `means` are the chunks' mean inputs; with None, they are computed from x.
        """
        layout = (x.shape[0], x.shape[1], self.chunk, cu_seqlens, x.device)
        means = chunk_means(x, self.chunk, cu_seqlens) if means is None else means
        types = self.types_from(means, lambda: chunk_indices(*layout))
        # observe each batch once: with gradient checkpointing, only the recomputation has gradients enabled
        if self.threshold is not None and types.margin is not None and self.training and torch.is_grad_enabled():
            self.threshold.observe(types.margin, means, real_chunks(*layout))
        return types

    def types_from(
        self,
        means: Float[Tensor, "B slots D"],
        indices: Callable[[], Int[Tensor, "B slots"]],
        among: tuple[Int[Tensor, "B"], int] | None = None,
    ) -> ChunkTypes:
        """Return the types of chunks by their mean inputs, or forced types by their indices in their sequences.

        `among`, for adapters that expect all rows, is (indices of these rows in the whole batch, its number of rows).
        """
        if self.types != "learned":
            return forced_types(self.types, indices(), self.num_heads, means.dtype)
        assert self.score_proj is not None
        if self.threshold is not None:
            means = means - self.threshold.center
        # compute in float32 even under autocast: otherwise a chunk with nearly equal scores could get another type in
        # decoding than in a prompt
        with torch.autocast(means.device.type, enabled=False):
            if is_plain_linear(self.score_proj):
                return learned_types(F.linear(means, self.score_proj.weight.to(means.dtype)), self.threshold)
            # quantised layers and adapters compute in the dtype of their own floating-point weights
            floats = (p.dtype for p in self.score_proj.parameters() if p.is_floating_point())
            x = means.to(next(floats, means.dtype))
            if among is not None:
                x = x.new_zeros(among[1], *x.shape[1:]).index_copy(0, among[0], x)
            scores = output_linear(x, self.score_proj).to(means.dtype)
            return learned_types(scores if among is None else scores[among[0]], self.threshold)

    def delta_rule(
        self,
        tokens: Tokens,
        writes: Tensor | None,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        write_chunk: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply the gated delta rule with a write mask; return outputs of softmax heads `[B, T, HA, VA]` and states."""
        fit = self.fit
        o, final_state = chunk_gated_delta_rule(
            fit.keys(tokens.q),
            fit.keys(tokens.k),
            fit.values(tokens.v),
            fit.gates(tokens.g),
            fit.gates(tokens.beta),
            scale=self.head_dim**-0.5,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            qk_l2norm=True,
            writes=None if writes is None else fit.gates(writes),
            write_chunk=write_chunk or self.chunk,
            impl=self.impl,
        )
        return self.as_softmax_heads(fit.outputs(o, tokens.v.shape[2])), final_state

    def as_softmax_heads(self, o: Tensor) -> Tensor:
        """Split the outputs of the delta rule's heads `[..., H, V]` into softmax heads `[..., HA, VA]`."""
        return o.unflatten(-1, (self.group, -1)).flatten(-3, -2)

    def attend(self, tokens: Tokens, keep: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the outputs `[B, T, HA, VA]` of attention to each token's own chunk and to earlier softmax chunks."""
        heads = tokens.softmax_q, tokens.softmax_k, tokens.softmax_v
        return kept_attention(*heads, keep, unit=self.chunk, cu_seqlens=cu_seqlens, impl=self.impl).o

    def _merge(self, linear: Tensor, softmax: Tensor, x: Tensor, flat_q: Tensor, gate: Tensor) -> Tensor:
        """Return the gated, weighted sum of both operations' outputs, `[B, T, H · V]`."""
        logits = None
        if self.weight_proj is not None:
            logits = output_linear(flat_q if self.weights == "queries" else x, self.weight_proj).unflatten(-1, (2, -1))
        if not is_plain(RMSNorm, self.linear_norm, self.softmax_norm):
            warn_slower("NAtS-L's merge of both operations", ("linear_norm", "softmax_norm"))
            return merge_by_norms(linear, softmax, gate, self.linear_norm, self.softmax_norm, logits)
        return merge_operations(
            linear,
            softmax,
            gate,
            self.linear_norm.weight,
            None if self.softmax_norm is None else self.softmax_norm.weight,
            logits,
            eps=self.linear_norm.eps,
            impl=unless_gluon(self.impl),
        )

    def mixing_flops(self, seq_len: int) -> float:
        # count attention only inside a chunk, because the number of retained chunks depends on the data
        convs = 2 * sum(conv.weight.numel() for conv in (self.q_conv, self.k_conv, self.v_conv))
        own = 2.0 * self.num_softmax_heads * (self.softmax_dim + self.softmax_value_dim) * (self.chunk + 1) / 2
        return 6.0 * self.num_heads * self.head_dim * self.value_dim + own + convs

    def held_tokens(self, state: LayerState) -> Int[Tensor, "N HA"] | None:
        """Return the number of retained tokens of each row and head; None while no lists of them are allocated."""
        kept: Any = state.kept
        return kept.lengths if kept.tensors else None
