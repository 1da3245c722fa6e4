"""The Oryx language model: modes by position in every call, and plans of modes for generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from tokenmix_core.modeling import CACHE, HybridCache, HybridForCausalLM, HybridModel, Span, register_model
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.generation import GenerationMode, ModePlan, PromptMode, check_generation
from tokenmix_oryx.modes import ATTENTION, LINEAR, ModeInput, Modes, check_mode, said
from tokenmix_oryx.state import OryxCache


class OryxModel(HybridModel):
    """The backbone; `mode` says which mixer answers where.

    `mode` is "linear" or "attention" for all tokens; a list of (start, mode), whose starts count the tokens of each
    sequence from 0 without padding, a cache's included, or are shares of its length; or a bool tensor `[B, T]`, True
    for attention, one value for each token of the call. Without it `default_mode` holds.

    Attributes:
        default_mode: the mode of calls that name none; the configuration's `mode` at first.
    """

    config: OryxConfig
    config_class = OryxConfig

    def __init__(self, config: OryxConfig):
        super().__init__(config)
        self.default_mode: ModeInput | PromptMode = config.mode
        # whether caches are made with the promise of linear mode
        self.promises_linear = False

    def make_cache(self, max_length: int = 0, *, offload: bool = False) -> OryxCache:
        cache = OryxCache((mixer.make_state() for mixer in self.mixers), max_length=max_length, offload=offload)
        if self.promises_linear:
            cache.promise_linear()
        return cache

    def prepare_mixer_inputs(
        self, inputs: dict[str, Any], span: Span, cu_seqlens: Tensor | None, cache: HybridCache | None
    ) -> dict[str, Any]:
        if inputs.get("mode") is None:
            # of a default that is a function of a prompt's tokens, `resolve` says what a call takes instead
            inputs = {**inputs, "mode": self.default_mode}
        prepared = super().prepare_mixer_inputs(inputs, span, cu_seqlens, cache)
        if "mode" in prepared and isinstance(cache, OryxCache) and cache.linear_only:
            prepared["mode"] = _kept_promise(prepared["mode"])
        return prepared


def _kept_promise(modes: Modes) -> Modes:
    if modes.uniform == ATTENTION or (modes.attention is not None and bool(modes.attention.any())):
        raise ValueError(
            "attention was asked for after a promise of linear mode to the end: the cache keeps no keys and values; "
            "begin with a new cache, or do not promise"
        )
    return Modes(LINEAR)


class OryxForCausalLM(HybridForCausalLM):
    """The language model; `forward` takes `mode` as `OryxModel` does, `generate` a mode for the prompt and the rest."""

    config: OryxConfig
    model: OryxModel
    config_class = OryxConfig
    model_class: ClassVar[type[HybridModel]] = OryxModel

    def __init__(self, config: OryxConfig):
        super().__init__(config)
        self.default_generation_mode: GenerationMode | None = None
        self.default_keep_kv = True

    @contextmanager
    def modes(
        self, prefill: ModeInput | PromptMode, generation: GenerationMode | None = None, *, keep_kv: bool = True
    ) -> Iterator[None]:
        """Within it, what calls and generations use that name no mode: for functions that know nothing of modes.

        Args:
            prefill: for calls, and the prompts of generations; of prompts alone where it is a function.
            generation: for what generations add; by default the mode that `prefill` ends with.
            keep_kv: for generations, as in `generate`.

        Raises:
            ValueError: no modes, or a promise that they break.
        """
        if not callable(prefill):
            check_mode(prefill)
        if not keep_kv or generation is not None:
            check_generation(_last(prefill) if generation is None else generation, keep_kv)
        model = self.model
        before = model.default_mode, model.promises_linear, self.default_generation_mode, self.default_keep_kv
        model.default_mode, model.promises_linear = prefill, not keep_kv and prefill == LINEAR
        self.default_generation_mode, self.default_keep_kv = generation, keep_kv
        try:
            yield
        finally:
            model.default_mode, model.promises_linear, self.default_generation_mode, self.default_keep_kv = before

    @contextmanager
    def decoding(self, cache: OryxCache, *, graph: bool | None = None) -> Iterator[None]:
        """As core's, and within it calls that name no mode read generated tokens, as `modes` says.

        Args:
            cache: of the prompt; without keys and values from now on, where `modes` says so.
            graph: as core's.

        Raises:
            ValueError: the mode is a function, which only `generate` asks at every step; or as core's.
        """
        generation = self.default_generation_mode
        generation = _last(self.model.default_mode) if generation is None else generation
        if callable(generation):
            raise ValueError("a generation_mode that is a function is asked by generate alone; give a mode or schedule")
        if not self.default_keep_kv:
            cache.promise_linear()
        before, self.model.default_mode = self.model.default_mode, generation
        try:
            with super().decoding(cache, graph=graph):
                yield
        finally:
            self.model.default_mode = before

    def evaluation_settings(self) -> dict[str, str]:
        """The modes that evaluations are made in, and whether generations keep keys and values."""
        prefill, generation = self.model.default_mode, self.default_generation_mode
        modes = said(prefill) if generation in (None, prefill) else f"{said(prefill)} → {said(generation)}"
        return {"modes": modes} | ({} if self.default_keep_kv else {"keys and values": "not kept"})

    def generate(
        self,
        inputs: Tensor | None = None,
        *args: Any,
        mode: ModeInput | None = None,
        prefill_mode: ModeInput | PromptMode | None = None,
        generation_mode: GenerationMode | None = None,
        keep_kv: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, and:

        Args:
            mode: of prompt and generation alike.
            prefill_mode: of the prompt, in any form that `OryxModel` takes; a tensor has a column for each of its
                tokens, padding included; a function makes one of the prompt's tokens `[B, T]`. By default the model's
                default mode.
            generation_mode: of generated tokens: a mode, a schedule by position, or a function of the step (from 0)
                and all tokens `[B, T]` that returns a mode or a bool tensor `[B]`. By default the mode that the prompt
                ends with.
            keep_kv: False promises linear mode from the end of the prompt on (from its beginning if it is in linear
                mode too), so that no keys and values are kept. By default they are, unless `modes` says otherwise.

        Raises:
            ValueError: no modes, `mode` beside one of the others, or a broken promise.
        """
        if mode is not None and (prefill_mode is not None or generation_mode is not None):
            raise ValueError("give either mode, or prefill_mode and generation_mode")
        named = prefill_mode if mode is None else mode
        prefill = self.model.default_mode if named is None else named
        if generation_mode is None:
            own = self.default_generation_mode if named is None else None
            generation_mode = _last(prefill) if own is None else own
        if keep_kv is None:
            keep_kv = self.default_keep_kv if named is None else True
        if callable(prefill):
            prompt = kwargs.get("input_ids") if inputs is None else inputs
            if prompt is None:
                raise ValueError("a prefill_mode that is a function needs the prompt's tokens: give input_ids")
            prefill = prefill(prompt)
        plan = ModePlan(prefill, generation_mode, _prompt_tokens(inputs, kwargs), keep_kv)
        return super().generate(inputs, *args, mode=plan, **kwargs)  # pyright: ignore[reportArgumentType]

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        # embeddings by name: transformers looks for them here to tell whether it may generate from them
        plan = kwargs.pop("mode", None)
        prepare: Any = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        return inputs if plan is None else {**inputs, "mode": plan.for_call(inputs, input_ids)}

    def step_inputs(self, given: dict[str, Any], cache: HybridCache, tokens: Tensor | None) -> dict[str, Any]:
        mode: Any = given.get("mode")
        if isinstance(mode, ModePlan):
            assert tokens is not None, "a plan is followed by generate alone"
            mode = mode.for_call({"input_ids": tokens[:, -1:], CACHE: cache}, tokens)
        mode = self.model.default_mode if mode is None else mode
        return super().step_inputs({**given, "mode": mode}, cache, tokens)

    def state_bytes(self, seq_len: int, batch_size: int = 1, dtype: Any = None, *, linear_only: bool = False) -> int:
        """Bytes that the cache holds of `batch_size` sequences of `seq_len` tokens; `linear_only` after the promise."""
        if not linear_only:
            return super().state_bytes(seq_len, batch_size, dtype)
        cache = self.make_cache()
        assert isinstance(cache, OryxCache)
        cache.promise_linear()
        dtype = self.dtype if dtype is None else dtype
        parts = (part for layer in cache.layers for part in layer.parts.values())
        return sum(part.bounds(seq_len, batch_size, dtype).most for part in parts)


def _last(mode: ModeInput | PromptMode) -> GenerationMode:
    """The mode that goes on after the tokens that one was given for."""
    if isinstance(mode, str):
        return mode
    if isinstance(mode, Tensor) or callable(mode):
        kind = "tensor" if isinstance(mode, Tensor) else "function"
        raise ValueError(f"a prefill_mode that is a {kind} says nothing of later tokens: give generation_mode too")
    # a schedule by position goes on by itself, and may switch once more
    return mode[-1][1] if any(isinstance(start, float) for start, _ in mode) else mode


def _prompt_tokens(inputs: Tensor | None, kwargs: dict[str, Any]) -> int:
    for name in ("attention_mask", "inputs_embeds", "input_ids"):
        if kwargs.get(name) is not None:
            return kwargs[name].shape[1]
    # without any input generation begins with one token
    return 1 if inputs is None else inputs.shape[1]


register_model(OryxConfig, OryxModel, OryxForCausalLM)
