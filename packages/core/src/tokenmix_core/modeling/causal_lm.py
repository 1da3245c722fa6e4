"""The causal language model: the backbone, an output layer, the loss and generation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import can_return_tuple

from tokenmix_core.modeling.auxiliary import summed_losses
from tokenmix_core.modeling.backbone import HybridModel, HybridPreTrainedModel
from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.cache_name import CACHE, NAMES, CacheOutput, take_cache
from tokenmix_core.modeling.config import HybridConfig
from tokenmix_core.modeling.generation import GeneratesInSteps, stepping_forward
from tokenmix_core.modeling.lengths import is_given, round_up
from tokenmix_core.modeling.packing import check_cache, read_padding_flag
from tokenmix_core.nn.dtypes import at_least_float32
from tokenmix_core.nn.loss import IGNORE, at_least_one, linear_cross_entropy
from tokenmix_core.nn.plain import warn_slower
from tokenmix_core.nn.projections import is_plain_linear, is_sharded_linear, output_linear
from tokenmix_core.parallel import current_shard, total


@dataclass
class HybridCausalLMOutput(CacheOutput):
    """The output of the language model.

    Attributes:
        loss: cross-entropy plus auxiliary losses, each a sum over tokens divided by `num_items_in_batch` or, if this is
            None, by the call's number of predicted tokens.
        logits: `[B, T or logits_to_keep, vocab]`. None in training mode with labels, because the loss is then computed
            without logits, unless `output_logits=True`.
        cache, hidden_states, auxiliary: the same as in `HybridOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: HybridCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    auxiliary: dict[str, Tensor | tuple[Tensor, ...]] | None = None


class HybridForCausalLM(GeneratesInSteps, HybridPreTrainedModel, GenerationMixin):
    """The backbone with an output layer; the configuration selects the mixer of each layer.

    It is a transformers model: `from_pretrained`, `save_pretrained`, `generate`, gradient checkpointing, peft and the
    Trainer work. A model built from a `HybridConfig` has random weights; mixers are found by their registered names.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    # class of the backbone; subclasses may set another one
    model_class: ClassVar[type[HybridModel]] = HybridModel

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_cache(self, max_length: int = 0, *, offload: bool = False, record: int | None = None) -> HybridCache:
        """Return an empty cache; the arguments are those of `HybridCache`."""
        return self.model.make_cache(max_length, offload=offload, record=record)

    @property
    def input_takers(self) -> dict[str, type[Mixer]]:  # type: ignore[override]
        """Return for each extra input the mixer class that converts it."""
        return self.model.input_takers

    def step_output(self, logits: Tensor, cache: HybridCache) -> HybridCausalLMOutput:
        return HybridCausalLMOutput(logits=logits, cache=cache)

    @stepping_forward
    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_logits: bool | None = None,
        **mixer_inputs: Any,
    ) -> HybridCausalLMOutput:
        """Predict next tokens. The arguments are those of `HybridModel.forward`, and:

        Args:
            labels: `[B, T]`, the input ids or −100, not shifted by the caller. The first token of a packed sequence is
                not predicted, and padding neither predicts nor is predicted.
            logits_to_keep: number of last positions that get logits (0: all positions), or the indices of positions.
            num_items_in_batch: number of predicted tokens in the whole optimizer step, by which sums of losses are
                divided; by default the number in this call.
            output_attentions: must not be True, because the kernels do not store attention weights.
            output_logits: whether to return logits; by default True except in training mode with labels.

        Inside `parallel.sequence_shard` the inputs and labels are whole rows and the loss is that of whole rows, but
        the logits are those of this rank's tokens. Parameters get this rank's part of their gradients: the caller sums
        the gradients over the ranks.

        Raises:
            ValueError: inputs that do not fit together; the message names the given and the expected ones.
        """
        check_cache(cache)
        if labels is not None and cache is not None:
            raise ValueError("labels and a cache exclude each other: a loss is taken over whole sequences")
        if labels is not None and use_cache is None:
            use_cache = False
        shard, rows = current_shard(), cu_seqlens is None
        if labels is not None and input_ids is not None and self.training and torch.is_grad_enabled() and shard is None:
            seen = use_cache, output_hidden_states, self.config.output_hidden_states, output_logits, inputs_embeds
            if not is_given(attention_mask, position_ids, *seen, *mixer_inputs.values()):
                input_ids, labels, cu_seqlens = round_up(self, input_ids, labels, cu_seqlens)
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cu_seqlens,
            cache,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            output_attentions,
            losses_counted=labels is not None,
            appended=rows and cu_seqlens is not None,
            return_dict=True,
            **mixer_inputs,
        )
        hidden, logits, loss, cache = out.last_hidden_state, None, None, out.cache
        if cache is not None:
            # mark the cache as broken until the end: after an error below, a caller without logits would compute these
            # tokens again
            cache.broken = True
        if output_logits is None:
            output_logits = labels is None or not self.training
        whole = None
        if labels is not None:
            whole = None if self._fuses_loss(output_logits) else output_linear(hidden, self.lm_head)
            if shard is None:
                targets = _targets(hidden, labels, attention_mask, out.cu_seqlens)
            else:
                targets = shard.targets(labels)
                if num_items_in_batch is None:
                    num_items_in_batch = total(shard, (targets != IGNORE).sum())
            loss = self._loss(hidden, whole, targets, num_items_in_batch, out.auxiliary)
            if shard is not None:
                loss = total(shard, loss)
        if output_logits:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = output_linear(hidden[:, kept], self.lm_head) if whole is None else whole[:, kept]
        if cache is not None:
            cache.broken = False
        return HybridCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=cache,
            hidden_states=out.hidden_states,
            auxiliary=out.auxiliary,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the training FLOPs per token, three times the forward's, to compute the utilisation of hardware.

        They include all linear layers, the output layer too, and the mixing as the mixers count it (attention over
        visible keys, recurrences in their recurrent form), but not embeddings, norms and activations.
        """
        return 3.0 * (self.model.flops_per_token(seq_len) + 2.0 * self.lm_head.weight.numel())

    def _fuses_loss(self, output_logits: bool) -> bool:
        """True if the loss is computed by blocks of tokens from the output layer's weight, without all logits.

        A sharded output layer's weight can be read only if the call returns no logits (`output_logits`). Warns if only
        the output layer prevents a fused loss.
        """
        own_loss = self.loss_function is not ForCausalLMLoss
        sharded = is_sharded_linear(self.lm_head) and not output_logits
        fuses = (sharded or is_plain_linear(self.lm_head)) and not own_loss
        if not fuses and not own_loss:
            warn_slower("the loss forms all logits", ("lm_head",))
        return fuses

    def _loss(
        self,
        hidden: Float[Tensor, "B T D"],
        logits: Float[Tensor, "B T vocab"] | None,
        targets: Int[Tensor, "B T"],
        num_items: Tensor | int | None,
        auxiliary: dict[str, Tensor | tuple[Tensor, ...]] | None,
    ) -> Float[Tensor, ""]:
        """Return the loss, auxiliary losses included, from `logits` or, if None, from `hidden` and the output layer."""
        extra = summed_losses(auxiliary)
        count = (targets != IGNORE).sum() if num_items is None else num_items
        if logits is not None and self.loss_function is not ForCausalLMLoss:
            # transformers' loss functions themselves shift the labels and divide by the number of tokens
            labels = nn.functional.pad(targets[:, :-1], (1, 0), value=IGNORE)
            given = {} if num_items is None else {"num_items_in_batch": num_items}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **given)
            return loss + sum(extra) / at_least_one(count) if extra else loss
        if logits is None:
            total = self._fused_loss(hidden.flatten(0, 1), targets.flatten())
        else:
            total = nn.functional.cross_entropy(
                at_least_float32(logits.flatten(0, 1)), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
        return sum(extra, start=total) / at_least_one(count)

    def _fused_loss(self, hidden: Float[Tensor, "T D"], targets: Int[Tensor, "T"]) -> Float[Tensor, ""]:
        head: Any = self.lm_head

        def fused(hidden: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, head.weight, targets, impl=self.config.loss_impl)

        if not is_sharded_linear(head):
            return fused(hidden)
        # call the layer, because FSDP2 gathers the weight around this call
        head.forward = fused
        try:
            return head(hidden)
        finally:
            del head.forward

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        known = (*self.model.input_takers, *NAMES)
        others = {name: x for name, x in model_kwargs.items() if name not in known}
        super()._validate_model_kwargs(others)  # type: ignore[misc]

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # pyright: ignore[reportAttributeAccessIssue]
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        read_padding_flag(take_cache(kwargs))
        # drop an argument that transformers passes on from generate(stop_strings=..., tokenizer=...)
        kwargs.pop("tokenizer", None)
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(*args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args: Any, **kwargs: Any) -> None:
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic", "offloaded"):
            raise ValueError(
                f"cache_implementation must be None, 'dynamic' or 'offloaded', got {implementation!r}: "
                "recurrent states and windows have their own cache"
            )
        cache = model_kwargs.get(CACHE)
        if cache is not None:
            if not isinstance(cache, HybridCache):
                raise ValueError(f"{CACHE} must be a HybridCache, got {type(cache).__name__}")
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            max_length = generation_config.max_length or 0
            cache = model_kwargs[CACHE] = self.make_cache(max_length, offload=implementation == "offloaded")
            if getattr(generation_config, "is_assistant", False):
                # this model assists another one, which rejects some of its drafted tokens; `crop` then removes these
                cache.activate_past_recording()


def _targets(
    hidden: Float[Tensor, "B T D"], labels: Int[Tensor, "B T"], mask: Tensor | None, cu_seqlens: Tensor | None
) -> Int[Tensor, "B T"]:
    """Return the token that each token has to predict, −100 if there is none."""
    if labels.shape != hidden.shape[:2]:
        raise ValueError(f"labels must have shape {list(hidden.shape[:2])}, got {list(labels.shape)}")
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if cu_seqlens is not None:
        # the index is −1 if the first sequence is empty: the last token, which predicts nothing anyway
        targets[0].index_fill_(0, (cu_seqlens[1:].long() - 1) % targets.shape[1], IGNORE)
        padding = torch.arange(targets.shape[1], device=targets.device) >= cu_seqlens[-1]
        targets = targets.masked_fill(padding, IGNORE)
    if mask is not None:
        real = mask.bool()
        targets = targets.masked_fill(~(real & nn.functional.pad(real[:, 1:], (0, 1))), IGNORE)
    return targets
