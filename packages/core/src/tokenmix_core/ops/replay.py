"""Calls of kernels replayed: what the host decides about a call is decided once for all calls that look alike.

Between a call and its launches lie sizes, tiles, strides and buffers that follow from the arguments' shapes. Finding
them takes Python longer than launching. So the first call of a kind is recorded: which buffers it makes, and which
kernels it launches on which of them. Later calls make these buffers and launches, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
# kinds of calls remembered by a function; with more it begins anew
_REMEMBERED = 1024
# whether a tensor is where kernels are launched
on_gpu = attrgetter("is_cuda")


def _torch_empty(size: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# what torch's compiled code makes its buffers by, in less than half the time
empty = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _torch_empty)


@functools.cache
def _launching() -> ModuleType:
    # Triton is imported with the first launch
    from tokenmix_core.tile import launch

    return launch


class Replayed:
    """`run`, of whose calls on a GPU the first of a kind is recorded, and later ones are replayed where they can be.

    A call's kind is all that it may depend on: shapes, strides, dtypes and alignment of tensors, and the values of
    other arguments. It can be replayed if `run` only makes buffers, views them, and launches kernels of
    `cached_launch`; else every call is run. What chooses tiles is not asked again: whoever changes it calls `forget`.
    The kernels of a recorded call are compiled side by side.
    """

    _all: ClassVar[list[Replayed]] = []

    def __init__(self, run: Callable) -> None:
        self.run = run
        # by kind; None where calls cannot be replayed
        self._known: dict[tuple, _Replay | None] = {}
        self._all.append(self)

    def __call__(self, *inputs: Any) -> Any:
        kind, tensors, pointers = [], [], []
        for x in inputs:
            if isinstance(x, Tensor):
                pointer = x.data_ptr()
                tensors.append(x)
                pointers.append(pointer)
                kind += (x.dtype, x.shape, x.stride(), pointer & 15)
            else:
                kind.append(x)
        if not on_gpu(tensors[0]):
            return self.run(*inputs)
        launch = _launching()
        device = launch.current_device()
        if tensors[0].get_device() != device:
            with torch.cuda.device(tensors[0].device):
                return self(*inputs)
        # a tensor given twice makes another kind of call, and what observes launches has to see all of them
        if len(set(pointers)) < len(pointers) or launch.observed() or launch.being_taken():
            return self.run(*inputs)
        key = (device, *kind)
        replay = self._known.get(key)
        if replay is not None:
            return replay(tensors, pointers, launch.current_stream(device))
        if key in self._known:
            return self.run(*inputs)
        recorder = _Recorder(tensors)
        with recorder, launch.taken(recorder.take):
            output = self.run(*inputs)
        recorder.launch()
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = recorder.replay(output)
        return output

    @classmethod
    def forget(cls) -> None:
        """Forget all recorded calls."""
        for replayed in cls._all:
            replayed._known.clear()


class _Launch(NamedTuple):
    """A launch: buffers made before it (slot, size, stride, dtype), its grid, function and arguments.

    `pointers` says which arguments are addresses: their places, slots and bytes from there. Slots `dropped` are needed
    no more.
    """

    buffers: list[tuple]
    grid: tuple
    call: Callable
    args: list
    pointers: list[tuple[int, int, int]]
    dropped: list[int]


class _Replay(NamedTuple):
    """Launches in order; a place for each buffer; each result's slot, and how to view it where it is not the whole."""

    launches: list[_Launch]
    room: list[None]
    results: list[tuple[int, tuple | None] | None]
    make: Callable

    def __call__(self, slots: list, pointers: list, stream: int) -> Any:
        slots += self.room
        pointers += self.room
        for buffers, grid, call, template, places, dropped in self.launches:
            for slot, size, stride, dtype in buffers:
                slots[slot] = x = empty(size, stride, dtype)
                pointers[slot] = x.data_ptr()
            args = template.copy()
            for place, slot, offset in places:
                args[place] = pointers[slot] + offset
            call(*grid, stream, *args)
            for slot in dropped:
                slots[slot] = None
        return self.make(
            [
                None if x is None else slots[x[0]] if x[1] is None else slots[x[0]].as_strided(*x[1])
                for x in self.results
            ]
        )


class _Recorder(TorchDispatchMode):
    """Sees the buffers that are made, and launches what it takes when all is known, or other work needs the results."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._inputs = {id(x): slot for slot, x in enumerate(inputs)}
        self._addresses = {x.data_ptr(): slot for slot, x in enumerate(inputs)}
        self._first = len(inputs)
        self._made: list[tuple] = []
        # by storage, the slot of the buffer made last there
        self._buffers: dict[int, int] = {}
        # launches that wait, with the number of buffers made before each
        self._waiting: list[tuple[Any, int]] = []
        self._launches: list[_Launch] = []
        self._before = 0
        self._possible = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func.overloadpacket in _ALLOCATIONS
        if not made and not func.is_view:
            self._possible = False
            self.launch()
        output = func(*args, **(kwargs or {}))
        if made:
            slot = self._first + len(self._made)
            self._buffers[_storage(output)] = slot
            self._made.append((slot, tuple(output.shape), output.stride(), output.dtype))
        return output

    def take(self, launch: Any) -> None:
        """Let a launch wait."""
        self._waiting.append((launch, len(self._made)))

    def launch(self) -> None:
        """Launch what waits, and note it."""
        waiting, self._waiting = self._waiting, []
        with _launching().taken(None):
            _launching().launch_together([launch for launch, _ in waiting])
        for (kernel, *launch), made in waiting:
            self._note(*kernel.driver_call(*launch), made)

    def _note(self, call: Callable, grid: tuple, args: list, made: int) -> None:
        places = []
        for place, x in enumerate(args):
            if not isinstance(x, Tensor):
                continue
            pointer = args[place] = x.data_ptr()
            # an empty tensor has no address
            if pointer and pointer in self._addresses:
                places.append((place, self._addresses[pointer], 0))
            elif pointer and _storage(x) in self._buffers:
                places.append((place, self._buffers[_storage(x)], pointer - x.untyped_storage().data_ptr()))
            elif pointer:
                self._possible = False
        self._launches.append(_Launch(self._made[self._before : made], grid, call, args, places, []))
        self._before = made

    def replay(self, output: Any) -> _Replay | None:
        """What was recorded; None if that is not all there was to it."""
        single = isinstance(output, Tensor)
        results: list[tuple[int, tuple | None] | None] = []
        for x in (output,) if single else output:
            if x is None:
                results.append(None)
            elif id(x) in self._inputs:
                results.append((self._inputs[id(x)], None))
            elif _storage(x) in self._buffers:
                slot = self._buffers[_storage(x)]
                view = (tuple(x.shape), x.stride(), x.storage_offset())
                whole = (*self._made[slot - self._first][1:3], 0)
                results.append((slot, None if view == whole else view))
            else:
                self._possible = False
        if not self._launches or not self._possible:
            return None
        self._launches[-1].buffers.extend(self._made[self._before :])
        kept = {x[0] for x in results if x is not None}
        last = {slot: launch for launch in self._launches for _, slot, _ in launch.pointers if slot >= self._first}
        for launch in self._launches:
            launch.buffers[:] = (x for x in launch.buffers if x[0] in kept or x[0] in last)
        for slot, launch in last.items():
            if slot not in kept:
                launch.dropped.append(slot)
        make = (lambda x: x[0]) if single else getattr(type(output), "_make", tuple)
        return _Replay(self._launches, [None] * len(self._made), results, make)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
