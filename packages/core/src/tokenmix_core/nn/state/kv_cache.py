"""Keys and values of all tokens, or of the first tokens and a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn.state.layout import Span
from tokenmix_core.nn.state.parts import Bounds, StatePart, copy_all

# a token's position in its sequence, or a tensor of positions
Position = TypeVar("Position", int, Tensor)


class KVState(StatePart):
    """Keys and values, `[N, slots, H, K or V]`, of all tokens, or of the first `sinks` and the last `window` tokens.

    Without a window, a token's slot is its position; when all slots are full, 1.5 times as many as needed are
    allocated, but no more than `reserve` has announced. With a window, the slots are a ring buffer: the token at
    position p ≥ sinks is stored in slot sinks + (p − sinks) mod window.

    Args:
        heads: H.
        key_size: K.
        value_size: V.
        window: number of last tokens to keep; None keeps all.
        sinks: number of first tokens to keep in addition to the window.
    """

    keeps_tokens = True

    def __init__(self, heads: int, key_size: int, value_size: int, *, window: int | None = None, sinks: int = 0):
        self.heads, self.key_size, self.value_size = heads, key_size, value_size
        self.window, self.sinks = window, sinks if window is not None else 0
        self._stored: tuple[Tensor, Tensor] | None = None
        # the announced final length, which limits the number of slots until a sequence exceeds it; 0 if there is none
        self._expected = 0

    def reserve(self, max_length: int) -> None:
        """Announce the final length `max_length`, which limits the spare slots that are allocated."""
        self._expected = max_length

    @property
    def num_slots(self) -> int:
        """Number of allocated slots (entries for tokens) per sequence."""
        return 0 if self._stored is None else self.keys.shape[1]

    @property
    def keys(self) -> Float[Tensor, "N slots H K"]:
        """The keys; raises a ValueError before the first write."""
        return self._held()[0]

    @property
    def values(self) -> Float[Tensor, "N slots H V"]:
        """The values; raises a ValueError before the first write."""
        return self._held()[1]

    def slot(self, position: Position) -> Position:
        """Return the index (slot) in `keys` of the token at `position`, or the slots of a tensor of positions."""
        if self.window is None:
            return position
        if isinstance(position, int):
            return position if position < self.sinks else self.sinks + (position - self.sinks) % self.window
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.window)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values; empty before the first write."""
        return self._stored or ()

    def write(self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], span: Span) -> None:
        """Store the call's keys and values, which are in the layout of `span`."""
        k, v = k.detach(), v.detach()
        self._ensure_slots(k, v, span)
        if self.fixed:
            # decoding step: one token of each sequence
            rows, slots = span.rows, self.slot(span.positions)
            self.keys.index_put_((rows, slots), k.squeeze(1))
            self.values.index_put_((rows, slots), v.squeeze(1))
        elif not span.uniform:
            kept, rows, positions = span.written(self.window, self.sinks)
            slots = self.slot(positions)
            self.keys[rows, slots] = k.flatten(0, 1)[kept]
            self.values[rows, slots] = v.flatten(0, 1)[kept]
        elif self.window is None or span.tokens == 1:
            first = self.slot(span.past)
            self.keys[:, first : first + span.tokens] = k
            self.values[:, first : first + span.tokens] = v
        else:
            head = min(max(self.sinks - span.past, 0), span.tokens)
            kept = _ranges(head, max(head, span.tokens - self.window), span.tokens, span.device)
            slots = self.slot(kept + span.past)
            self.keys.index_copy_(1, slots, k.index_select(1, kept))
            self.values.index_copy_(1, slots, v.index_select(1, kept))

    def leaving(
        self, k: Float[Tensor, "N tokens H K"], v: Float[Tensor, "N tokens H V"], span: Span
    ) -> tuple[Tensor, Tensor, Int[Tensor, "n"]]:
        """Return keys, values and positions of the tokens that leave the window in this call, oldest first.

        Call this before `write`, and only if all sequences have equal lengths (`span.uniform`). Tokens leave the ring
        buffer, or the call itself if it has more tokens than the window. Sinks never leave.
        """
        assert self.window is not None
        assert span.uniform
        first = self.sinks + max(0, span.past - self.sinks - self.window)
        stop = max(first, span.past + span.tokens - self.window)
        held = self.slot(torch.arange(first, max(first, min(stop, span.past)), device=span.device))
        new = slice(max(first - span.past, 0), max(stop - span.past, 0))
        keys, values = (
            x[:, new] if not len(held) else torch.cat((ring.index_select(1, held), x[:, new]), 1)
            for ring, x in ((self.keys if len(held) else k, k), (self.values if len(held) else v, v))
        )
        return keys, values, torch.arange(first, stop, device=span.device)

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values that the call's first token sees; requires `span.uniform`."""
        if self.window is None:
            return self.keys[:, : span.past], self.values[:, : span.past]
        head = min(self.sinks, span.past)
        slots = self.slot(_ranges(head, max(span.past - self.window + 1, head), span.past, span.device))
        return self.keys.index_select(1, slots), self.values.index_select(1, slots)

    def positions(self, span: Span) -> Int[Tensor, "N slots"]:
        """Return for each entry (slot) the position of its token before the call, −1 for an empty one."""
        slots = torch.arange(self.num_slots, device=span.device).unsqueeze(0)
        before = span.before.unsqueeze(1)
        if self.window is None:
            return torch.where(slots < before, slots, -1)
        # position of the newest token before the call that is stored in this slot of the ring
        turns = (before - 1 - slots).div(self.window, rounding_mode="floor")
        newest = torch.where(slots < self.sinks, slots, slots + turns * self.window)
        return torch.where((newest < before) & (newest >= torch.where(slots < self.sinks, 0, self.sinks)), newest, -1)

    def filled(self, span: Span) -> Int[Tensor, "N"]:
        """Return the number of stored tokens of each sequence after the call, int32."""
        return span.after_up_to(None if self.window is None else self.sinks + self.window)

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace the keys by `fn(keys)` and the values by `fn(values)`."""
        if self._stored is not None:
            self._stored = fn(self.keys), fn(self.values)

    def snapshot(self) -> StatePart | None:
        """Return a copy or, without a window, None, because later tokens then overwrite nothing."""
        return None if self.window is None else super().snapshot()

    def clear(self) -> None:
        """Drop all keys and values."""
        self._stored = None

    def _resize(self, max_length: int, more: int) -> None:
        if self._stored is not None and self.window is None and self.num_slots != max_length:
            keys, values = (x[:, : min(max_length, self.num_slots)] for x in self._stored)
            self._stored = _grow(keys, keys, len(keys), max_length), _grow(values, values, len(values), max_length)

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        if self._stored is None or self.window is not None:
            super()._move(storage, more)
            return
        # copy only slots with tokens
        slots = min(storage[0].shape[1], self.num_slots)
        copy_all([x[:, :slots] for x in self._stored], [x[:, :slots] for x in storage])
        self._stored = storage[0], storage[1]

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes for `batch_size` sequences of `seq_len` tokens; a window needs all slots from the start."""
        slots = seq_len if self.window is None else self.sinks + self.window
        size = batch_size * slots * self.heads * (self.key_size + self.value_size) * dtype.itemsize
        return Bounds(size, size)

    def held(self, seq_len: int) -> int:
        """Return the bytes that sequences of `seq_len` tokens use, without spare slots."""
        if self._stored is None:
            return 0
        slots = seq_len if self.window is None else self.num_slots
        return self.keys[:, :slots].nbytes + self.values[:, :slots].nbytes

    @property
    def allocated(self) -> int:
        """Bytes of allocated memory, spare slots included."""
        return 0 if self._stored is None else self.keys.nbytes + self.values.nbytes

    def _held(self) -> tuple[Tensor, Tensor]:
        if self._stored is None:
            raise ValueError("KVState: nothing has been written yet")
        return self._stored

    def _ensure_slots(self, k: Tensor, v: Tensor, span: Span) -> None:
        needed = span.past + span.tokens if self.window is None else self.sinks + self.window
        if needed > self.num_slots:
            slots = needed if self.window is not None else self._padded(needed)
            keys, values = self._stored or (None, None)
            self._stored = _grow(keys, k, span.sequences, slots), _grow(values, v, span.sequences, slots)

    def _padded(self, needed: int) -> int:
        """Return how many slots to allocate for `needed` tokens.

        That is 1.5 times `needed`, rounded up to a multiple of 64, but no more than the announced length. If no length
        is announced, or `needed` exceeds it, there is no such limit, and a first write gets only `needed`, rounded up.
        """
        known = self._expected >= needed
        slots = needed if self._stored is None and not known else needed + needed // 2
        slots = cdiv(slots, 64) * 64
        return min(slots, self._expected) if known else slots


def _grow(old: Tensor | None, x: Tensor, batch: int, slots: int) -> Tensor:
    """Return a tensor `[batch, slots, ...]` with x's dtype and device that begins with the slots of `old`."""
    # fill with zeros: kernels may load an unwritten slot under a mask, and NaN there would reach the sums
    grown = x.new_zeros(batch, slots, *x.shape[2:])
    if old is not None:
        grown[:, : old.shape[1]] = old
    return grown


def _ranges(head: int, start: int, stop: int, device: torch.device) -> Int[Tensor, "n"]:
    """Return the integers 0 … head − 1, followed by start … stop − 1."""
    tail = torch.arange(start, stop, device=device)
    return torch.cat((torch.arange(head, device=device), tail)) if head else tail
