"""Base class of the parts of a layer's state, and the parts of constant size (recurrent states, convolution inputs)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from tokenmix_core._utils.validation import undefined
from tokenmix_core.nn.state.layout import Span


class Bounds(NamedTuple):
    """Minimum and maximum bytes of a state; equal if its size does not depend on data."""

    least: int
    most: int

    @classmethod
    def sum(cls, bounds: Iterable[Bounds]) -> Bounds:
        """Return the sum of the bounds of several states."""
        pairs = list(bounds)
        return cls(sum(x.least for x in pairs), sum(x.most for x in pairs))


class StatePart:
    """One part of a layer's state: `TensorState`, `KVState`, `RaggedKVState`, `PagedKVState`, or the mixer's own.

    Attributes:
        window: number of last tokens kept; None if tokens are not dropped by age.
        keeps_tokens: whether the state stores single tokens, as a KV cache does.
        fixed: whether the tensors keep their addresses between decoding steps; see `fix`.
        takes_slots: whether calls on whole sequences, not only decoding steps, can read and overwrite the state in
            slots of pools; its size is then constant, and `value` holds its tensors.
        slots: int32 or int64 `[N]`, or None. With slots, which also `PagedKVState` supports, the tensors are pools
            `[S, ...]`, and sequence n of a call reads and overwrites slot `slots[n]` of each; `map_` changes nothing.
            In a decoding step, a negative slot marks padding.
        fresh: bool `[N]`, True for a sequence of a call in slots that starts from an empty state; None if none does.
        views: the parts in slots of one pool, whose `value` changes if the pool grows; None if it does not grow.
    """

    window: int | None = None
    keeps_tokens: bool = False
    fixed: bool = False
    takes_slots: ClassVar[bool] = False
    slots: Tensor | None = None
    fresh: Tensor | None = None
    views: WeakSet[StatePart] | None = None

    def reserve(self, max_length: int) -> None:
        """Announce that sequences will reach `max_length` tokens, which limits spare memory; by default do nothing."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the state, each `[N, ...]`: all that a decoding step reads or overwrites."""
        raise undefined(self, "tensors", "the property that holds all tensors of the state")

    def fix(self, max_length: int, more: int, storage: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
        """Keep the addresses of all tensors until `loosen`: decoding steps then only overwrite their values.

        Args:
            max_length: tokens that the longest sequence may reach.
            more: further tokens of each sequence to allocate memory for, if the state's size depends on data.
            storage: tensors that `fix` of a state with the same shapes returned, to copy the values to; None to use the
                state's own tensors.

        Returns:
            The tensors that hold the state.

        Raises:
            ValueError: storage of other shapes or dtypes, or too small.
        """
        if storage is None:
            self._resize(max_length, more)
            storage = self.tensors
        else:
            self._move(storage, more)
        self.fixed = True
        return tuple(storage)

    def free_tokens(self, more: int) -> int:
        """Return how many of `more` further tokens of each sequence surely fit if `fixed`; may wait for the device."""
        return more

    def loosen(self) -> None:
        """End the effect of `fix`: tensors may be reallocated again."""
        self.fixed = False

    def _resize(self, max_length: int, more: int) -> None:
        """Allocate memory for `max_length` tokens and `more` new ones per sequence; a constant size needs none."""

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        """Copy the values to `storage`, and use `storage` as the state's memory from now on."""
        copy_all(self.tensors, storage)
        targets = iter(storage)
        self.map_(lambda _: next(targets))

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor `[N, ...]` by `fn` of it, in the order of `tensors`."""
        raise undefined(self, "map_(fn)", "which replaces every tensor by a function of it")

    def snapshot(self) -> StatePart | None:
        """Return a copy for `restore`; None if later tokens only append to the contents."""
        copied = copy.copy(self)
        copied.fixed = False
        copied.map_(torch.clone)
        return copied

    def restore(self, snapshot: StatePart | None) -> None:
        """Return to the contents of `snapshot`, which stays usable."""
        if snapshot is not None:
            vars(self).update(vars(snapshot.snapshot()))

    def in_slots(self, slots: Tensor, fresh: Tensor | None = None) -> StatePart:
        """Return this state, a pool, as the state of the sequences in `slots`, which calls overwrite."""
        held = copy.copy(self)
        held.fixed, held.slots, held.fresh = True, slots, fresh
        if held.views is not None:
            held.views.add(held)
        return held

    def share_rows(self, sources: Sequence[tuple[StatePart, Sequence[int]]]) -> None:
        """Refer to the slots of the rows that `sources` lists from other states in slots of one pool."""
        slots = [part.slots[list(rows)] for part, rows in sources if part.slots is not None]
        vars(self).update(vars(sources[0][0].in_slots(torch.cat(slots))))
        if self.views is not None:
            self.views.add(self)

    def gather_rows(self, sources: Sequence[tuple[StatePart, Sequence[int]]]) -> None:
        """Replace the contents by copies of the rows that `sources` lists from other states of the same layer."""
        held = [(part, list(rows)) for part, rows in sources]
        written = next((part for part, _ in held if part.tensors), None)
        if written is None:
            self.clear()
            return
        # sequences of other lengths have fewer slots
        largest = zip(*([x.shape[1:] for x in part.tensors] for part, _ in held if part.tensors), strict=True)
        sizes, total = iter([[*map(max, zip(*x, strict=True))] for x in largest]), sum(len(rows) for _, rows in held)
        copied, start = copy.copy(written), 0
        copied.fixed, copied.slots, copied.fresh, copied.views = False, None, None, None
        copied.map_(lambda x: x.new_zeros(total, *next(sizes)))
        for part, rows in held:
            device = written.tensors[0].device
            targets, picked = (torch.tensor(x, device=device) for x in (range(start, start + len(rows)), rows))
            copied.write_rows(targets, part, picked)
            start += len(rows)
        vars(self).update(vars(copied))

    def write_rows(self, rows: Tensor, source: StatePart | None, picked: Tensor) -> None:
        """Overwrite the rows `rows` by the rows `picked` of another state of the same layer, or by zeros if it is None.

        Entries (slots, pages) that the source has beyond this state's are not copied; they must hold no tokens.
        """
        if source is not None and source.slots is not None:
            picked = source.slots.long().index_select(0, picked)
        for i, target in enumerate(self.tensors):
            values = source.tensors[i].index_select(0, picked) if source is not None and source.tensors else None
            if values is not None and values.shape[1:] == target.shape[1:]:
                target.index_copy_(0, rows, values)
                continue
            # zeros behind the copied entries, because kernels may load unwritten entries
            target.index_fill_(0, rows, 0)
            if values is not None:
                inside = tuple(slice(min(n, m)) for n, m in zip(values.shape[1:], target.shape[1:], strict=True))
                target[(rows, *inside)] = values[(slice(None), *inside)]

    def clear(self) -> None:
        """Drop all contents."""
        raise undefined(self, "clear()", "which drops all contents")

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the minimum and maximum bytes of the state of `batch_size` sequences of `seq_len` tokens."""
        raise undefined(
            self, "bounds(seq_len, batch_size, dtype)", "which returns the least and most bytes of the state"
        )

    def held(self, seq_len: int) -> int:
        """Return the bytes that sequences of `seq_len` tokens use, without spare capacity."""
        raise undefined(self, "held(seq_len)", "which returns the bytes that are held")

    @property
    def allocated(self) -> int:
        """Number of bytes of allocated memory."""
        raise undefined(self, "allocated", "the property that holds the bytes of memory taken")


class TensorState(StatePart):
    """One tensor of constant size, `[N, *shape]`.

    Args:
        shape: the tensor's shape without the batch dimension.
        dtype: an integer dtype, or a floating-point one, which is promoted if the activations' dtype is wider; None for
            the dtype of the activations.
    """

    takes_slots = True

    def __init__(self, *shape: int, dtype: torch.dtype | None = None):
        self.shape, self.dtype = shape, dtype
        self.value: Tensor | None = None

    def get(self, batch: int, like: Tensor) -> Tensor:
        """Return the tensor; zeros for `batch` sequences before the first `set`."""
        if self.value is None:
            self.value = like.new_zeros(batch, *self.shape, dtype=self._dtype_for(like.dtype))
        return self.value

    def reset(self, batch: int, like: Tensor) -> None:
        """Create the tensor, of zeros, if there is none; set the call's slots, if it has any, to zeros."""
        value = self.get(batch, like)
        if self.slots is not None:
            value.index_fill_(0, self.slots.long(), 0)

    def set(self, value: Tensor) -> None:
        """Store `value`, detached from its graph, for the next call."""
        self.put(value.detach().contiguous())

    def put(self, value: Tensor) -> None:
        """Store `value` with its graph; if `fixed`, overwrite the storage in place."""
        if self.fixed and self.value is not None:
            self.value.copy_(value)
        else:
            self.value = value

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensor, if there is one."""
        return () if self.value is None else (self.value,)

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensor `x`, if there is one, by `fn(x)`."""
        if self.value is not None and self.slots is None:
            self.value = fn(self.value)

    def clear(self) -> None:
        """Drop the tensor."""
        self.value = None

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes of the state of `batch_size` sequences of any length."""
        size = batch_size * math.prod(self.shape) * self._dtype_for(dtype).itemsize
        return Bounds(size, size)

    def _dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the state's dtype for activations of this dtype; floating-point states are not narrower than these."""
        own = self.dtype or dtype
        return torch.promote_types(own, dtype) if own.is_floating_point else own

    def held(self, seq_len: int) -> int:
        """Return the bytes in use, which do not depend on `seq_len`."""
        return 0 if self.value is None else self.value.nbytes

    @property
    def allocated(self) -> int:
        """Bytes of allocated memory."""
        return self.held(0)


class LayerState:
    """The parts of a layer's state, each an attribute under its name; `span` is the layout of the current call."""

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


def map_all(layers: Iterable[LayerState], fn: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor of the layers' states by `fn` of it."""
    for layer in layers:
        for part in layer.parts.values():
            part.map_(fn)


def copy_all(values: Sequence[Tensor], storage: Sequence[Tensor]) -> None:
    """Copy each value to its tensor in `storage`.

    Raises:
        ValueError: the counts, shapes, dtypes or devices differ.
    """
    found, expected = ([(x.shape, x.dtype, x.device) for x in tensors] for tensors in (values, storage))
    if found != expected:
        raise ValueError(f"the storage holds {expected}, which does not fit a state of {found}")
    for value, target in zip(values, storage, strict=True):
        target.copy_(value)
