"""Learned token eviction: softmax attention to a window, and to earlier keys that each head has learned to retain."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.nn import (
    HeadWeights,
    LayerState,
    Mixer,
    MixerOutput,
    RaggedKVState,
    RMSNorm,
    Rotation,
    Span,
    TensorState,
    apply_rotary_to_both,
    attention_heads,
    mean_visible,
    output_linear,
    projected,
    stepping,
)
from tokenmix_core.ops import Impl, kept_attention, unless_gluon
from tokenmix_core.parallel import HeadExchange, current_shard
from tokenmix_lte.decoding import extend, step
from tokenmix_lte.eviction import eviction_times
from tokenmix_lte.retention import Retention, Tokens
from tokenmix_lte.scorers import Scorers, make_scorer

Estimator = Literal["values", "inside"]
# initial value of λ, the factor of each head's sparsity loss
FIRST_WEIGHT = 1e-9
# number of decoded tokens between two runs of the scorer
_SCORE_EVERY = 64


class Positions(NamedTuple):
    """For each token, its position in its sequence and the number of tokens after it in the sequence, both `[T]`."""

    position: Tensor
    after: Tensor


class Lte(Mixer):
    """o = W_o softmax(scale · q kᵀ) v over the window, the sinks, and earlier keys whose retention logit is above 0.

    A scorer reads keys (before rotation) and values around each token, and returns a logit for each key head. In
    training, every key with a positive logit is retained. Logits are trained by the straight-through gradient ⟨v,
    ∂L/∂v⟩ (eq. 6), and by a sparsity loss λ · ReLU(sigmoid(logit) − ½), in which a callback adapts λ of each head to
    the retained fraction (`tokenmix_lte.training`). In evaluation, with or without a cache, a head retains at most
    `cap` keys before the window: when a better key leaves the window, the worst retained key is evicted for good.

    Args:
        hidden_size: D.
        num_heads: query heads HQ.
        num_kv_heads: key heads H, a divisor of HQ; None for HQ.
        head_dim: K, a multiple of 4; None for D / HQ.
        window: number W of tokens that a token sees: itself and the W − 1 tokens before it.
        cap: number of keys before the window, sinks included, that a head retains in evaluation.
        sinks: number of first tokens of a sequence that stay visible.
        scorer: "cnn"; "causal", which reads only the token and earlier ones; "mlp", which reads only the token; "none",
            which retains only the sinks; "uniform", which retains every n-th token and, once `cap` keys are retained,
            doubles n token by token (Unif.+SWA). With the last two, the layer has only the weights of core's attention.
        estimator: gradient of the logits: "values" as in the paper, or "inside", through a factor of the exponentials
            of retained keys.
        dropout: dropout of the scorer's layers in training.
        train_capped: whether `cap` also applies in training, so that training and generation see the same keys. Meant
            for losses that compare both or subtract a reference (DPO, GRPO), with a trained scorer; pretraining has no
            cap.
        qk_norm: whether every head of q and k is RMS-normalised, before the scorer reads k and before both are rotated
            (as in Qwen3).
        qkv_bias: whether the q, k and v projections have biases (as in Qwen2).
        norm_eps: epsilon of the q/k norms.
        impl: implementation of attention and of the scorer, None, "triton" or "reference".

    Raises:
        ValueError: sizes that do not divide, a window narrower than the number of tokens that the scorer reads, or an
            unknown scorer or estimator.
    """

    attention_impls: ClassVar[dict[str, str]] = {"eager": "reference"}
    splits_sequences = True
    # appended tokens must lie after `cu_seqlens`, since the scorer reads later tokens and the sparsity loss covers all
    # tokens
    takes_more_tokens = bounds_more_tokens = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 16,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int = 768,
        cap: int = 512,
        sinks: int = 4,
        scorer: Scorers = "cnn",
        estimator: Estimator = "values",
        dropout: float = 0.1,
        train_capped: bool = False,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        norm_eps: float = 1e-6,
        impl: Impl | None = None,
    ):
        super().__init__()
        num_kv_heads, head_dim = attention_heads("Lte", hidden_size, num_heads, num_kv_heads, head_dim)
        if head_dim < 4 or head_dim % 4:
            raise ValueError(f"Lte: head_dim must be a multiple of 4, got {head_dim}")
        if not 0 <= sinks <= cap or cap < 1:
            raise ValueError(f"Lte: sinks must be from 0 to cap, which is at least 1, got {sinks} and {cap}")
        if not 0 <= dropout < 1:
            raise ValueError(f"Lte: dropout must be from 0 to below 1, got {dropout}")
        for name, value, choices in (
            ("scorer", scorer, get_args(Scorers)),
            ("estimator", estimator, get_args(Estimator)),
        ):
            if value not in choices:
                raise ValueError(f"Lte: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.window, self.sinks, self.estimator, self.train_capped = window, sinks, estimator, train_capped
        self.impl: Impl | None = impl
        self.rotary_dim = head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, norm_eps) if qk_norm else None
        self.scorer = make_scorer(scorer, num_kv_heads, 2 * head_dim, dropout, unless_gluon(impl))
        # a layer without a scorer retains only the sinks
        self.cap = max(1, sinks) if scorer == "none" else cap
        self.uniform = scorer == "uniform"
        self.set_limits(window=window)
        self.sparsity = None if self.scorer is None else HeadWeights(num_kv_heads, initial=FIRST_WEIGHT)
        # number of LTE layers in the model, by which its sparsity loss is divided
        self.num_lte_layers = 1

    def set_limits(self, *, cap: int | None = None, window: int | None = None) -> None:
        """Set the cap or the window for later calls, which need new states; None leaves a limit unchanged.

        A layer that retains only its sinks ignores `cap`.

        Raises:
            ValueError: a cap below 1 or the number of sinks, or a window narrower than the tokens that the scorer
                reads.
        """
        if cap is not None and (cap < 1 or cap < self.sinks):
            raise ValueError(f"Lte: cap must be at least 1 and the {self.sinks} sinks, got {cap}")
        window = self.window if window is None else window
        reads = 1 if self.scorer is None else self.scorer.behind + self.scorer.ahead + 1
        if window < reads:
            raise ValueError(f"Lte: window must be at least {reads}, the tokens that the scorer reads, got {window}")
        # the cap of a layer that retains only its sinks is always their number
        if cap is not None and (self.scorer is not None or self.uniform):
            self.cap = cap
        self.window, self.score_every = window, min(_SCORE_EVERY, window - reads + 1)

    @classmethod
    def from_config(cls, config: Any, layer_idx: int, **options: Any) -> Lte:
        """Build the mixer of layer `layer_idx`, and tell it the model's number of LTE layers."""
        layer = cls(config.hidden_size, norm_eps=config.norm_eps, **options)
        kind = config.mixer_type(layer_idx)
        layer.num_lte_layers = sum(config.mixer_type(i) == kind for i in range(config.num_hidden_layers))
        return layer

    def make_state(self) -> LayerState:
        """Return an empty state.

        The state's parts are: `kv`, each head's keys and values, first those in the window's ring buffer and then
        retained ones; `scores`, the logits of these keys; `ages`, the positions of retained keys; `raw`, the newest
        keys before rotation, which the scorer reads.
        """
        slots = (self.num_kv_heads, self.window + self.cap)
        return LayerState(
            kv=RaggedKVState(self.num_kv_heads, self.head_dim, self.head_dim, slots[1]),
            scores=TensorState(*slots, dtype=torch.float32),
            ages=TensorState(self.num_kv_heads, self.cap, dtype=torch.int32),
            raw=TensorState(self.retention.reach, self.num_kv_heads, self.head_dim),
        )

    def step_form(self, span: Span) -> bool:
        """Return True if the scorer runs in this decoding step, on the newest tokens."""
        return self.retention.scores_at(span)

    @property
    def retention(self) -> Retention:
        """The scorer, sizes and options by which the layer's heads retain keys."""
        sizes = self.window, self.cap, self.sinks, self.score_every
        return Retention(self.scorer, *sizes, uniform=self.uniform, impl=self.impl)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        *,
        state: LayerState | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        rotary: Rotation | None = None,
    ) -> MixerOutput:
        assert rotary is not None
        x, auxiliary = hidden_states, None
        q, raw, v = (y.unflatten(-1, (-1, self.head_dim)) for y in projected(x, self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, raw = self.q_norm(q), self.k_norm(raw)
        tokens = Tokens(*apply_rotary_to_both(q, raw, rotary), raw, v)
        if state is None:
            o, auxiliary = self._whole(tokens, cu_seqlens)
        else:
            o = (step if stepping(x, state) else extend)(self.retention, tokens, state)
        return output_linear(o.flatten(-2), self.o_proj), auxiliary

    def _whole(self, tokens: Tokens, cu_seqlens: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the outputs `[B, T, HQ, K]` for whole sequences, and the layer's auxiliary losses and statistics.

        If rows are split over ranks, each rank computes whole rows of some heads, because keys are retained per head.
        """
        shard = current_shard()
        if shard is None:
            return self._whole_heads(tokens, cu_seqlens, None)
        heads = HeadExchange(shard, self.num_kv_heads, "lte")
        whole, cu_seqlens = Tokens(*heads.to_heads(*tokens)), shard.row_cu_seqlens(tokens.v.device)
        o, found = self._whole_heads(whole, cu_seqlens, heads)
        return heads.to_tokens(o), found

    def _whole_heads(
        self, tokens: Tokens, cu_seqlens: Tensor | None, heads: HeadExchange | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs of all heads, or of this rank's `heads`, for whole sequences, and statistics.

        The statistics are of all heads; only the sparsity loss is that of the heads of the outputs.
        """
        q, k, raw, v = tokens
        positions = _positions(v, cu_seqlens)
        rule = self.retention
        logits = rule.logits(raw, v, cu_seqlens=cu_seqlens, heads=heads)
        ranks = rule.ranks(logits, positions.position)
        keep = ranks > -torch.inf
        until = None
        if not self.training or self.train_capped:
            until = eviction_times(ranks, self.cap, self.window, cu_seqlens, impl=unless_gluon(self.impl))
        share = logits.sigmoid()
        factor: Tensor = keep
        if self.scorer is not None and torch.is_grad_enabled():
            # equal to `keep`, whose gradient goes to `share`
            factor = keep + (share - share.detach())
        o = kept_attention(
            q, k, v, factor, window=self.window, until=until, cu_seqlens=cu_seqlens,
            keep_gradient="exponentials" if self.estimator == "inside" else "values", impl=self.impl,
        ).o  # fmt: skip
        found = self._observe(logits, share, positions, heads) if self.training else {}
        if until is not None:
            shares = self._shares(keep, until, positions)
            found |= shares if heads is None else {name: heads.gather(x) for name, x in shares.items()}
        return o, found

    def _observe(
        self, logits: Tensor, share: Tensor, positions: Positions, heads: HeadExchange | None
    ) -> dict[str, Tensor]:
        """Return the sparsity loss, a sum over tokens, and each head's retained fraction, which a callback also reads.

        The loss is that of this rank's heads. The last tokens are left out, because their logits are not final.
        """
        ahead = self.retention.context[1]
        counted = (positions.after >= ahead).unsqueeze(-1)
        kept = ((logits.detach() > 0) & counted).sum(1, dtype=share.dtype) / counted.sum().clamp(min=1)
        kept = kept if heads is None else heads.gather(kept)
        found = {"kept_share": kept.mean(0)}
        if self.sparsity is not None:
            self.sparsity.observe(kept)
            excess = F.relu(share - 0.5) * counted
            weight = self.sparsity.weight if heads is None else heads.own(self.sparsity.weight)
            cost = (excess.sum((0, 1)) * weight.to(share.dtype)).sum()
            found["sparsity_loss"] = cost / (self.num_kv_heads * self.num_lte_layers)
        return found

    def _shares(
        self, keep: Bool[Tensor, "B T H"], until: Tensor, positions: Positions
    ) -> dict[str, Float[Tensor, "H"]]:
        """Return two fractions per head of the tokens that precede the last `window` tokens of their sequences.

        `scored_share` counts the sinks and the tokens that the scorer retains; `held_share` counts only those of them
        that the cap has not evicted.
        """
        beyond = (positions.after >= self.window).unsqueeze(-1)
        last = (positions.position + positions.after).unsqueeze(-1)
        of, scored = (len(keep) * beyond.sum()).clamp(min=1), keep & beyond
        held = scored & (until > last)
        return {"held_share": held.sum((0, 1)) / of, "scored_share": scored.sum((0, 1)) / of}

    def mixing_flops(self, seq_len: int) -> float:
        # count the scorer, and attention as if heads always retained `cap` keys
        visible = mean_visible(seq_len, self.window + self.cap)
        scoring = 0.0 if self.scorer is None else self.scorer.flops
        return 4.0 * self.num_heads * self.head_dim * visible + scoring


def _positions(x: Tensor, cu_seqlens: Tensor | None) -> Positions:
    T = x.shape[1]
    if cu_seqlens is None:
        position = torch.arange(T, device=x.device)
        return Positions(position, T - 1 - position)
    # padding behind the sequences is treated as one more sequence, which ends where it begins
    index, ends = sequence_ids(cu_seqlens, T), torch.cat((cu_seqlens[1:], cu_seqlens[-1:]))
    tokens = torch.arange(T, device=x.device, dtype=cu_seqlens.dtype)
    return Positions(tokens - cu_seqlens[index], ends[index] - 1 - tokens)
