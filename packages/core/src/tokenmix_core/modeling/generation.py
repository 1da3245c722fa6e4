"""Generation whose decoding steps are recorded once and repeated, and that asks the device seldom.

`generate` is transformers'. Where graphs can be recorded, which is on CUDA, two things change. A call of the model with
one new token of each sequence is made in fixed storage (`Steps`); that serves every way of decoding, beams and foreign
loops included. Greedy decoding and sampling also choose, write and stop on the device, and the host looks every 16
tokens: transformers' own loop waits for the device at each.
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
from tokenmix_core.modeling.decode_graph import Steps, StepStore, why_not
from tokenmix_core.modeling.sampling import Sampler, choosing_needs_host, draw
from tokenmix_core.nn.mixer import Mixer

# the option of generate, and of its generation_config
OPTION = "decoding_graph"
# tokens between two questions whether all sequences have ended
ASK_EVERY = 16


def stepping_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a causal language model's `forward`: steps of a cache that has `steps` are made by them."""

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
    """Before transformers' `GenerationMixin`: graphs of decoding steps, and a loop that leaves the device alone."""

    # by name of an extra input of the model, the mixers that take it
    input_takers: dict[str, type[Mixer]] = {}  # noqa: RUF012

    @property
    def step_store(self) -> StepStore:
        """The recorded steps of this model that wait for the next generation."""
        return self.__dict__.setdefault("_step_store", StepStore())

    def free_decoding_graphs(self) -> None:
        """Give back the memory of steps that were recorded by former generations."""
        self.step_store.free()

    def step_inputs(self, given: dict[str, Any], cache: HybridCache, tokens: Tensor | None) -> dict[str, Any]:
        """The mixers' inputs of a decoding step: tensors, or values that recorded steps are told apart by.

        Args:
            given: the arguments of the call, or of the generation.
            cache: of the sequences.
            tokens: all tokens so far, `[N, T]`, in a generation; None in a call.
        """
        takers = self.input_takers
        inputs = {name: x for name, x in given.items() if name in takers and x is not None}
        return {name: takers[name].step_input(name, x, lambda: cache.known_lengths) for name, x in inputs.items()}

    def step_output(self, logits: Tensor, cache: HybridCache) -> Any:
        """Wrap logits `[N, 1, vocab]` of a repeated step as the model's `forward` returns them."""
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    @functools.wraps(GenerationMixin.generate)  # pyright: ignore[reportAttributeAccessIssue]
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        take_cache(kwargs)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def decoding(self, cache: HybridCache, *, graph: bool | None = None) -> Iterator[None]:
        """Within it, calls with one token of each sequence are decoding steps of `generate`: for loops beside it.

        Logits of a step are overwritten by the next one.

        Args:
            cache: of the sequences, whose prompt has been read.
            graph: record and repeat steps: where it can be done (None), never, or else a ValueError.

        Raises:
            ValueError: graph=True where steps cannot be recorded, with what keeps them from it.
        """
        with self._steps(cache, graph, keep=True):
            yield

    @contextmanager
    def _steps(self, cache: Any, graph: bool | None, *, keep: bool) -> Iterator[Steps | None]:
        """The steps of a cache, where they can be recorded and are wanted."""
        if graph is not None and not isinstance(graph, bool):
            raise ValueError(f"{OPTION} must be None, True or False, got {graph!r}")
        if graph is False or (graph is None and not cuda_graphs.wanted()):
            yield None
            return
        why = why_not(self, cache)
        if why is not None or cache.steps is not None:
            if graph and why is not None:
                raise ValueError(f"{OPTION}=True: decoding steps cannot be recorded, for there are {why}")
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
                # a mixture of experts may have a form of its own for few tokens
                with getattr(self, "_optimize_model_for_decode", nullcontext)():
                    return loop(input_ids, model_kwargs, ask_every=1 if kept else ASK_EVERY)
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
    """Greedy decoding or sampling, as transformers' `_sample` does it, with choices and stops on the device."""

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

    def __call__(self, input_ids: Tensor, given: dict[str, Any], *, ask_every: int) -> Any:
        model, steps, cache = self.model, self.steps, self.steps.cache
        logits = self._prefill(input_ids, given)
        token = draw(self.processors, logits, input_ids, sample=self.config.do_sample)
        # what follows is decided by all tokens there are, and may free memory
        first = model.prepare_inputs_for_generation(
            torch.cat((input_ids, token), 1), next_sequence_length=1, **self.given
        )
        recorded = steps.settle()
        room = max(recorded.room, input_ids.shape[1]) + 1
        chooser = Sampler(recorded, self.processors, room, sample=self.config.do_sample, eos=self.eos, pad=self.pad)
        chooser.begin(input_ids, token)
        positions = first.get("position_ids")
        if positions is not None:
            recorded.positions.copy_(positions)
        shown, length, stop = input_ids.shape[1], input_ids.shape[1] + 1, None
        # a reader sees the first token at once
        pause = 0 if self.streamer is not None or ask_every == 1 else ask_every - 1
        while True:
            over = length == self.max_length
            if (pause <= 0 or over) and (self.eos or self.streamer is not None):
                stop, tokens = chooser.ask(shown if self.streamer is not None else length, length)
                shown = self._show(tokens, shown, length if stop is None else stop)
                pause = ask_every
            if over or stop is not None:
                break
            settled = steps.settle()
            if settled is not recorded or length == chooser.room:
                recorded = settled
                chooser = chooser.moved(recorded, max(recorded.room, length) + 1)
            inputs = model.step_inputs(self.given, cache, chooser.tokens[:, :length])
            chooser(steps(recorded.ids, None if positions is None else recorded.positions, inputs))
            length, pause = length + 1, pause - 1
        if self.streamer is not None:
            self.streamer.end()
        sequences = chooser.tokens[:, : length if stop is None else stop].clone()
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences, **{CACHE: cache})  # type: ignore[arg-type]
        return sequences

    def _prefill(self, input_ids: Tensor, given: dict[str, Any]) -> Tensor:
        """The logits after the prompt; keeps what transformers makes of the arguments for the steps."""
        try:
            outputs = self.model._prefill(input_ids, self.config, given, is_first_iteration=True)
        except torch.OutOfMemoryError:
            # nobody but this generation has the cache, which begins anew
            if self.steps.cache._is_user_defined or not self.model.step_store.free():
                raise
            self.steps.cache.reset()
            outputs = self.model._prefill(input_ids, self.config, given, is_first_iteration=True)
        self.given = self.model._update_model_kwargs_for_generation(outputs, given, is_encoder_decoder=False)
        return outputs.logits[:, -1].to(input_ids.device)

    def _show(self, tokens: list[list[int]], shown: int, stop: int) -> int:
        """Hand new tokens to the streamer, one by one; returns how many there have been."""
        if self.streamer is None:
            return shown
        for column in list(zip(*tokens, strict=True))[: max(0, stop - shown)]:
            self.streamer.put(torch.tensor(column))
        return max(shown, stop)


def _outlives(cache: Any, config: Any) -> bool:
    """Tell whether somebody sees the cache after the generation."""
    return bool(config.return_dict_in_generate) or getattr(cache, "_is_user_defined", False)


def _loops_here(config: Any, stopping: StoppingCriteriaList, given: dict[str, Any], synced: bool) -> bool:
    """Tell whether our own loop does what is asked; transformers' does the rest, with recorded steps, too."""
    records = config.return_dict_in_generate and (
        config.output_scores or config.output_logits or config.output_hidden_states or config.output_attentions
    )
    if records or synced or getattr(config, "is_assistant", False) or config.prefill_chunk_size is not None:
        return False
    others = [type(x).__name__ for x in stopping if choosing_needs_host(x)]
    if others:
        _say_once(
            f"{', '.join(others)} needs the host after every token, which waits for the device; generation by lengths "
            "and end tokens alone does not"
        )
        return False
    mask = given.get("attention_mask")
    return stopping.max_length is not None and (mask is None or not bool((mask[:, -1] == 0).any()))


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
