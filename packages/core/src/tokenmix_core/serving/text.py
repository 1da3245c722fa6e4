"""Convert a request's tokens to text as they arrive: only whole characters, and no text after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Convert a growing list of tokens to text.

    Args:
        tokenizer: the model's tokenizer.
        stop: stop strings; the text ends before the first occurrence of any of them.

    Attributes:
        stopped: True once a stop string has occurred.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        # tokens before index `_read` have been decoded; those from index `_context` on are decoded again together with
        # new tokens, whose text depends on the tokens before them
        self._context = self._read = 0
        # decoded text that may be the beginning of a stop string, and has not been returned yet
        self._held = ""

    def add(self, tokens: Sequence[int], *, ended: bool = False) -> str:
        """Return the text of `tokens`, all tokens of the request so far, without the text that earlier calls returned.

        An end of the text that may be an incomplete character or the beginning of a stop string is returned only when
        further tokens decide it, or if `ended` is true.
        """
        if self.stopped:
            return ""
        before, after = (self._decode(tokens[self._context : end]) for end in (self._read, len(tokens)))
        # a replacement character at the end means that bytes of a character are still missing
        if ended or (len(after) > len(before) and not after.endswith("\ufffd")):
            self._held += after[len(before) :]
            self._context, self._read = self._read, len(tokens)
        found = [i for x in self.stop if (i := self._held.find(x)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        kept = 0 if ended else max((_overlap(self._held, x) for x in self.stop), default=0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
