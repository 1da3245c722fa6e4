"""Generation in which decoding steps are CUDA graphs and the host rarely waits for the device.

`generate` is transformers'. On CUDA, two things change. A call of the model with one new token of each sequence runs on
fixed storage (`Steps`), in every decoding method, including beam search and third-party loops. Greedy decoding and
sampling also select tokens and check for the end on the device, and the host synchronises every 16 tokens, or at every
token if the caller keeps the cache. Calls that this loop does not support run in transformers' loop, which synchronises
at every token.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.cache_name import CACHE, name_of, take_cache
from tokenmix_core.modeling.captured_steps import StepStore
from tokenmix_core.modeling.decode_graph import Steps, why_not
from tokenmix_core.modeling.sampling import Sampler, draw, needs_host
from tokenmix_core.nn.mixer import Mixer

# name of our option in `generate` and in `generation_config`
OPTION = "decoding_graph"
# number of tokens after which the host asks the device whether all sequences have ended
SYNC_EVERY = 16


def stepping_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a causal language model's `forward`: `cache.steps`, if present, runs the decoding steps."""

    name = name_of(forward)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = take_cache(kwargs, name)
        steps = cache.steps if isinstance(cache, HybridCache) else None
        given = {"input_ids": args[0], **kwargs} if len(args) == 1 else kwargs
        if steps is None or len(args) > 1 or not steps.takes(given):
            return forward(self, *args, **kwargs)
        logits = steps(given["input_ids"], given.get("position_ids"), self.step_inputs(given, cache, None))
        return self.step_output(logits.unsqueeze(1), cache)

    return call


class GeneratesInSteps:
    """Base class to list before `GenerationMixin`: runs decoding steps as CUDA graphs, with few synchronisations."""

    # for each extra input of the model, the mixer class that takes it
    input_takers: dict[str, type[Mixer]] = {}  # noqa: RUF012

    @property
    def step_store(self) -> StepStore:
        """The captured decoding steps (CUDA graphs) of this model that no running generation uses."""
        return self.__dict__.setdefault("_step_store", StepStore())

    def free_decoding_graphs(self) -> None:
        """Free the memory of decoding steps that earlier generations captured."""
        self.step_store.free()

    def step_inputs(self, given: dict[str, Any], cache: HybridCache, tokens: Tensor | None) -> dict[str, Any]:
        """Return the mixers' inputs of a decoding step. Each non-tensor value among them gets a graph of its own.

        Args:
            given: the keyword arguments of the call or of the generation.
            cache: cache of the sequences.
            tokens: in a generation, all tokens so far, `[N, T]`; None in a single call.
        """
        takers = self.input_takers
        inputs = {name: x for name, x in given.items() if name in takers and x is not None}
        return {name: takers[name].step_input(name, x, lambda: cache.known_lengths) for name, x in inputs.items()}

    def request_inputs(self, given: dict[str, Any], prompt: int) -> dict[str, Any]:
        """Return the mixers' inputs of a served request, as `Mixer.request_input` converts them.

        Args:
            given: the request's inputs, by name.
            prompt: number of tokens of its prompt.

        Raises:
            ValueError: an invalid input, or one that no mixer of the model takes.
        """
        takers = self.input_takers
        if unknown := sorted(set(given) - set(takers)):
            raise ValueError(f"the model takes no {unknown[0]}")
        inputs = {name: taker.request_input(name, given.get(name), prompt) for name, taker in takers.items()}
        return {name: x for name, x in inputs.items() if x is not None}

    def step_output(self, logits: Tensor, cache: HybridCache) -> Any:
        """Wrap logits `[N, 1, vocab]` of a decoding step in the output class of the model's `forward`."""
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    @functools.wraps(GenerationMixin.generate)  # pyright: ignore[reportAttributeAccessIssue]
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        take_cache(kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    @torch.no_grad()
    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """Return transformers' manager of continuous batching: the one that the model keeps, or a new one.

        The arguments for a new one are those of transformers' method.

        Raises:
            ValueError: a version of transformers before 5.24, or options that are not available.
        """
        from tokenmix_core.modeling.continuous_batching import init_manager

        kept = getattr(self, "_cached_continuous_batching_manager", None)
        return kept or init_manager(self, generation_config, continuous_batching_config, workload_hints)

    @functools.wraps(GenerationMixin.generate_batch)  # pyright: ignore[reportAttributeAccessIssue]
    def generate_batch(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        results = super().generate_batch(inputs, *args, **kwargs)  # type: ignore[misc]
        if len(results) < len(inputs):
            # transformers only logs why requests failed and returns the other results
            raise RuntimeError(f"{len(inputs) - len(results)} of {len(inputs)} requests did not run: see the log above")
        return results

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kw: Any):
        _check_new_tokens(input_ids, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kw)  # type: ignore[misc]

    @contextmanager
    def decoding(self, cache: HybridCache, *, graph: bool | None = None) -> Iterator[None]:
        """Context manager for custom loops: calls with one token per sequence run as decoding steps of `generate`.

        Each step overwrites the logits that the previous step returned.

        Args:
            cache: cache of the sequences, which contains their prompt.
            graph: whether to capture steps: None if possible, False never, True always (an error if it is impossible).

        Raises:
            ValueError: graph=True, but steps cannot be captured; the message gives the reason.
        """
        with self._steps(cache, graph, keep=True):
            yield

    @contextmanager
    def _steps(self, cache: Any, graph: bool | None, *, keep: bool) -> Iterator[Steps | None]:
        """Context manager that yields the `Steps` of a cache; None if steps cannot or should not be captured.

        `keep` tells whether the cache will be used again afterwards. If `graph` is True and steps cannot be captured,
        a ValueError gives the reason.
        """
        if graph is not None and not isinstance(graph, bool):
            raise ValueError(f"{OPTION} must be None, True or False, got {graph!r}")
        if graph is False or (graph is None and not cuda_graphs.wanted()):
            yield None
            return
        why = why_not(self, cache)
        if why is not None or cache.steps is not None:
            if graph and why is not None:
                raise ValueError(f"{OPTION}=True: decoding steps cannot be captured, as {why}")
            yield None if why is not None else cache.steps
            return
        cache.steps = steps = Steps(self, cache)
        try:
            yield steps
        finally:
            steps.release(keep=keep)

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        graph = kwargs.pop(OPTION, None)
        prepared, rest = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if graph is not None:
            setattr(prepared, OPTION, graph)
        return prepared, rest

    def _beam_search(self, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        search: Any = super()._beam_search  # type: ignore[misc]
        cache = kwargs.get(CACHE)
        with self._steps(cache, getattr(generation_config, OPTION, None), keep=_outlives(cache, generation_config)):
            return search(input_ids, *args, generation_config=generation_config, **kwargs)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        cache = model_kwargs.get(CACHE)
        kept = _outlives(cache, generation_config)
        with self._steps(cache, getattr(generation_config, OPTION, None), keep=kept) as steps:
            if steps is not None and _loops_here(generation_config, stopping_criteria, model_kwargs, synced_gpus):
                loop = _Loop(self, steps, logits_processor, stopping_criteria, generation_config, streamer)
                # in this context transformers may run mixture-of-experts layers by an implementation for few tokens
                with getattr(self, "_optimize_model_for_decode", nullcontext)():
                    return loop(input_ids, model_kwargs, sync_every=1 if kept else SYNC_EVERY)
            sample: Any = super()._sample  # type: ignore[misc]
            return sample(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )


class _Loop:
    """Greedy decoding or sampling as in transformers' `_sample`, but the device selects tokens and finds the end."""

    def __init__(
        self,
        model: Any,
        steps: Steps,
        processors: LogitsProcessorList,
        stopping: StoppingCriteriaList,
        config: Any,
        streamer: Any,
    ):
        self.model, self.steps, self.processors, self.config, self.streamer = model, steps, processors, config, streamer
        self.max_length = stopping.max_length
        ends = [x.eos_token_id for x in stopping if hasattr(x, "eos_token_id")]
        self.eos = tuple(sorted({n for x in ends for n in torch.as_tensor(x).flatten().tolist()}))
        self.pad = int(config._pad_token_tensor) if self.eos else 0

    def __call__(self, input_ids: Tensor, given: dict[str, Any], *, sync_every: int) -> Any:
        model, steps, cache = self.model, self.steps, self.steps.cache
        logits = self._prefill(input_ids, given)
        token = draw(self.processors, logits, input_ids, sample=self.config.do_sample)
        # transformers derives the next call's arguments from all tokens; an Oryx model may drop keys and values here
        first = model.prepare_inputs_for_generation(
            torch.cat((input_ids, token), 1), next_sequence_length=1, **self.given
        )
        captured = steps.storage()
        capacity = max(captured.capacity, input_ids.shape[1]) + 1
        sampler = Sampler(captured, self.processors, capacity, sample=self.config.do_sample, eos=self.eos, pad=self.pad)
        sampler.begin(input_ids, token)
        positions = first.get("position_ids")
        if positions is not None:
            captured.positions.copy_(positions)
        shown, length, stop = input_ids.shape[1], input_ids.shape[1] + 1, None
        # stop at the first token, so that a streamer gets it immediately
        pause = 0 if self.streamer is not None or sync_every == 1 else sync_every - 1
        while True:
            over = length == self.max_length
            if (pause <= 0 or over) and (self.eos or self.streamer is not None):
                stop, tokens = sampler.ask(shown if self.streamer is not None else length, length)
                shown = self._show(tokens, shown, length if stop is None else stop)
                pause = sync_every
            if over or stop is not None:
                break
            current = steps.storage()
            if current is not captured or length == sampler.capacity:
                captured = current
                sampler = sampler.moved(captured, max(captured.capacity, length) + 1)
            inputs = model.step_inputs(self.given, cache, sampler.tokens[:, :length])
            sampler(steps(captured.ids, None if positions is None else captured.positions, inputs))
            length, pause = length + 1, pause - 1
        if self.streamer is not None:
            self.streamer.end()
        sequences = sampler.tokens[:, : length if stop is None else stop].clone()
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE: cache})  # type: ignore[arg-type]
        return sequences

    def _prefill(self, input_ids: Tensor, given: dict[str, Any]) -> Tensor:
        """Return the logits after the prompt; store the arguments that transformers prepares for the steps."""
        try:
            outputs = self.model._prefill(input_ids, self.config, given, is_first_iteration=True)
        except torch.OutOfMemoryError:
            # out of memory: free captured steps and try again, unless the caller owns the cache, which may have changed
            # already
            if self.steps.cache._is_user_defined or not self.model.step_store.free():
                raise
            self.steps.cache.reset()
            outputs = self.model._prefill(input_ids, self.config, given, is_first_iteration=True)
        self.given = self.model._update_model_kwargs_for_generation(outputs, given, is_encoder_decoder=False)
        return outputs.logits[:, -1].to(input_ids.device)

    def _show(self, tokens: list[list[int]], shown: int, stop: int) -> int:
        """Pass the tokens at positions `shown` to `stop` − 1 to the streamer, if there is one; return the next `shown`.

        `tokens` are each sequence's tokens from position `shown` on, where positions count the prompt.
        """
        if self.streamer is None:
            return shown
        for column in list(zip(*tokens, strict=True))[: max(0, stop - shown)]:
            self.streamer.put(torch.tensor(column))
        return max(shown, stop)


def _check_new_tokens(input_ids: Tensor, given: dict[str, Any]) -> None:
    """Raise a ValueError if the cache already contains all tokens of the prompt: the call has none to compute."""
    cache, mask, embeds = given.get(CACHE), given.get("attention_mask"), given.get("inputs_embeds")
    if not isinstance(cache, HybridCache):
        return
    prompt = input_ids if embeds is None else embeds
    # a mask longer than the prompt means that the prompt has only new tokens
    whole = embeds is not None or mask is None or mask.shape[1] == prompt.shape[1]
    held = cache.get_seq_length()
    if whole and held and held >= prompt.shape[1]:
        raise ValueError(
            f"the cache holds {held} tokens and the prompt has {prompt.shape[1]}, so that no new token is left: pass a "
            "longer prompt, remove the last tokens by cache.crop(-n) if the cache keeps a history, or use a "
            "copy.deepcopy of the cache from before the prompt's last token"
        )


def _outlives(cache: Any, config: Any) -> bool:
    """True if the caller keeps the cache, which then outlives the generation."""
    return bool(config.return_dict_in_generate) or getattr(cache, "_is_user_defined", False)


def _loops_here(config: Any, stopping: StoppingCriteriaList, given: dict[str, Any], synced: bool) -> bool:
    """True if our loop supports the request; otherwise transformers' loop runs, also with captured steps.

    `synced`: whether the processes must stop together, as transformers' option `synced_gpus` says.
    """
    wants_more = config.return_dict_in_generate and (
        config.output_scores or config.output_logits or config.output_hidden_states or config.output_attentions
    )
    if wants_more or synced or config.prefill_chunk_size is not None:
        return False
    others = [type(x).__name__ for x in stopping if needs_host(x)]
    if others:
        _warn_once(
            f"{', '.join(others)} needs the host after every token, which waits for the device; lengths and "
            "end tokens as only criteria do not"
        )
        return False
    mask = given.get("attention_mask")
    return stopping.max_length is not None and (mask is None or not bool((mask[:, -1] == 0).any()))


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
