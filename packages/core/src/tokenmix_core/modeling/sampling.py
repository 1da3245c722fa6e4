"""Sample on the device: turn logits into tokens, append them, and note which sequences have ended."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from tokenmix_core.modeling.captured_steps import CapturedSteps

# logits processors that read only the logits and the tokens so far, each with the attributes on which its graph depends
_ON_DEVICE: dict[type, tuple[str, ...]] = {
    TemperatureLogitsWarper: ("temperature",),
    TopKLogitsWarper: ("top_k", "filter_value"),
    TopPLogitsWarper: ("top_p", "filter_value", "min_tokens_to_keep"),
    MinPLogitsWarper: ("min_p", "filter_value", "min_tokens_to_keep"),
    RepetitionPenaltyLogitsProcessor: ("penalty",),
}
# end index of a sequence that has not ended
_NEVER = 1 << 62
# number of earlier samplers whose graphs are kept for reuse
_KEPT = 3


def needs_host(criterion: Any) -> bool:
    """Return whether a stopping criterion must run on the host after every token."""
    return type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)


class Sampler:
    """Samples one token of each sequence from logits, as transformers' `_sample` does, and writes it for the next step.

    All tensors have constant shapes, so that a CUDA graph can capture sampling, too. Processors that need the host or
    the number of tokens run eagerly.

    Args:
        steps: storage of the decoding steps; sampling writes its `ids` and `positions`.
        processors: logits processors.
        capacity: maximum number of tokens in a row, the prompt included.
        sample: whether to draw tokens at random (True) or to take the most likely ones (False).
        eos: tokens that end a sequence; may be empty.
        pad: token that follows the end of a sequence.

    Attributes:
        tokens: `[N, capacity]`; columns not yet written repeat the prompt's last token, so that penalties for
            repetition see no tokens that do not occur.
    """

    def __init__(
        self,
        steps: CapturedSteps,
        processors: LogitsProcessorList,
        capacity: int,
        *,
        sample: bool,
        eos: tuple,
        pad: int,
    ):
        self.steps, self.sample, self.eos, self.pad = steps, sample, eos, pad
        self.capacity = capacity
        N, device = len(steps.ids), steps.ids.device
        make: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._key: Hashable = ("sampling", capacity, _signature(processors), sample, eos, pad)
        self._captures = _signature(processors) is not None
        buffers = steps.extra.get(self._key)
        if buffers is None:
            steps.evict_all_but(_KEPT, "sampling")
            buffers = steps.extra[self._key] = (
                torch.zeros(N, capacity, **make),
                torch.zeros(N, 1, **make),
                torch.zeros(N, dtype=torch.bool, device=device),
                torch.zeros(N, **make),
                torch.zeros(N, **make),
                torch.tensor(eos, **make),
            )
        # `length` is the number of tokens in every row of `tokens`; a sequence has `ended` at length `ends`; a penalty
        # ignores the first `_padding` tokens; `_eos` are the tokens that end a sequence
        self.tokens, self.length, self.ended, self.ends, self._padding, self._eos = buffers
        self._host_length = 0
        self.processors = LogitsProcessorList(self._own(x) for x in processors)

    def begin(self, prompt: Int[Tensor, "N T"], token: Int[Tensor, "N 1"]) -> None:
        """Start from a prompt and the token sampled after it."""
        T = prompt.shape[1]
        if T:
            self.tokens.copy_(prompt[:, -1:].expand_as(self.tokens))
            self.tokens[:, :T] = prompt
        elif any(type(x) is RepetitionPenaltyLogitsProcessor for x in self.processors):
            # without a prompt there is no token to fill the unwritten columns, so do not capture
            self._captures = False
        self.length.fill_(T)
        self.ended.zero_()
        self.ends.fill_(_NEVER)
        self._write(token)
        self._host_length = T + 1

    def moved(self, steps: CapturedSteps, capacity: int) -> Sampler:
        """Return a copy of the sampler that uses other storage with a larger capacity."""
        other = Sampler(steps, self.processors, capacity, sample=self.sample, eos=self.eos, pad=self.pad)
        other._captures, other._host_length = self._captures, self._host_length
        other.tokens.copy_(self.tokens[:, -1:].expand_as(other.tokens))
        other.tokens[:, : self.capacity] = self.tokens
        for name in ("length", "ended", "ends"):
            getattr(other, name).copy_(getattr(self, name))
        steps.ids.copy_(self.steps.ids)
        steps.positions.copy_(self.steps.positions)
        return other

    def __call__(self, logits: Float[Tensor, "N vocab"]) -> None:
        """Sample one token of each sequence and write it."""
        if self._captures and logits is self.steps.logits:
            self.steps.run(self._key, lambda: self._sample(logits))
        else:
            self._sample(logits)
        self._host_length += 1

    def ask(self, first: int, length: int) -> tuple[int | None, list[list[int]]]:
        """Synchronise; return the length at which all sequences had ended, or None, and tokens `first` to `length` − 1.

        The second value has one list of tokens per sequence.
        """
        new = self.tokens[:, first:length]
        last, *flat = torch.cat((self.ends.max().unsqueeze(0), new.flatten())).tolist()
        width = length - first
        rows = [flat[i * width : (i + 1) * width] for i in range(len(new))]
        return (None if last == _NEVER else last), rows

    def _own(self, processor: Any) -> Any:
        """Return a logits processor; if it has a tensor, a copy with the tensor at a fixed address, for CUDA graphs."""
        padding = getattr(processor, "prompt_ignore_length", None)
        if not isinstance(padding, Tensor):
            return processor
        self._padding.copy_(padding)
        processor = copy.copy(processor)
        processor.prompt_ignore_length = self._padding
        return processor

    def _sample(self, logits: Tensor) -> None:
        seen = self.tokens if self._captures else self.tokens[:, : self._host_length]
        self._write(draw(self.processors, logits, seen, sample=self.sample))

    def _write(self, token: Int[Tensor, "N 1"]) -> None:
        """Append `token` to each sequence, or padding if the sequence has ended.

        Note which sequences end, and set the inputs of the next step.
        """
        if self.eos:
            token = torch.where(self.ended.unsqueeze(1), self.pad, token)
        self.tokens.scatter_(1, self.length, token)
        self.length.add_(1)
        if self.eos:
            ending = (token == self._eos).any(1) & ~self.ended
            self.ends.copy_(torch.where(ending, self.length.squeeze(1), self.ends))
            self.ended.logical_or_(ending)
        self.steps.ids.copy_(token)
        self.steps.positions.add_(1)


def draw(
    processors: LogitsProcessorList, logits: Float[Tensor, "N vocab"], seen: Int[Tensor, "N T"], *, sample: bool
) -> Int[Tensor, "N 1"]:
    """Return the next tokens, sampled or (if not `sample`) the most likely, after `processors` changed the logits.

    `seen` are the tokens so far.
    """
    scores: Tensor = processors(seen, logits.to(torch.float32, copy=True))  # type: ignore[arg-type]
    if not sample:
        return scores.argmax(-1, keepdim=True)
    # sample by exponential noise, as torch.multinomial does, which would also synchronise to check the probabilities
    probabilities = scores.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)


def _signature(processors: LogitsProcessorList) -> Hashable | None:
    """Return the graph key of these processors; None if one of them cannot be captured."""
    if any(type(x) not in _ON_DEVICE or isinstance(getattr(x, "prompt_ignore_length", None), int) for x in processors):
        return None
    return tuple(
        (type(x), getattr(x, "prompt_ignore_length", None) is None, *(getattr(x, name) for name in _ON_DEVICE[type(x)]))
        for x in processors
    )
