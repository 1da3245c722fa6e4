"""Choosing the next tokens on the device: logits to tokens, written behind the others, until all sequences ended."""

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

from tokenmix_core.modeling.decode_graph import Recorded

# processors that ask for nothing but which tokens there have been, and what recorded choices are told apart by
_ON_DEVICE: dict[type, tuple[str, ...]] = {
    TemperatureLogitsWarper: ("temperature",),
    TopKLogitsWarper: ("top_k", "filter_value"),
    TopPLogitsWarper: ("top_p", "filter_value", "min_tokens_to_keep"),
    MinPLogitsWarper: ("min_p", "filter_value", "min_tokens_to_keep"),
    RepetitionPenaltyLogitsProcessor: ("penalty",),
}
# later than any sequence ends
_NEVER = 1 << 62
# ways of choosing that stay recorded beside a new one
_KINDS = 3


def choosing_needs_host(criterion: Any) -> bool:
    """Tell whether a stopping criterion has to be asked on the host after every token."""
    return type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)


class Sampler:
    """Chooses a token of each sequence from logits, as transformers' `_sample` does, and writes it for the next step.

    All its tensors keep their sizes, so that a choice is recorded as a step is. Processors that need to know how many
    tokens there are, or the host, are called token by token.

    Args:
        recorded: the storage of the steps, whose `ids` and `positions` are written.
        processors: of the logits.
        room: tokens of a row, the prompt's included.
        sample: draw tokens, or take the most likely.
        eos: tokens that end a sequence; none for none.
        pad: follows behind them.

    Attributes:
        tokens: `[N, room]`; places not yet written repeat the last token of the row's prompt, so that they change
            nothing about which tokens there have been.
    """

    def __init__(
        self, recorded: Recorded, processors: LogitsProcessorList, room: int, *, sample: bool, eos: tuple, pad: int
    ):
        self.recorded, self.sample, self.eos, self.pad = recorded, sample, eos, pad
        self.room = room
        N, device = len(recorded.ids), recorded.ids.device
        make: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self._kind: Hashable = ("choice", room, _signature(processors), sample, eos, pad)
        self._records = _signature(processors) is not None
        board = recorded.extra.get(self._kind)
        if board is None:
            recorded.forget_all_but(_KINDS, "choice")
            board = recorded.extra[self._kind] = (
                torch.zeros(N, room, **make),
                torch.zeros(N, 1, **make),
                torch.zeros(N, dtype=torch.bool, device=device),
                torch.zeros(N, **make),
                torch.zeros(N, **make),
                torch.tensor(eos, **make),
            )
        # tokens; how many there are, in every row; which sequences have ended, and of how many tokens they are then;
        # how many of the first ones are padding, to a penalty; what ends a sequence
        self.tokens, self.length, self.ended, self.ends, self._padding, self._eos = board
        self._host_length = 0
        self.processors = LogitsProcessorList(self._own(x) for x in processors)

    def begin(self, prompt: Int[Tensor, "N T"], token: Int[Tensor, "N 1"]) -> None:
        """Start with a prompt and the token after it."""
        T = prompt.shape[1]
        if T:
            self.tokens.copy_(prompt[:, -1:].expand_as(self.tokens))
            self.tokens[:, :T] = prompt
        elif any(type(x) is RepetitionPenaltyLogitsProcessor for x in self.processors):
            # there is no token yet that could stand for none
            self._records = False
        self.length.fill_(T)
        self.ended.zero_()
        self.ends.fill_(_NEVER)
        self._write(token)
        self._host_length = T + 1

    def moved(self, recorded: Recorded, room: int) -> Sampler:
        """The same for other storage of the steps, and with more room."""
        other = Sampler(recorded, self.processors, room, sample=self.sample, eos=self.eos, pad=self.pad)
        other._records, other._host_length = self._records, self._host_length
        other.tokens.copy_(self.tokens[:, -1:].expand_as(other.tokens))
        other.tokens[:, : self.room] = self.tokens
        for name in ("length", "ended", "ends"):
            getattr(other, name).copy_(getattr(self, name))
        recorded.ids.copy_(self.recorded.ids)
        recorded.positions.copy_(self.recorded.positions)
        return other

    def __call__(self, logits: Float[Tensor, "N vocab"]) -> None:
        """Choose and write."""
        if self._records and logits is self.recorded.logits:
            self.recorded.do(self._kind, lambda: self._choose(logits))
        else:
            self._choose(logits)
        self._host_length += 1

    def ask(self, first: int, length: int) -> tuple[int | None, list[list[int]]]:
        """Wait for the device: after how many tokens all sequences had ended, None if they have not; and new tokens.

        Args:
            first, length: the tokens from and to which are wanted.
        """
        new = self.tokens[:, first:length]
        last, *flat = torch.cat((self.ends.max().unsqueeze(0), new.flatten())).tolist()
        width = length - first
        rows = [flat[i * width : (i + 1) * width] for i in range(len(new))]
        return (None if last == _NEVER else last), rows

    def _own(self, processor: Any) -> Any:
        """The processor with its tensor in storage."""
        padding = getattr(processor, "prompt_ignore_length", None)
        if not isinstance(padding, Tensor):
            return processor
        self._padding.copy_(padding)
        processor = copy.copy(processor)
        processor.prompt_ignore_length = self._padding
        return processor

    def _choose(self, logits: Tensor) -> None:
        seen = self.tokens if self._records else self.tokens[:, : self._host_length]
        self._write(draw(self.processors, logits, seen, sample=self.sample))

    def _write(self, token: Int[Tensor, "N 1"]) -> None:
        """Put tokens behind the others, or padding where a sequence has ended."""
        if self.eos:
            token = torch.where(self.ended.unsqueeze(1), self.pad, token)
        self.tokens.scatter_(1, self.length, token)
        self.length.add_(1)
        if self.eos:
            ending = (token == self._eos).any(1) & ~self.ended
            self.ends.copy_(torch.where(ending, self.length.squeeze(1), self.ends))
            self.ended.logical_or_(ending)
        self.recorded.ids.copy_(token)
        self.recorded.positions.add_(1)


def draw(
    processors: LogitsProcessorList, logits: Float[Tensor, "N vocab"], seen: Int[Tensor, "N T"], *, sample: bool
) -> Int[Tensor, "N 1"]:
    """The next tokens after those that were `seen`."""
    scores: Tensor = processors(seen, logits.to(torch.float32, copy=True))  # type: ignore[arg-type]
    if not sample:
        return scores.argmax(-1, keepdim=True)
    # as torch.multinomial draws one, which looks at the probabilities on the host beforehand
    probabilities = scores.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)


def _signature(processors: LogitsProcessorList) -> Hashable | None:
    """The key of recorded choices with these processors; None where one of them cannot be recorded."""
    if any(type(x) not in _ON_DEVICE or isinstance(getattr(x, "prompt_ignore_length", None), int) for x in processors):
        return None
    return tuple(
        (type(x), getattr(x, "prompt_ignore_length", None) is None, *(getattr(x, name) for name in _ON_DEVICE[type(x)]))
        for x in processors
    )
