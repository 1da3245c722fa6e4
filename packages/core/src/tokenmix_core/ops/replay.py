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
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
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
    other arguments. It can be replayed if `run` only makes buffers, views them, launches kernels of `cached_launch` and
    calls simple operations of torch; else every call is run. What chooses tiles is not asked again: whoever changes it
    calls `forget`. The kernels of a recorded call are compiled side by side.
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
        # a tensor given twice makes another kind of call; empty ones have no address, and look all alike
        addresses = [x for x in pointers if x]
        twice = len(set(addresses)) < len(addresses)
        # what observes launches has to see all of them
        if twice or launch.observed() or launch.being_taken():
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


class _Step(NamedTuple):
    """A launch, or an operation of torch.

    Attributes:
        buffers: what is made before it: slot, size, stride, dtype.
        call: `call(*grid, stream, *args)` launches; where there is no grid, `call(*args)` is an operation.
        args: its arguments.
        places: which of them are addresses, `(place, slot, bytes from there)`, or tensors, `(place, slot, view)`.
        result: the slot of what an operation makes, None where it makes nothing.
        dropped: slots that are needed no more.
    """

    buffers: list[tuple]
    grid: tuple | None
    call: Callable
    args: list
    places: list[tuple]
    result: int | None
    dropped: list[int]


class _Replay(NamedTuple):
    """Steps in order; a place for each slot; each output's slot and view."""

    steps: list[_Step]
    room: list[None]
    outputs: list[tuple[int, tuple | None] | None]
    make: Callable

    def __call__(self, slots: list, pointers: list, stream: int) -> Any:
        slots += self.room
        pointers += self.room
        for buffers, grid, call, template, places, result, dropped in self.steps:
            for slot, size, stride, dtype in buffers:
                slots[slot] = x = empty(size, stride, dtype)
                pointers[slot] = x.data_ptr()
            args = template.copy()
            if grid is not None:
                for place, slot, offset in places:
                    args[place] = pointers[slot] + offset
                call(*grid, stream, *args)
            else:
                for place, slot, view in places:
                    args[place] = _viewed(slots[slot], view)
                x = call(*args)
                if result is not None:
                    slots[result], pointers[result] = x, x.data_ptr()
            for slot in dropped:
                slots[slot] = None
        return self.make([None if x is None else _viewed(slots[x[0]], x[1]) for x in self.outputs])


class _Recorder(TorchDispatchMode):
    """Sees what is made, and launches what it takes when all is known, or an operation needs the results."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._inputs = {id(x): slot for slot, x in enumerate(inputs)}
        self._addresses = {x.data_ptr(): slot for slot, x in enumerate(inputs)}
        self._first = self._slots = len(inputs)
        # by storage, what was made last there: its slot, size and stride
        self._made: dict[int, tuple[int, tuple, tuple]] = {}
        # made since the last step
        self._buffers: list[tuple] = []
        # launches that wait, with what was made before each
        self._waiting: list[tuple[Any, list[tuple]]] = []
        self._steps: list[_Step] = []
        self._possible = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if func.overloadpacket in _ALLOCATIONS:
            output = func(*args, **kwargs)
            self._buffers.append((self._slot(output), tuple(output.shape), output.stride(), output.dtype))
            return output
        self.launch()
        output = func(*args, **kwargs)
        self._note_operation(func, list(args), kwargs, output)
        return output

    def _slot(self, x: Tensor) -> int:
        """A slot for a tensor that was made."""
        self._slots += 1
        self._made[_storage(x)] = self._slots - 1, tuple(x.shape), x.stride()
        return self._slots - 1

    def _find(self, x: Tensor) -> tuple[int, tuple | None] | None:
        """A tensor's slot and the view of it; None for one that is neither an input nor was made."""
        if id(x) in self._inputs:
            return self._inputs[id(x)], None
        if _storage(x) not in self._made:
            return None
        slot, *whole = self._made[_storage(x)]
        view = (tuple(x.shape), x.stride(), x.storage_offset())
        return slot, None if view == (*whole, 0) else view

    def take(self, launch: Any) -> None:
        """Let a launch wait."""
        self._waiting.append((launch, self._buffers))
        self._buffers = []

    def launch(self) -> None:
        """Launch what waits, and note it."""
        waiting, self._waiting = self._waiting, []
        with _launching().taken(None):
            _launching().launch_together([launch for launch, _ in waiting])
        for (kernel, *launch), buffers in waiting:
            call, grid, args = kernel.driver_call(*launch)
            self._note_launch(call, grid, args, buffers)

    def _note_launch(self, call: Callable, grid: tuple, args: list, buffers: list[tuple]) -> None:
        places = []
        for place, x in enumerate(args):
            if not isinstance(x, Tensor):
                continue
            pointer = args[place] = x.data_ptr()
            # an empty tensor has no address
            if pointer and pointer in self._addresses:
                places.append((place, self._addresses[pointer], 0))
            elif pointer and _storage(x) in self._made:
                places.append((place, self._made[_storage(x)][0], pointer - x.untyped_storage().data_ptr()))
            elif pointer:
                self._possible = False
        self._steps.append(_Step(buffers, grid, call, args, places, None, []))

    def _note_operation(self, func: Any, args: list, kwargs: dict, output: Any) -> None:
        places = []
        for place, x in enumerate(args):
            if isinstance(x, Tensor):
                found = self._find(x)
                self._possible &= found is not None
                places.append((place, *(found or (0, None))))
                args[place] = None
        # tensors in lists or by name, several results, and sizes that depend on numbers are left to Python
        simple = isinstance(output, Tensor) and not any(isinstance(x, (Tensor, list)) for x in kwargs.values())
        simple &= not any(isinstance(x, list) and any(isinstance(y, Tensor) for y in x) for x in args)
        self._possible &= simple and _BY_VALUE.isdisjoint(func.tags)
        # an operation in place returns what it was given
        made = simple and func._schema.returns[0].alias_info is None
        result = self._slot(output) if made else None
        call = functools.partial(func, **kwargs) if kwargs else func
        self._steps.append(_Step(self._buffers, None, call, args, places, result, []))
        self._buffers = []

    def replay(self, output: Any) -> _Replay | None:
        """What was recorded; None if that is not all there was to it."""
        single = isinstance(output, Tensor)
        outputs = [None if x is None else self._find(x) or (-1, None) for x in ((output,) if single else output)]
        kept = {x[0] for x in outputs if x is not None}
        if not self._steps or not self._possible or -1 in kept:
            return None
        self._steps[-1].buffers.extend(self._buffers)
        last = {slot: step for step in self._steps for _, slot, _ in step.places if slot >= self._first}
        for step in self._steps:
            step.buffers[:] = (x for x in step.buffers if x[0] in kept or x[0] in last)
        for slot, step in last.items():
            if slot not in kept:
                step.dropped.append(slot)
        make = (lambda x: x[0]) if single else getattr(type(output), "_make", tuple)
        return _Replay(self._steps, [None] * (self._slots - self._first), outputs, make)


def _viewed(x: Tensor, view: tuple | None) -> Tensor:
    return x if view is None else x.as_strided(*view)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
