"""States that mixers keep between calls, and where the tokens of one call lie in the sequences kept.

A layer's `LayerState` is made of named parts, each with the batch as its first dimension: `TensorState` holds one
tensor of constant size (a recurrent state, the last inputs of a convolution), `KVState` keys and values, all or a
window of them, `RaggedKVState` (`nn/ragged_kv.py`) of each head as many as were chosen. Sequences are stored without
padding, each from its own position 0 on, so that batches of unequal lengths need no masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from tokenmix_core._utils.validation import undefined
from tokenmix_core.chunking import cdiv, cu_seqlens_from_lengths

# where a token is in its sequence: of one token, or of several
Position = TypeVar("Position", int, Tensor)


class _once:
    """A property computed at its first use; the lock in Python 3.11's `cached_property` stops torch.compile."""

    def __init__(self, fn: Callable[[Any], Any]):
        self.fn, self.__doc__ = fn, fn.__doc__

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        value = obj.__dict__[self.fn.__name__] = self.fn(obj)
        return value


class Span:
    """Where the tokens of one call lie: N rows of `tokens` places each, after what the sequences already hold.

    Without a mask the call's tensors are dense, `[N, tokens, ...]`. With one they are packed, `[1, total, ...]`:
    padding never reaches a mixer. In a graph of fixed sizes it cannot be dropped: without states it goes behind the
    real tokens of its row, `[N, tokens, ...]`, where causal mixers do not see it; with states it is one more sequence
    of a packed call, after all others, which nobody reads.

    Args:
        batch: N.
        tokens: places in a row of this call.
        device: of the index tensors.
        past: tokens each sequence holds before the call; an upper bound where `lengths` is given.
        lengths: `[N]` int64, the exact numbers where sequences differ.
        mask: `[N, tokens]`, True for real tokens; None when all are real.
        count: what `past` is without room to spare: tokens of the calls before, as the host counts them; None for
            `past`. A decoding step in fixed storage may choose among forms of itself by it (`Mixer.step_form`).
        known: gives the numbers of `lengths` where the host can tell them; None where it would have to ask.
        fixed: with a mask, give all tensors sizes that do not depend on its values.
        stateless: whether no states are kept of the call.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        *,
        past: int = 0,
        lengths: Int[Tensor, "N"] | None = None,
        mask: Bool[Tensor, "N tokens"] | None = None,
        count: int | None = None,
        known: Callable[[], Sequence[int]] | None = None,
        fixed: bool = False,
        stateless: bool = False,
    ):
        self.batch, self.tokens, self.device, self.past = batch, tokens, device, past
        self.lengths, self.mask, self.known = lengths, mask, known
        self.count = past if count is None else count
        # padding is among the call's tokens: behind the real ones of its row, or as a sequence of its own
        self.aligned = fixed and stateless and mask is not None
        self.fixed = fixed and not stateless and mask is not None
        # sequences that states are kept of during the call
        self.sequences = batch + 1 if self.fixed else batch
        self._written: dict[tuple[int | None, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._fills: dict[int, tuple[Tensor, Tensor]] = {}
        self._bounded: dict[int | None, Tensor] = {}

    @property
    def uniform(self) -> bool:
        """Tell, without asking the device, whether all sequences hold the same number of tokens before and after."""
        return self.lengths is None and self.mask is None

    @property
    def keeps_padding(self) -> bool:
        """Tell whether padding is among the call's tokens."""
        return self.aligned or self.fixed

    def ends(self, every: int) -> bool:
        """Tell of a call of one token whether some sequence's is the last of a run of `every`, counted from its first.

        Waits for the device where the host does not know the lengths.
        """
        if self.known is None and self.lengths is None:
            return (self.past + 1) % every == 0
        if self.known is None:
            return bool((self.after % every == 0).any())
        return any((n + 1) % every == 0 for n in self.known())

    def fill(self, every: int) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
        """Of a call of one token its place in its run of `every` tokens, and how many the run has then (int32)."""
        if every not in self._fills:
            place = self.before % every
            self._fills[every] = place, (place + 1).to(torch.int32)
        return self._fills[every]

    @_once
    def before(self) -> Int[Tensor, "N"]:
        """Tokens each sequence holds before the call."""
        if self.lengths is None:
            return torch.full((self.sequences,), self.past, dtype=torch.int64, device=self.device)
        return torch.cat((self.lengths, self.lengths.new_zeros(1))) if self.fixed else self.lengths

    @_once
    def after(self) -> Int[Tensor, "N"]:
        """Tokens each sequence holds after the call."""
        return self.before + (self.tokens if self.mask is None else self._counts)

    def after_up_to(self, most: int | None) -> Int[Tensor, "N"]:
        """Of the tokens each sequence holds after the call at most so many, int32; None for all."""
        if most not in self._bounded:
            after = self.after if most is None else self.after.clamp(max=most)
            self._bounded[most] = after.to(torch.int32)
        return self._bounded[most]

    @_once
    def _counts(self) -> Int[Tensor, "N"]:
        """Tokens of each sequence in the call."""
        assert self.mask is not None
        counts = self.mask.sum(1)
        return torch.cat((counts, (~self.mask).sum().unsqueeze(0))) if self.fixed else counts

    @_once
    def index(self) -> Int[Tensor, "total"]:
        """The places of the call's tokens in the flattened `[N · tokens]`; waits for the device, unless fixed."""
        assert self.mask is not None
        if self.aligned:
            order = (~self.mask).to(torch.uint8).argsort(dim=1, stable=True)
            return (order + self.tokens * torch.arange(self.batch, device=self.device).unsqueeze(1)).flatten()
        if self.fixed:
            return (~self.mask).flatten().to(torch.uint8).argsort(stable=True)
        return self.mask.flatten().nonzero().squeeze(1)

    @_once
    def cu_seqlens(self) -> Int[Tensor, "N_plus_1"] | None:
        """Boundaries of the packed sequences; None for a dense call."""
        return None if self.mask is None or self.aligned else cu_seqlens_from_lengths(self._counts)

    @_once
    def rows(self) -> Int[Tensor, "total"]:
        """The sequence of each token, in the order of the call's tensors."""
        rows = torch.arange(self.batch, device=self.device)
        if self.tokens > 1:
            rows = rows.repeat_interleave(self.tokens, output_size=self.batch * self.tokens)
        if self.mask is None:
            return rows
        return (torch.where(self.mask.flatten(), rows, self.batch) if self.fixed else rows)[self.index]

    @_once
    def positions(self) -> Int[Tensor, "total"]:
        """The position of each token in its sequence, in the order of the call's tensors."""
        if self.mask is None:
            offsets = torch.arange(self.tokens, device=self.device).expand(self.batch, -1)
        else:
            offsets = self.mask.cumsum(1) - 1
        positions = (self.before[: self.batch].unsqueeze(1) + offsets).flatten()
        if self.fixed:
            assert self.mask is not None
            padding = ~self.mask.flatten()
            positions = torch.where(padding, padding.cumsum(0) - 1, positions)
        return positions if self.mask is None else positions[self.index]

    @property
    def layout(self) -> tuple[int, int]:
        """The first two dimensions of the call's tensors; −1 for the tokens of a packed call."""
        return (self.batch, self.tokens) if self.mask is None or self.aligned else (1, -1)

    def pack(self, x: Shaped[Tensor, "N tokens *rest"]) -> Shaped[Tensor, "B T *rest"]:
        """Bring a tensor into the layout of the call, without padding: nothing to do for a dense one."""
        return x if self.mask is None else x.flatten(0, 1)[self.index].unflatten(0, self.layout)

    def unpack(self, x: Shaped[Tensor, "B T *rest"]) -> Shaped[Tensor, "N tokens *rest"]:
        """The inverse of `pack`, with zeros for padding: of `[1, total, ...]`, or of a dense call's own layout."""
        if self.mask is None:
            return x
        out = x.new_zeros(self.batch * self.tokens, *x.shape[2:])
        out = out.index_copy(0, self.index, x.flatten(0, 1)).unflatten(0, (self.batch, self.tokens))
        if self.keeps_padding:
            out = out.masked_fill(~self.mask.view(*self.mask.shape, *[1] * (out.dim() - 2)), 0)
        return out

    def written(self, window: int | None, sinks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which tokens a store with this window keeps: their places in the call's tensors, rows and positions."""
        key = (window, sinks)
        if key not in self._written:
            kept, rows, positions = torch.arange(len(self.rows), device=self.device), self.rows, self.positions
            last = None
            if window is not None and self.tokens > 1:
                last = (positions >= self.after[rows] - window) | (positions < sinks)
            if self.fixed:
                # the rest goes where nobody reads
                wanted = rows < self.batch if last is None else last & (rows < self.batch)
                rows, positions = torch.where(wanted, rows, self.batch), torch.where(wanted, positions, 0)
            elif last is not None:
                kept = last.nonzero().squeeze(1)
                rows, positions = rows[kept], positions[kept]
            self._written[key] = kept, rows, positions
        return self._written[key]


class Bounds(NamedTuple):
    """Between how many bytes a state takes: `least` and `most` are equal where its size does not depend on data."""

    least: int
    most: int

    @classmethod
    def sum(cls, bounds: Iterable[Bounds]) -> Bounds:
        """The bounds of several states together."""
        pairs = list(bounds)
        return cls(sum(x.least for x in pairs), sum(x.most for x in pairs))


class StatePart:
    """One part of a layer's state: `TensorState`, `KVState`, or a mixer's own, which the cache handles unseen.

    Attributes:
        window: tokens kept; None where nothing leaves by its age.
        keeps_tokens: whether single tokens are kept, as keys and values are.
        fixed: whether decoding steps find everything in the same memory; see `fix`.
    """

    window: int | None = None
    keeps_tokens: bool = False
    fixed: bool = False

    def reserve(self, max_length: int) -> None:
        """Take note that sequences will reach so many tokens: room may be made at once."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors held, each `[N, ...]`: all that a decoding step reads and writes."""
        raise undefined(self, "tensors", "the property that holds all tensors of the state")

    def fix(self, room: int, more: int, storage: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Stay in the same memory from now on, until `loosen`: decoding steps change numbers there, and nothing else.

        Args:
            room: tokens that the longest sequence may reach meanwhile.
            more: tokens that are left until then.
            storage: what `fix` returned for a state like this one; None for memory of its own.

        Returns:
            The tensors that hold the state.

        Raises:
            ValueError: storage of other shapes or dtypes, or too small.
        """
        if storage is None:
            self._widen(room, more)
            storage = self.tensors
        else:
            self._move(storage, more)
        self.fixed = True
        return tuple(storage)

    def loosen(self) -> None:
        """Be free to move again."""
        self.fixed = False

    def _widen(self, room: int, more: int) -> None:
        """Make room for sequences of `room` tokens, `more` than there are; nothing to do for a constant size."""

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        """Copy what is held to `storage` and hold it there."""
        copy_all(self.tensors, storage)
        there = iter(storage)
        self.map_(lambda _: next(there))

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor, `[N, ...]`, by a function of it, in the order of `tensors`."""
        raise undefined(self, "map_(fn)", "which replaces every tensor by a function of it")

    def clear(self) -> None:
        """Forget everything."""
        raise undefined(self, "clear()", "which forgets everything")

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Between how many bytes the state of `batch_size` sequences of `seq_len` tokens takes."""
        raise undefined(
            self, "bounds(seq_len, batch_size, dtype)", "which returns the least and most bytes of the state"
        )

    def held(self, seq_len: int) -> int:
        """Bytes of the state now held, of sequences of `seq_len` tokens; spare room does not count."""
        raise undefined(self, "held(seq_len)", "which returns the bytes that are held")

    @property
    def allocated(self) -> int:
        """Bytes of memory taken."""
        raise undefined(self, "allocated", "the property that holds the bytes of memory taken")


class TensorState(StatePart):
    """One tensor of constant size, `[N, *shape]`.

    Args:
        shape: without the batch.
        dtype: at least this one, and of whole numbers this one; None for the dtype of the activations.
    """

    def __init__(self, *shape: int, dtype: torch.dtype | None = None):
        self.shape, self.dtype = shape, dtype
        self.value: Tensor | None = None

    def get(self, batch: int, like: Tensor) -> Tensor:
        """The value, zeros before the first one was stored."""
        if self.value is None:
            dtype = like.dtype if self.dtype is None else self.dtype
            if dtype.is_floating_point:
                dtype = torch.promote_types(dtype, like.dtype)
            self.value = like.new_zeros(batch, *self.shape, dtype=dtype)
        return self.value

    def set(self, value: Tensor) -> None:
        """Store a value for the next call; gradients do not cross calls."""
        self.put(value.detach().contiguous())

    def put(self, value: Tensor) -> None:
        """Go on with a value inside a call, gradients included; fixed storage is overwritten with it."""
        if self.fixed and self.value is not None:
            self.value.copy_(value)
        else:
            self.value = value

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor, if there is one."""
        return () if self.value is None else (self.value,)

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor by a function of it."""
        if self.value is not None:
            self.value = fn(self.value)

    def clear(self) -> None:
        """Forget everything."""
        self.value = None

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """The bytes of the state of `batch_size` sequences, of whatever length."""
        size = batch_size * math.prod(self.shape) * (self.dtype or dtype).itemsize
        return Bounds(size, size)

    def held(self, seq_len: int) -> int:
        """Bytes of the state now held, of sequences of `seq_len` tokens."""
        return 0 if self.value is None else self.value.nbytes

    @property
    def allocated(self) -> int:
        """Bytes of memory taken."""
        return self.held(0)


class KVState(StatePart):
    """Keys and values, `[N, places, H, K or V]`: all of them, or the first `sinks` and the last `window`.

    All of them: the place of a token is its position, and the room grows by half when it is full. A window: a ring,
    where the token at position p ≥ sinks takes the place sinks + (p − sinks) mod window.

    Args:
        heads: H.
        key_size: K.
        value_size: V.
        window: tokens kept; None keeps all.
        sinks: first tokens kept beside the window.
    """

    keeps_tokens = True

    def __init__(self, heads: int, key_size: int, value_size: int, *, window: int | None = None, sinks: int = 0):
        self.heads, self.key_size, self.value_size = heads, key_size, value_size
        self.window, self.sinks = window, sinks if window is not None else 0
        self._stored: tuple[Tensor, Tensor] | None = None
        # places to make room for at once, where the final length is known beforehand
        self._expected = 0

    def reserve(self, max_length: int) -> None:
        """Make room for so many tokens at the first write."""
        self._expected = max_length

    @property
    def places(self) -> int:
        """Tokens there is room for."""
        return 0 if self._stored is None else self.keys.shape[1]

    @property
    def keys(self) -> Float[Tensor, "N places H K"]:
        """The keys; there are none before the first write."""
        return self._held()[0]

    @property
    def values(self) -> Float[Tensor, "N places H V"]:
        """The values; there are none before the first write."""
        return self._held()[1]

    def place(self, position: Position) -> Position:
        """The place of a position, an integer or a tensor of them."""
        if self.window is None:
            return position
        if isinstance(position, int):
            return position if position < self.sinks else self.sinks + (position - self.sinks) % self.window
        return torch.where(position < self.sinks, position, self.sinks + (position - self.sinks) % self.window)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values, if there are any."""
        return self._stored or ()

    def write(self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], span: Span) -> None:
        """Store the call's keys and values, in the layout of the call."""
        k, v = k.detach(), v.detach()
        self._make_room(k, v, span)
        if self.fixed:
            # one token of each sequence
            rows, places = span.rows, self.place(span.positions)
            self.keys.index_put_((rows, places), k.squeeze(1))
            self.values.index_put_((rows, places), v.squeeze(1))
        elif not span.uniform:
            kept, rows, positions = span.written(self.window, self.sinks)
            places = self.place(positions)
            self.keys[rows, places] = k.flatten(0, 1)[kept]
            self.values[rows, places] = v.flatten(0, 1)[kept]
        elif self.window is None or span.tokens == 1:
            first = self.place(span.past)
            self.keys[:, first : first + span.tokens] = k
            self.values[:, first : first + span.tokens] = v
        else:
            head = min(max(self.sinks - span.past, 0), span.tokens)
            kept = _ranges(head, max(head, span.tokens - self.window), span.tokens, span.device)
            places = self.place(kept + span.past)
            self.keys.index_copy_(1, places, k.index_select(1, kept))
            self.values.index_copy_(1, places, v.index_select(1, kept))

    def leaving(
        self, k: Float[Tensor, "N tokens H K"], v: Float[Tensor, "N tokens H V"], span: Span
    ) -> tuple[Tensor, Tensor, Int[Tensor, "n"]]:
        """Keys, values and positions of the tokens that leave the window of a uniform call, oldest first.

        Ask before `write`. They come from the ring and from the call itself, whose first tokens may enter and leave in
        the same call; sinks never leave.
        """
        assert self.window is not None
        assert span.uniform
        first = self.sinks + max(0, span.past - self.sinks - self.window)
        stop = max(first, span.past + span.tokens - self.window)
        held = self.place(torch.arange(first, max(first, min(stop, span.past)), device=span.device))
        new = slice(max(first - span.past, 0), max(stop - span.past, 0))
        keys, values = (
            x[:, new] if not len(held) else torch.cat((ring.index_select(1, held), x[:, new]), 1)
            for ring, x in ((self.keys if len(held) else k, k), (self.values if len(held) else v, v))
        )
        return keys, values, torch.arange(first, stop, device=span.device)

    def read(self, span: Span) -> tuple[Tensor, Tensor]:
        """The past that a uniform call sees: all of it, or the sinks and the last window − 1 tokens, in order."""
        if self.window is None:
            return self.keys[:, : span.past], self.values[:, : span.past]
        head = min(self.sinks, span.past)
        places = self.place(_ranges(head, max(span.past - self.window + 1, head), span.past, span.device))
        return self.keys.index_select(1, places), self.values.index_select(1, places)

    def positions(self, span: Span) -> Int[Tensor, "N places"]:
        """The position of the token in each place before the call, −1 for an empty place."""
        places = torch.arange(self.places, device=span.device).unsqueeze(0)
        before = span.before.unsqueeze(1)
        if self.window is None:
            return torch.where(places < before, places, -1)
        # the newest position of each ring place that is below the length
        turns = (before - 1 - places).div(self.window, rounding_mode="floor")
        newest = torch.where(places < self.sinks, places, places + turns * self.window)
        return torch.where((newest < before) & (newest >= torch.where(places < self.sinks, 0, self.sinks)), newest, -1)

    def filled(self, span: Span) -> Int[Tensor, "N"]:
        """Filled places after the call, int32."""
        return span.after_up_to(None if self.window is None else self.sinks + self.window)

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace keys and values by a function of each."""
        if self._stored is not None:
            self._stored = fn(self.keys), fn(self.values)

    def clear(self) -> None:
        """Forget everything."""
        self._stored = None

    def _widen(self, room: int, more: int) -> None:
        if self._stored is not None and self.window is None and self.places != room:
            keys, values = (x[:, : min(room, self.places)] for x in self._stored)
            self._stored = _grow(keys, keys, len(keys), room), _grow(values, values, len(values), room)

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        if self._stored is None or self.window is not None:
            super()._move(storage, more)
            return
        # places behind the tokens held need not be copied
        places = min(storage[0].shape[1], self.places)
        copy_all([x[:, :places] for x in self._stored], [x[:, :places] for x in storage])
        self._stored = storage[0], storage[1]

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """The bytes of the state of `batch_size` sequences of `seq_len` tokens; a window's from the first token on."""
        places = seq_len if self.window is None else self.sinks + self.window
        size = batch_size * places * self.heads * (self.key_size + self.value_size) * dtype.itemsize
        return Bounds(size, size)

    def held(self, seq_len: int) -> int:
        """Bytes of the state now held, of sequences of `seq_len` tokens; spare room does not count."""
        if self._stored is None:
            return 0
        places = seq_len if self.window is None else self.places
        return self.keys[:, :places].nbytes + self.values[:, :places].nbytes

    @property
    def allocated(self) -> int:
        """Bytes of memory taken, spare room included."""
        return 0 if self._stored is None else self.keys.nbytes + self.values.nbytes

    def _held(self) -> tuple[Tensor, Tensor]:
        if self._stored is None:
            raise ValueError("KVState: nothing has been written yet")
        return self._stored

    def _make_room(self, k: Tensor, v: Tensor, span: Span) -> None:
        needed = span.past + span.tokens if self.window is None else self.sinks + self.window
        if needed > self.places:
            room = needed if self.window is not None else self._room(needed)
            keys, values = self._stored or (None, None)
            self._stored = _grow(keys, k, span.sequences, room), _grow(values, v, span.sequences, room)

    def _room(self, needed: int) -> int:
        known = self._expected >= needed
        room = needed if self._stored is None and not known else needed + needed // 2
        room = cdiv(room, 64) * 64
        return min(room, self._expected) if known else room


def copy_all(values: Sequence[Tensor], storage: Sequence[Tensor]) -> None:
    """Copy each value to its place.

    Raises:
        ValueError: another number of them, or another shape, dtype or device.
    """
    kinds = [[(x.shape, x.dtype, x.device) for x in tensors] for tensors in (values, storage)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the storage holds {kinds[1]}, which does not fit a state of {kinds[0]}")
    for value, place in zip(values, storage, strict=True):
        place.copy_(value)


def _grow(old: Tensor | None, x: Tensor, batch: int, room: int) -> Tensor:
    """`[batch, room, ...]` like x, beginning with the old places."""
    # zeros: a place that was never written may be read under a mask, and must not be NaN
    grown = x.new_zeros(batch, room, *x.shape[2:])
    if old is not None:
        grown[:, : old.shape[1]] = old
    return grown


def _ranges(head: int, start: int, stop: int, device: torch.device) -> Int[Tensor, "n"]:
    """0 … head − 1, then start … stop − 1."""
    tail = torch.arange(start, stop, device=device)
    return torch.cat((torch.arange(head, device=device), tail)) if head else tail


class LayerState:
    """The named parts a layer keeps: `LayerState(kv=KVState(...))`, then `state.kv`, with `state.span` for the call."""

    span: Span

    def __init__(self, **parts: StatePart):
        self.parts = parts

    def __getattr__(self, name: str):
        try:
            return self.__dict__["parts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        return f"LayerState({', '.join(f'{name}={type(part).__name__}' for name, part in self.parts.items())})"
