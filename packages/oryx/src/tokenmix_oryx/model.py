"""The Oryx language model: calls take modes of their tokens, `generate` takes modes of prompt and generated tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tokenmix_core.modeling import CACHE, HybridCache, HybridForCausalLM, HybridModel, Span, register_model
from tokenmix_oryx.config import OryxConfig as OryxConfig
from tokenmix_oryx.generation import GenerationMode, ModePlan, PromptMode, check_generation
from tokenmix_oryx.modes import ATTENTION, LINEAR, ModeInput, Modes, check_mode, describe, request_mode
from tokenmix_oryx.state import OryxCache


class Defaults(NamedTuple):
    """The modes used if a caller of the model or of `generate` gives none; see `OryxForCausalLM.modes`."""

    prefill: ModeInput | PromptMode
    generation: GenerationMode | None = None
    keep_kv: bool = True

    @property
    def generated(self) -> GenerationMode:
        """The mode of generated tokens; if none is set, the mode at the end of the prompt."""
        return _last(self.prefill) if self.generation is None else self.generation


class OryxModel(HybridModel):
    """The backbone, in which the argument `mode` selects the mixer of each token.

    `mode` is "linear" or "attention" for all tokens; or a list of (start, mode), where starts are positions in each
    sequence without padding, cached tokens included, or fractions of its length; or a bool tensor `[B, T]`, True for
    attention, with one value for each token of the call. By default it is `default_mode`.

    Attributes:
        default_mode: mode of calls without the argument `mode`; initially that of the configuration.
    """

    config: OryxConfig
    config_class = OryxConfig

    def __init__(self, config: OryxConfig):
        super().__init__(config)
        self.defaults = Defaults(config.mode)

    @property
    def default_mode(self) -> ModeInput | PromptMode:
        return self.defaults.prefill

    @default_mode.setter
    def default_mode(self, mode: ModeInput | PromptMode) -> None:
        self.defaults = self.defaults._replace(prefill=mode)

    def make_cache(self, max_length: int = 0, *, offload: bool = False, record: int | None = None) -> OryxCache:
        states = [mixer.make_state() for mixer in self.mixers]
        cache = OryxCache(states, max_length=max_length, offload=offload, record=record)
        if not self.defaults.keep_kv and self.default_mode == LINEAR:
            cache.promise_linear()
        return cache

    def mode_of_calls(self, cache: HybridCache | None) -> Any:
        """Return the mode of a call that has this cache and no argument `mode`."""
        decoding = getattr(cache, "decoding_mode", None)
        return self.default_mode if decoding is None else decoding

    def inputs_to_keep(self, inputs: dict[str, Any], cache: HybridCache) -> dict[str, Any]:
        mode = self.mode_of_calls(cache) if inputs.get("mode") is None else inputs["mode"]
        if isinstance(mode, list | tuple) and any(isinstance(start, float) for start, _ in mode):
            raise ValueError("modes by shares of the length cannot be kept for crop: give positions")
        return {"mode": mode}

    def prepare_mixer_inputs(
        self, inputs: dict[str, Any], span: Span, cu_seqlens: Tensor | None, cache: HybridCache | None
    ) -> dict[str, Any]:
        if inputs.get("mode") is None:
            # `resolve` raises an error if the default mode is a function of the prompt
            inputs = {**inputs, "mode": self.mode_of_calls(cache)}
        prepared = super().prepare_mixer_inputs(inputs, span, cu_seqlens, cache)
        if "mode" in prepared and isinstance(cache, OryxCache) and cache.linear_only:
            prepared["mode"] = _require_linear(prepared["mode"])
        return prepared


def _require_linear(modes: Modes) -> Modes:
    if modes.uniform == ATTENTION or (modes.attention is not None and bool(modes.attention.any())):
        raise ValueError(
            "attention was requested after a promise of linear mode to the end: the cache keeps no keys and values; "
            "use a new cache, or do not promise linear mode"
        )
    return Modes(LINEAR)


class OryxForCausalLM(HybridForCausalLM):
    """The causal language model; `forward` takes `mode` as `OryxModel` does, `generate` also a mode of new tokens."""

    config: OryxConfig
    model: OryxModel
    config_class = OryxConfig
    model_class: ClassVar[type[HybridModel]] = OryxModel

    @contextmanager
    def modes(
        self, prefill: ModeInput | PromptMode, generation: GenerationMode | None = None, *, keep_kv: bool = True
    ) -> Iterator[None]:
        """Context manager that sets default modes for calls and generations, for code that passes no `mode`.

        Args:
            prefill: mode of calls and of prompts; a function applies only to prompts.
            generation: mode of generated tokens; by default the mode at the end of `prefill`.
            keep_kv: the same as for `generate`.

        Raises:
            ValueError: invalid modes, or modes that contradict `keep_kv=False`.
        """
        if not callable(prefill):
            check_mode(prefill)
        if not keep_kv or generation is not None:
            check_generation(_last(prefill) if generation is None else generation, keep_kv)
        with self._defaults(Defaults(prefill, generation, keep_kv)):
            yield

    @contextmanager
    def _defaults(self, defaults: Defaults) -> Iterator[None]:
        before, self.model.defaults = self.model.defaults, defaults
        try:
            yield
        finally:
            self.model.defaults = before

    @contextmanager
    def decoding(self, cache: OryxCache, *, graph: bool | None = None) -> Iterator[None]:
        """Context manager like core's `decoding`; calls without a mode have the default mode of generated tokens.

        Args:
            cache: cache that contains the prompt; its keys and values are freed if `modes` has set `keep_kv=False`.
            graph: the same as for core's `decoding`.

        Raises:
            ValueError: the mode is a function, which only `generate` accepts; or the reasons given at core's
                `decoding`.
        """
        defaults = self.model.defaults
        generation = defaults.generated
        if callable(generation):
            raise ValueError("only generate supports a generation_mode that is a function; give a mode or schedule")
        if not defaults.keep_kv:
            cache.promise_linear()
        before, cache.decoding_mode = cache.decoding_mode, generation
        try:
            with super().decoding(cache, graph=graph):
                yield
        finally:
            cache.decoding_mode = before

    def evaluation_settings(self) -> dict[str, str]:
        """Return the modes in which the model is evaluated, and whether generations keep keys and values."""
        prefill, generation, keep_kv = self.model.defaults
        modes = describe(prefill) if generation in (None, prefill) else f"{describe(prefill)} → {describe(generation)}"
        return {"modes": modes} | ({} if keep_kv else {"keys and values": "not kept"})

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
        """Generate with transformers' `generate`; take its arguments and the following ones.

        Args:
            mode: mode of prompt and generated tokens.
            prefill_mode: mode of the prompt, in any form that `OryxModel` takes; a tensor has a column for each token,
                padding included; a function gets the prompt's tokens `[B, T]` and returns such a tensor. By default the
                model's default mode.
            generation_mode: mode of generated tokens: a mode, a schedule by position, or a function that gets the step,
                counted from 0, and all tokens `[B, T]`, and returns a mode or a bool tensor `[B]`. By default the mode
                at the end of the prompt.
            keep_kv: False promises linear mode from the end of the prompt on (from its start, if the prompt is in
                linear mode), so that no keys and values are stored. True by default.

        Inside `modes`, the defaults are those that it has set, unless `mode` or `prefill_mode` is given.

        Raises:
            ValueError: invalid modes; `mode` together with another of the modes; or modes that contradict
                `keep_kv=False`.
        """
        if mode is not None and (prefill_mode is not None or generation_mode is not None):
            raise ValueError("give either mode, or prefill_mode and generation_mode")
        given = prefill_mode if mode is None else mode
        defaults = self.model.defaults if given is None else Defaults(given)
        prefill = defaults.prefill
        if generation_mode is None:
            generation_mode = defaults.generated
        if keep_kv is None:
            keep_kv = defaults.keep_kv
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
        # `inputs_embeds` stays in this signature: transformers looks for it to decide if it may generate from
        # embeddings
        plan = kwargs.pop("mode", None)
        prepare: Any = super().prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        return inputs if plan is None else {**inputs, "mode": plan.for_call(inputs, input_ids)}

    def step_inputs(self, given: dict[str, Any], cache: HybridCache, tokens: Tensor | None) -> dict[str, Any]:
        mode: Any = given.get("mode")
        if isinstance(mode, ModePlan):
            assert tokens is not None, "only generate supports plans"
            mode = mode.for_call({"input_ids": tokens[:, -1:], CACHE: cache}, tokens)
        mode = self.model.mode_of_calls(cache) if mode is None else mode
        return super().step_inputs({**given, "mode": mode}, cache, tokens)

    def request_inputs(self, given: dict[str, Any], prompt: int) -> dict[str, Any]:
        """Return the mixers' input of a served request: its own mode, or the defaults that `modes` has set.

        Raises:
            ValueError: the default for generated tokens is a function; the request's mode is invalid, or is not linear
                although keys and values are not kept.
        """
        defaults, mode, generated = self.model.defaults, given.get("mode"), None
        if mode is None:
            mode, generated = defaults.prefill, defaults.generated
            if callable(generated):
                raise ValueError("only generate supports a generation_mode that is a function; give a mode or schedule")
        elif mode != LINEAR and not defaults.keep_kv:
            raise ValueError(f"keys and values are not kept, so that mode must be 'linear', got {mode!r}")
        return super().request_inputs({**given, "mode": request_mode(mode, generated, prompt)}, prompt)

    def state_bytes(self, seq_len: int, batch_size: int = 1, dtype: Any = None, *, linear_only: bool = False) -> int:
        """Return the maximum bytes of a cache of `batch_size` sequences; with `linear_only`, after `promise_linear`."""
        if not linear_only:
            return super().state_bytes(seq_len, batch_size, dtype)
        cache = self.make_cache()
        assert isinstance(cache, OryxCache)
        cache.promise_linear()
        dtype = self.dtype if dtype is None else dtype
        parts = (part for layer in cache.layers for part in layer.parts.values())
        return sum(part.bounds(seq_len, batch_size, dtype).most for part in parts)


def _last(mode: ModeInput | PromptMode) -> GenerationMode:
    """Return the mode of tokens that follow those to which `mode` applies."""
    if isinstance(mode, str):
        return mode
    if isinstance(mode, Tensor) or callable(mode):
        kind = "tensor" if isinstance(mode, Tensor) else "function"
        raise ValueError(f"a prefill_mode that is a {kind} has no mode for later tokens: give generation_mode too")
    # after a schedule by fractions, its last mode continues; a schedule by positions also covers later tokens
    return mode[-1][1] if any(isinstance(start, float) for start, _ in mode) else mode


def _prompt_tokens(inputs: Tensor | None, kwargs: dict[str, Any]) -> int:
    for name in ("attention_mask", "inputs_embeds", "input_ids"):
        if kwargs.get(name) is not None:
            return kwargs[name].shape[1]
    # a generation without any input starts with a single token
    return 1 if inputs is None else inputs.shape[1]


register_model(OryxConfig, OryxModel, OryxForCausalLM)
