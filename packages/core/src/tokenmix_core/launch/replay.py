"""Calls of kernels replayed: what the host decides about a call is decided once for all calls that look alike.

Between a call and its launches lie sizes, tiles, strides and buffers that follow from the arguments' shapes. Finding
them takes Python longer than launching. So the first call of a kind is recorded: which buffers it makes, and which
kernels it launches on which of them. Later calls make these buffers and launches, and nothing else (`replay_code`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core import changes
from tokenmix_core.launch import private, switch
from tokenmix_core.launch.private import storage
from tokenmix_core.launch.replay_code import Step, alike, compiled, matching, renew

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# what follows from dtypes, which a call's kind tells
_OF_DTYPES = {_aten.promote_types.default, _aten.can_cast.default}
# kinds of calls remembered by a function; with more it begins anew
_REMEMBERED = 1024
# kinds that a call is compared with before its own is found
_TRIED = 4
# what `Replayed.forget` clears
_remembering: list[Any] = []
# whether a tensor is where kernels are launched
on_gpu = attrgetter("is_cuda")


def is_real(x: Tensor) -> bool:
    """Tell whether x is an ordinary tensor, with an address, in eager mode."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def is_plain(x: Tensor) -> bool:
    """Tell whether x is real and no dispatch mode watches operations: a mode would not see kernels."""
    if not is_real(x):
        return False
    number = private.modes()
    return not number or (number == 1 and _recorders.active is not None)


@functools.cache
def _launching() -> ModuleType:
    # Triton is imported with the first launch
    from tokenmix_core.launch import kernels

    return kernels


class Replayed:
    """`run`, of whose calls on a GPU the first of a kind is recorded, and later ones are replayed where they can be.

    A call's kind is all that it may depend on: shapes, strides, dtypes and alignment of tensors, and the values of
    other arguments. It can be replayed if `run` only makes buffers, views them, launches kernels of `cached_launch` and
    calls simple operations of torch; else every call is run. What chooses tiles is not asked again: a change of tables
    and modules that tell of it (`changes`) lets all calls be forgotten, and whoever changes something else calls
    `forget`. The kernels of a recorded call are compiled side by side.
    """

    def __init__(self, run: Callable) -> None:
        self.run = run
        # by kind; None where calls cannot be replayed
        self._known: dict[tuple, _Replay | None] = {}
        # of the kinds seen last `match(*inputs)`: a replay's `call, stream, tensors, pointers`, or None for other kinds
        self.recent: tuple[Callable, ...] = ()
        _remembering.append(self)

    def __call__(self, *inputs: Any) -> Any:
        for match in self.recent:
            found = match(*inputs)
            if found is not None:
                call, stream, tensors, pointers = found
                return call(stream, tensors, pointers)
        return self.anew(inputs)

    def anew(self, inputs: tuple, foresee: Callable | None = None) -> Any:
        """A call that no match of `recent` fits; `foresee(inputs, output)` makes one that will follow the first one."""
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
                return self.anew(inputs, foresee)
        # a tensor given twice makes another kind of call; empty ones have no address, and look all alike
        addresses = [x for x in pointers if x]
        twice = len(set(addresses)) < len(addresses)
        if twice or not private.records or launch.replays_on(device) is None:
            return self.run(*inputs)
        key = (device, *kind)
        if key not in self._known:
            return self._record(inputs, tensors, key, foresee)
        known = self._known[key]
        if known is None:
            return self.run(*inputs)
        if known.match is not None and known.match in self.recent:
            renew(known.match, inputs)
        self._expect(known)
        return known.call(launch.current_stream(device), tensors, pointers)

    def _record(self, inputs: tuple, tensors: list[Tensor], key: tuple, foresee: Callable | None) -> Any:
        recorder = _Recorder(tensors)
        with recorder.watching(), _launching().taken(recorder.take):
            output = self.run(*inputs)
        recorder.launch([] if foresee is None else _foreseen(foresee, inputs, output))
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        call = recorder.replay(output)
        if call is None:
            self._known[key] = None
        else:
            self._known[key] = known = _Replay(call, matching(call, inputs, key[0], _launching()))
            self._expect(known)
        return output

    def _expect(self, known: _Replay) -> None:
        """Compare the next calls with this kind first."""
        if known.match is not None:
            self.recent = (known.match, *(x for x in self.recent if x is not known.match))[:_TRIED]

    def clear(self) -> None:
        """Forget this function's calls."""
        self._known.clear()
        self.recent = ()

    @staticmethod
    def forget() -> None:
        """Forget all recorded calls, and all checks."""
        for x in _remembering:
            x.clear()


changes.on_change(Replayed.forget)


class _Replay(NamedTuple):
    """A recorded call, `call(stream, tensors, pointers)`, and `match(*inputs)`, which finds others of its kind."""

    call: Callable
    match: Callable | None


class Checked:
    """`check`, made once for plain tensors on GPUs that look alike: later ones get the result of the first."""

    def __init__(self, check: Callable) -> None:
        self.check = check
        # how many arguments were seen last, whether others look like them, and what the check made of them
        self._passed: tuple[tuple[int, Callable, Any], ...] = ()
        _remembering.append(self)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not switch.on:
            return self.check(*inputs)
        for number, look_alike, result in self._passed:
            if number == len(inputs) and look_alike(*inputs):
                return result
        result = self.check(*inputs)
        # a tensor without dimensions is a number, which may have been read
        if all(is_plain(x) and on_gpu(x) and x.dim() for x in inputs if isinstance(x, Tensor)):
            self._passed = ((len(inputs), alike(inputs), result), *self._passed[: _TRIED - 1])
        return result

    def clear(self) -> None:
        """Check all calls again."""
        self._passed = ()


class _Recorders(threading.local):
    # the one that watches this thread
    active: _Recorder | None = None


_recorders = _Recorders()


def launches_unseen() -> None:
    """Say that what comes next launches what is neither torch's nor of `cached_launch`: the call is run every time."""
    if _recorders.active is not None:
        _recorders.active.give_up()


class _Recorder(private.Mode):
    """Sees what is made, and launches what it takes when all is known, or an operation needs the results."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._tensors = inputs
        self._inputs = {id(x): slot for slot, x in enumerate(inputs)}
        self._addresses = {x.data_ptr(): slot for slot, x in enumerate(inputs) if x.numel()}
        # by storage, the input that alone lies there: others in it are views of this one
        self._alone: dict[Any, int | None] = {}
        for slot, x in enumerate(inputs):
            self._alone[storage(x)] = None if storage(x) in self._alone else slot
        self._first = self._slots = len(inputs)
        # by storage, what was made last there: its slot, size and stride
        self._made: dict[Any, tuple[int, tuple, tuple]] = {}
        # made since the last step
        self._buffers: list[tuple] = []
        # launches that wait, with what was made before each
        self._waiting: list[tuple[Any, list[tuple]]] = []
        self._steps: list[Step] = []
        self._possible = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the operations of this thread."""
        with self:
            _recorders.active = self
            try:
                yield
            finally:
                _recorders.active = None

    def give_up(self) -> None:
        """Launch what waits, and keep no record of the call."""
        self.launch()
        self._possible = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # below autograd, as in what torch compiled, composites come whole: `contiguous` is a copy or nothing
        with self:
            output = private.composed(func, args, kwargs)
        if output is not NotImplemented:
            return output
        operation = private.operation(func)
        if (operation is not None and operation.views) or func in _OF_DTYPES:
            return func(*args, **kwargs)
        if func in _ALLOCATIONS:
            output = func(*args, **kwargs)
            self._buffers.append((self._slot(output), tuple(output.shape), output.stride(), output.dtype))
            return output
        self.launch()
        output = func(*args, **kwargs)
        if operation is None:
            self._possible = False
        else:
            self._note_operation(func, operation, list(args), kwargs, output)
        return output

    def _slot(self, x: Tensor) -> int:
        """A slot for a tensor that was made."""
        self._slots += 1
        self._made[storage(x)] = self._slots - 1, tuple(x.shape), x.stride()
        return self._slots - 1

    def _find(self, x: Tensor) -> tuple[int, tuple | None] | None:
        """A tensor's slot and the view of it; None for one that neither begins with an input nor was made."""
        if id(x) in self._inputs:
            return self._inputs[id(x)], None
        if storage(x) not in self._made:
            slot = self._alone.get(storage(x))
            if slot is None:
                return None
            given = self._tensors[slot]
            # from where the input begins, wherever in its memory that is
            same = given.data_ptr() == x.data_ptr() and given.dtype == x.dtype
            return (slot, (tuple(x.shape), x.stride())) if same else None
        slot, *whole = self._made[storage(x)]
        view = (tuple(x.shape), x.stride(), x.storage_offset())
        return slot, None if view == (*whole, 0) else view

    def take(self, launch: Any) -> None:
        """Let a launch wait."""
        self._waiting.append((launch, self._buffers))
        self._buffers = []

    def launch(self, foreseen: Sequence = ()) -> None:
        """Launch what waits, and note it; compile beside it the kernels of launches that are foreseen."""
        waiting, self._waiting = self._waiting, []
        with _launching().taken(None):
            _launching().launch_together([launch for launch, _ in waiting], foreseen)
        for (kernel, *launch), buffers in waiting:
            self._note_launch(kernel.packing(*launch), list(launch[1]), buffers)

    def _note_launch(self, pack: Any, args: list, buffers: list[tuple]) -> None:
        self._possible &= pack is not None
        places = []
        for place, x in enumerate(args):
            # an empty tensor has no address
            pointer = x.data_ptr() if isinstance(x, Tensor) else 0
            if pointer in self._addresses:
                places.append((place, self._addresses[pointer], 0))
            elif pointer and storage(x) in self._made:
                places.append((place, self._made[storage(x)][0], pointer - x.untyped_storage().data_ptr()))
            elif pointer and (slot := self._alone.get(storage(x))) is not None:
                places.append((place, slot, pointer - self._tensors[slot].data_ptr()))
            elif pointer:
                self._possible = False
        self._steps.append(Step(buffers, pack, True, [], places, None))

    def _note_operation(self, func: Any, operation: private.Operation, args: list, kwargs: dict, output: Any) -> None:
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
        self._possible &= simple and not operation.by_value
        # an operation in place returns what it was given
        result = self._slot(output) if simple and operation.makes else None
        call = functools.partial(func, **kwargs) if kwargs else func
        self._steps.append(Step(self._buffers, call, False, args, places, result))
        self._buffers = []

    def replay(self, output: Any) -> Callable | None:
        """The recorded call, `call(stream, tensors, pointers)`; None if more happened than was recorded."""
        single = isinstance(output, Tensor)
        outputs = [None if x is None else self._find(x) or (-1, None) for x in ((output,) if single else output)]
        if not self._steps or not self._possible or (-1, None) in outputs:
            return None
        self._steps[-1].buffers.extend(self._buffers)
        make = (lambda x: x[0]) if single else getattr(type(output), "_make", type(output))
        return compiled(self._steps, self._first, outputs, make, _launching().launch())


def _foreseen(foresee: Callable, *inputs: Any) -> list:
    """Record what a call would launch; nothing is launched, so that its numbers are undefined."""
    launches: list = []
    # what fails here will fail by itself if it is ever asked for
    with _launching().taken(launches.append), suppress(Exception):
        foresee(*inputs)
    return launches
