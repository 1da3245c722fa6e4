"""The modes of the tokens of a generation, in the prompt and after it, with or without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tokenmix_core.modeling import CACHE, Span
from tokenmix_oryx.modes import ATTENTION, LINEAR, MODES, ModeInput, check_mode, resolve
from tokenmix_oryx.state import OryxCache

# a function of the step, counted from 0, and of all tokens so far [B, T]; it returns one mode, or a bool tensor [B]
# that is True for attention
Decision = Callable[[int, Tensor], str | Tensor]
GenerationMode = str | Sequence[tuple[int | float, str]] | Decision
# a function of the tokens of a prompt [B, T]; it returns a bool tensor [B, T] that is True for attention
PromptMode = Callable[[Tensor], Tensor]


def check_generation(generation: Any, keep_kv: bool) -> None:
    """Raise a ValueError for an invalid mode of generated tokens, or a mode that contradicts `keep_kv=False`."""
    if isinstance(generation, Tensor) or not (callable(generation) or isinstance(generation, str | list | tuple)):
        raise ValueError(
            "generation_mode must be 'linear', 'attention', a list of (start, mode) or a function of the step and "
            f"the tokens, got {type(generation).__name__}"
        )
    if not callable(generation):
        check_mode(generation)
        if not isinstance(generation, str) and any(isinstance(start, float) for start, _ in generation):
            raise ValueError(f"the starts of generation_mode must be positions, got {list(generation)!r}")
    if not keep_kv and generation != LINEAR:
        raise ValueError(f"keep_kv=False promises linear mode to the end, got generation_mode={generation!r}")


class ModePlan:
    """The mode of each token in a generation.

    Step s reads the s-th generated token and predicts the next one; the last token of the prompt predicts the first
    generated token, and has the prompt's mode.

    Args:
        prefill: mode of the prompt, in any form that `OryxModel` takes; a tensor must have one column for each
            token of the prompt.
        generation: mode of generated tokens: one mode, a schedule by position, or a function that is called at each
            step.
        prompt_tokens: number of tokens in the prompt, padding included.
        keep_kv: False promises linear mode from the end of the prompt on (from its start, if the prompt is in linear
            mode).

    Raises:
        ValueError: an invalid mode, or one that contradicts `keep_kv=False`.
    """

    def __init__(self, prefill: ModeInput, generation: GenerationMode, prompt_tokens: int, keep_kv: bool):
        check_mode(prefill)
        check_generation(generation, keep_kv)
        self.prefill, self.generation = prefill, generation
        self.prompt_tokens, self.keep_kv = prompt_tokens, keep_kv
        self._decided: list[str | Tensor] = []

    def for_call(self, inputs: dict[str, Any], input_ids: Int[Tensor, "B T"]) -> ModeInput:
        """Return the mode of a forward call's tokens, given the inputs of the call and all tokens so far.

        Without `keep_kv`, this first makes the cache drop its keys and values, as soon as linear mode lasts to the end.

        Raises:
            ValueError: `generation` is a function, and a call with a cache has more than one generated token, or the
                function decides for each sequence in a call without a cache.
        """
        new = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        batch, tokens = new.shape[:2]
        cache: OryxCache | None = inputs.get(CACHE)
        past = 0 if cache is None else cache.get_seq_length()
        if cache is not None and not self.keep_kv and (past >= self.prompt_tokens or self.prefill == LINEAR):
            cache.promise_linear()
        if cache is not None and callable(self.generation) and past + tokens > max(past, self.prompt_tokens) + 1:
            raise ValueError(
                "a generation_mode that is a function decides for one token at a time, but this call has several"
            )
        if past >= self.prompt_tokens:
            mode = self._step(past - self.prompt_tokens, input_ids)
            return mode.to(new.device).unsqueeze(1) if isinstance(mode, Tensor) else mode
        if past + tokens <= self.prompt_tokens:
            if isinstance(self.prefill, Tensor):
                return _rows(self.prefill, batch, self.prompt_tokens)[:, past : past + tokens]
            return self.prefill
        # a call without a cache contains the prompt and all generated tokens, so it needs the modes of both
        if not callable(self.generation) and self.generation == self.prefill:
            return self.prefill
        return self._whole(batch, tokens, inputs.get("attention_mask"), input_ids, new.device)

    def _step(self, step: int, input_ids: Tensor) -> ModeInput:
        if not callable(self.generation):
            return self.generation
        if step == len(self._decided):
            self._decided.append(_checked(self.generation(step, input_ids), len(input_ids)))
        return self._decided[step]

    def _whole(
        self, batch: int, tokens: int, mask: Tensor | None, input_ids: Tensor, device: torch.device
    ) -> Bool[Tensor, "B T"]:
        prompt = _by_column(self.prefill, batch, self.prompt_tokens, mask, device)
        if not callable(self.generation):
            rest = _by_column(self.generation, batch, tokens, mask, device)[:, self.prompt_tokens :]
            return torch.cat((prompt, rest), 1)
        columns = []
        for step in range(tokens - self.prompt_tokens):
            mode = self._step(step, input_ids)
            if isinstance(mode, Tensor):
                raise ValueError("a generation_mode that decides for each sequence needs use_cache=True")
            columns.append(prompt.new_full((batch, 1), mode == ATTENTION))
        return torch.cat((prompt, *columns), 1)


def _checked(mode: Any, batch: int) -> str | Tensor:
    if isinstance(mode, Tensor):
        if mode.dtype == torch.bool and mode.shape == (batch,):
            return mode
        got = f"{list(mode.shape)} of {mode.dtype}"
    else:
        if isinstance(mode, str) and mode in MODES:
            return mode
        got = repr(mode)
    raise ValueError(f"generation_mode must return 'linear', 'attention' or a bool tensor [{batch}], got {got}")


def _rows(mode: Bool[Tensor, "N T"], batch: int, tokens: int) -> Bool[Tensor, "B T"]:
    """Repeat each row for the beams of its sequence, which are adjacent, so that there are `batch` rows."""
    if mode.shape[1] != tokens or batch % len(mode):
        raise ValueError(f"prefill_mode must have shape [B, T] = {[batch, tokens]}, got {list(mode.shape)}")
    return mode.repeat_interleave(batch // len(mode), 0)


def _by_column(
    mode: ModeInput, batch: int, tokens: int, mask: Tensor | None, device: torch.device
) -> Bool[Tensor, "B tokens"]:
    if isinstance(mode, str):
        return torch.full((batch, tokens), mode == ATTENTION, device=device)
    if isinstance(mode, Tensor):
        return _rows(mode, batch, tokens).to(device)
    span = Span(batch, tokens, device, mask=None if mask is None else mask[:, :tokens].bool())
    modes = resolve(mode, span)
    if modes.attention is None:
        return torch.full((batch, tokens), modes.uniform == ATTENTION, device=device)
    return span.unpack(modes.attention)
