"""The launch cache: what the host decides about a call is decided once for all calls that look alike.

Between a call and its launches lie sizes, tiles, strides and buffers that follow from the arguments' shapes. Finding
them takes Python longer than launching. So a call is recorded: which buffers it makes, and which kernels it launches on
which of them. Later calls with its signature make these buffers and launches, and nothing else (`replay_code`).

Recording takes longer than running, and lengths may never return. So a call is recorded where its signature has
occurred before. While recordings are not replayed, signatures must have occurred more often; what is kept is bounded.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, takewhile
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels.launch import compat, flags, forms
from tokenmix_core.kernels.launch.cache.codegen import Step, alike, compiled, matching, renew
from tokenmix_core.kernels.launch.compat import storage

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# operations that were seen not to be made of others
_not_composite: set[Any] = set()
# what follows from dtypes, which a call's kind tells
_OF_DTYPES = {_aten.promote_types.default, _aten.can_cast.default}
# most recordings kept by a function, most signatures whose occurrences it counts, and most magnitudes it knows
_RECORDINGS, _SEEN, _MAGNITUDES = 96, 512, 128
# where one of so many recordings was replayed so often, as in a deep model, the next one is made at first sight
_RECENT, _OFTEN = 4, 8
# a call that was replayed so often gets kernels that are compiled for its lengths
_SPECIALISED = 512
# so many recordings that were not replayed double how often a signature must have occurred
_PATIENCE = 8
# kinds that a call is compared with before its own is found
_TRIED = 4
# cleared by `invalidate`
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
    number = compat.modes()
    return not number or (number == 1 and _recorders.active is not None)


@functools.cache
def _launching() -> ModuleType:
    # Triton is imported with the first launch
    from tokenmix_core.kernels.launch import launcher

    return launcher


class Replayed:
    """Wrap `run` with record-and-replay: calls on a GPU whose signature returns are recorded, and replayed if possible.

    A call's signature is all that it may depend on: shapes, strides, dtypes and alignment of tensors, and the values of
    other arguments. It can be replayed if `run` only makes buffers, views them, launches kernels of `cached_launch` and
    calls simple operations of torch; else every call is run. Tiles are not selected again: `tuning.override`
    invalidates the cache, and code that changes another choice calls `invalidate`. The kernels of a captured call are
    compiled in parallel; for this purpose the first call of each magnitude of sizes is captured at once.
    """

    def __init__(self, run: Callable) -> None:
        self.run = run
        # by signature, the one used last at the end; None where calls cannot be replayed
        self._known: dict[tuple, _Replay | None] = {}
        # of the kinds seen last `match(*inputs)`: a replay's `call, stream, tensors, pointers`, or None for other kinds
        self.recent: tuple[Callable, ...] = ()
        self._due = _Due()
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
        if twice or not compat.records or launch.replays_on(device) is None:
            return self.run(*inputs)
        key = (device, *kind)
        if key not in self._known:
            magnitude = self._due.new_magnitude(inputs)
            if magnitude is None and not self._due.occurred(key):
                return self.run(*inputs)
            output = self._record(inputs, tensors, key, None if magnitude is None else foresee)
            self._due.knows(magnitude)
            return output
        known = self._known[key] = self._known.pop(key)
        if known is None:
            return self.run(*inputs)
        if known.general and known.replays[0] >= _SPECIALISED:
            # once more, by kernels that are compiled for its numbers
            self.recent = tuple(x for x in self.recent if x is not known.match)
            with forms.specialised():
                return self._record(inputs, tensors, key, None)
        if known.match is not None and known.match in self.recent:
            renew(known.match, inputs)
        self._expect(known)
        known.replays[0] += 1
        return known.call(launch.current_stream(device), tensors, pointers)

    def _record(self, inputs: tuple, tensors: list[Tensor], key: tuple, foresee: Callable | None) -> Any:
        recorder = _Recorder(tensors)
        with recorder.watching(), _launching().taken(recorder.take):
            output = self.run(*inputs)
        recorder.launch([] if foresee is None else _foreseen(foresee, inputs, output))
        call, replays = recorder.replay(output), [0]
        self._due.recorded(replays)
        if call is None:
            self._known[key] = None
        else:
            most = _SPECIALISED if recorder.general else None
            match = matching(call, inputs, key[0], _launching(), replays, most)
            known = _Replay(call, match, replays, recorder.general)
            self._known[key] = known
            self._expect(known)
        keep_last(self._known, _RECORDINGS)
        return output

    def _expect(self, known: _Replay) -> None:
        """Compare the next calls with this kind first."""
        if known.match is not None:
            self.recent = (known.match, *(x for x in self.recent if x is not known.match))[:_TRIED]

    def clear(self) -> None:
        """Forget this function's calls."""
        self._known.clear()
        self.recent = ()
        self._due = _Due()


def invalidate() -> None:
    """Drop all cached calls and checks: the values that they follow from have changed."""
    for x in _remembering:
        x.clear()


class _Replay(NamedTuple):
    """A recorded call.

    Attributes:
        call: `call(stream, tensors, pointers)`.
        match: `match(*inputs)`, which finds others of its kind.
        replays: one number, how often it was replayed.
        general: whether one of its kernels is compiled for all lengths.
    """

    call: Callable
    match: Callable | None
    replays: list[int]
    general: bool


class _Due:
    """Decide which calls of a function to record: those whose signature occurred often enough, in bounded memory."""

    def __init__(self) -> None:
        # by the hash of a signature, how often it has occurred, the last one at the end
        self._seen: dict[int, int] = {}
        self._magnitudes: dict[tuple, None] = {}
        # how often each of the last recordings was replayed, the newest first
        self._replays: deque[list[int]] = deque(maxlen=4 * _PATIENCE)

    def new_magnitude(self, inputs: tuple) -> tuple | None:
        """Return dtypes, options, and the powers of two that sizes lie between; None if `knows` was told of them.

        Other kernels may be chosen for new ones. They are compiled side by side where the call is recorded.
        """
        magnitude = tuple(
            (x.dtype, *map(int.bit_length, x.shape)) if isinstance(x, Tensor)
            else x.bit_length() if x.__class__ is int else x
            for x in inputs
        )  # fmt: skip
        return None if magnitude in self._magnitudes else magnitude

    def knows(self, magnitude: tuple | None) -> None:
        """Note a magnitude that `new_magnitude` returned."""
        if magnitude is not None:
            self._magnitudes[magnitude] = None
            keep_last(self._magnitudes, _MAGNITUDES)

    def occurred(self, key: tuple) -> bool:
        """Count an occurrence of a signature; tell whether there were enough for a recording."""
        mark = hash(key)
        times = self._seen.pop(mark, 0) + 1
        if times >= self._needed():
            return True
        self._seen[mark] = times
        keep_last(self._seen, _SEEN)
        return False

    def recorded(self, replays: list[int]) -> None:
        """Note a recording, whose replays are counted in `replays[0]`."""
        self._replays.appendleft(replays)

    def _needed(self) -> int:
        if any(x[0] >= _OFTEN for x in islice(self._replays, _RECENT)):
            return 1
        unused = sum(1 for _ in takewhile(lambda x: not x[0], self._replays))
        return 2 << unused // _PATIENCE


def keep_last(kept: dict, most: int) -> None:
    """Drop the first entries of a dict that has more than `most`."""
    while len(kept) > most:
        kept.pop(next(iter(kept)), None)


class Checked:
    """`check`, made once for plain tensors on GPUs that look alike: later ones get the result of an earlier one.

    As with recordings, what later calls are compared with is made where a signature has occurred before.
    """

    def __init__(self, check: Callable) -> None:
        self.check = check
        # how many arguments were seen last, whether others look like them, and what the check made of them
        self._passed: tuple[tuple[int, Callable, Any], ...] = ()
        self._due = _Due()
        _remembering.append(self)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not flags.on:
            return self.check(*inputs)
        for number, look_alike, result in self._passed:
            if number == len(inputs) and look_alike(*inputs):
                return result
        result = self.check(*inputs)
        # a tensor without dimensions is a number, which may have been read
        if all(is_plain(x) and on_gpu(x) and x.dim() for x in inputs if isinstance(x, Tensor)):
            key = tuple((x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in inputs)
            magnitude = self._due.new_magnitude(inputs)
            if magnitude is not None or self._due.occurred(key):
                repeats = [0]
                self._due.recorded(repeats)
                self._due.knows(magnitude)
                self._passed = ((len(inputs), alike(inputs, repeats), result), *self._passed[: _TRIED - 1])
        return result

    def clear(self) -> None:
        """Check all calls again."""
        self._passed = ()
        self._due = _Due()


class _Recorders(threading.local):
    # the one that watches this thread
    active: _Recorder | None = None


_recorders = _Recorders()


def launches_unseen() -> None:
    """Say that what comes next launches what is neither torch's nor of `cached_launch`: the call is run every time."""
    if _recorders.active is not None:
        _recorders.active.give_up()


class _Recorder(compat.Mode):
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
        # whether a kernel is compiled for all lengths
        self.general = False

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
        if func not in _ALLOCATIONS and func not in _not_composite:
            with self:
                output = compat.composed(func, args, kwargs)
            if output is not NotImplemented:
                return output
            _not_composite.add(func)
        operation = compat.operation(func)
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
        self.general |= getattr(pack, "general", False)
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

    def _note_operation(self, func: Any, operation: compat.Operation, args: list, kwargs: dict, output: Any) -> None:
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
