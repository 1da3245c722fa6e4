"""transformers' Llama, Qwen2, Qwen3 and Qwen3-MoE models, with Native Hybrid Attention instead of their own.

The models are subclasses of transformers' classes. Their attention modules become `NhaMixer`s with the same weights and
additional gates; core's norms and SwiGLUs, which launch fewer kernels, replace their own. The backbone removes padding
before the layers and uses `HybridCache`. All other code is inherited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
)

from tokenmix_core.modeling import (
    CACHE,
    CheckedLoading,
    ChoosesAttention,
    GeneratesInSteps,
    HybridCache,
    HybridForCausalLM,
    begin_call,
    choose_attention,
    keeps_rows,
    read_padding_flag,
    rolls_back,
    stepping_forward,
    take_cache,
    takes_either_name,
)
from tokenmix_core.nn import IGNORE, Rotation, at_least_one
from tokenmix_nha.hybridized_layers import HybridizedAttention, HybridizedConfig, take_core_layers
from tokenmix_nha.model_windows import nha_mixers


class HybridizedModel(ChoosesAttention, CheckedLoading):
    """Base class to list before a backbone: replaces its attention, removes padding, and uses `HybridCache`."""

    layers: nn.ModuleList
    config: Any

    def __init__(self, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        for i, layer in enumerate(self.layers):
            layer.self_attn = HybridizedAttention(config, i, layer.self_attn)  # type: ignore[assignment]
        take_core_layers(self)
        choose_attention(nha_mixers(self), config._attn_implementation)  # type: ignore[arg-type]
        self.post_init()  # type: ignore[attr-defined]

    def make_cache(self, max_length: int = 0, *, offload: bool = False, record: int | None = None) -> HybridCache:
        """Return an empty cache; the arguments are those of `HybridCache`."""
        states = [mixer.make_state() for mixer in nha_mixers(self)]  # type: ignore[arg-type]
        return HybridCache(states, max_length=max_length, offload=offload, record=record)

    @takes_either_name
    @rolls_back
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the backbone with transformers' arguments; `cu_seqlens` is the same as for `HybridModel.forward`.

        Raises:
            ValueError: inputs do not fit together, or `output_attentions` is set although kernels store no weights.
        """
        if kwargs.get("output_attentions") or self.config.output_attentions:
            raise ValueError("output_attentions=True is not available: the kernels do not form attention weights")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        hidden: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # type: ignore[attr-defined]
        call = begin_call(
            self,
            hidden,
            kwargs,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            use_cache=use_cache,
        )
        span, cache = call.span, call.cache
        packed = span.pack(hidden)
        rows = span if keeps_rows(self, span) else None  # type: ignore[arg-type]
        # our layers take float32 cosines and sines for half of a head's channels; transformers repeats them for both
        # halves, in the model's dtype
        cos, sin = self.rotary_emb(packed, call.position_ids)  # type: ignore[operator]
        rotary = Rotation(*(x[..., : x.shape[-1] // 2].float() for x in (cos, sin)))
        out = super().forward(  # type: ignore[misc]
            inputs_embeds=packed if rows is None else hidden,
            # pass a placeholder mask, which the NHA layers ignore: transformers passes a 4D mask on unchanged
            attention_mask=packed.new_empty(1, 1, 1, 1),
            position_ids=call.position_ids,
            use_cache=cache is not None,
            **{CACHE: cache},
            cu_seqlens=call.cu_seqlens,
            rotary=rotary,
            **({} if rows is None else {"rows": rows}),
            **kwargs,
        )
        if cache is not None:
            cache.end()

        def unpack(x: Tensor) -> Tensor:
            # if hooks required padded rows, `pack` first drops the padding, which `unpack` then sets to zero
            return span.unpack(x if rows is None else span.pack(x))

        out.last_hidden_state = unpack(out.last_hidden_state)
        setattr(out, CACHE, cache)
        if getattr(out, "hidden_states", None) is not None:
            out.hidden_states = tuple(unpack(x) for x in out.hidden_states)
        if getattr(out, "router_logits", None) is not None and span.mask is not None:
            every = 0 if rows is None else span.batch * span.tokens
            out.router_logits = tuple(
                # experts with hooks ran on padded rows, so their router's logits are already laid out with padding
                x if len(x) == every else span.unpack(x.unflatten(0, span.layout)).flatten(0, 1)
                for x in out.router_logits
            )
        return out


class HybridizedForCausalLM(GeneratesInSteps, ChoosesAttention, CheckedLoading):
    """Base class to list before a language model: gives it a backbone with NHA, and generates with `HybridCache`."""

    model_class: ClassVar[type]
    model: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward = stepping_forward(cls.forward)

    def __init__(self, config: Any):
        requested = config._attn_implementation
        super().__init__(config)  # type: ignore[call-arg]
        # restore the requested implementation: the constructor of transformers' backbone has replaced it by a default
        config._attn_implementation = requested
        self.model = self.model_class(config)
        self.loss_function = functools.partial(_loss, self.loss_function)
        self.post_init()  # type: ignore[attr-defined]

    make_cache = HybridForCausalLM.make_cache

    def state_bytes(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of a cache for `batch_size` sequences of `seq_len` tokens.

        The number of bytes does not depend on the values of tokens.
        """
        dtype = self.dtype if dtype is None else dtype  # type: ignore[attr-defined]
        return sum(mixer.state_bytes(seq_len, batch_size, dtype) for mixer in nha_mixers(self))  # type: ignore[arg-type]

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # pyright: ignore[reportAttributeAccessIssue]
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        read_padding_flag(take_cache(kwargs))
        return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]

    _prepare_cache_for_generation = HybridForCausalLM._prepare_cache_for_generation


def _loss(
    transformers_loss: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor,
    *args: Any,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return transformers' loss, but zero instead of NaN if there is no token to predict."""
    if num_items_in_batch is None:
        num_items_in_batch = ((labels[..., 1:] if shift_labels is None else shift_labels) != IGNORE).sum()
    options |= {"num_items_in_batch": at_least_one(num_items_in_batch), "shift_labels": shift_labels}
    return transformers_loss(logits, labels, *args, **options)


def _family(
    kind: str, config_base: type, model_base: type, causal_lm_base: type
) -> tuple[type[PreTrainedConfig], type, type]:
    """Make and register configuration, backbone and language model of a family.

    `NhaLlamaConfig` is one of these classes.
    """

    def made(base: type, mixin: type, **attributes: Any) -> type:
        attributes |= {"__module__": __name__, "__doc__": f"{base.__name__} with Native Hybrid Attention."}
        name = f"Nha{base.__name__}"
        globals()[name] = type(name, (mixin, base), attributes)
        return globals()[name]

    config = made(config_base, HybridizedConfig, model_type=f"tokenmix_nha_{kind}")
    model = made(model_base, HybridizedModel, config_class=config)
    causal_lm = made(causal_lm_base, HybridizedForCausalLM, config_class=config, model_class=model)
    AutoConfig.register(config.model_type, config, exist_ok=True)  # type: ignore[attr-defined]
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    return config, model, causal_lm


# configuration, backbone and language model of each family, by the model type of the original transformer
FAMILIES: dict[str, tuple[type[PreTrainedConfig], type, type]] = {
    "llama": _family("llama", LlamaConfig, LlamaModel, LlamaForCausalLM),
    "qwen2": _family("qwen2", Qwen2Config, Qwen2Model, Qwen2ForCausalLM),
    "qwen3": _family("qwen3", Qwen3Config, Qwen3Model, Qwen3ForCausalLM),
    "qwen3_moe": _family("qwen3_moe", Qwen3MoeConfig, Qwen3MoeModel, Qwen3MoeForCausalLM),
}
