"""Capture a call: its allocations, the kernels that it launches, and its simple torch operations."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache.codegen import Step, compiled
from tokenmix_core.kernels.launch.cache.row_calls import RowCall, row_call
from tokenmix_core.kernels.launch.compat import storage

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# composite operations that return a contiguous argument itself or a view of it
_VIEWS_IF_CONTIGUOUS = {
    _aten.contiguous.default, _aten.flatten.using_ints, _aten.reshape.default, _aten.unflatten.int,
}  # fmt: skip
# operations that were found to be elementary: they do not consist of other operations
_not_composite: set[Any] = set()
# operations whose results depend only on dtypes, which the signature fixes: every replay gives an equal result
_OF_DTYPES = {_aten.promote_types.default, _aten.can_cast.default}


class _Captures(threading.local):
    # the capture in progress on this thread
    active: Capture | None = None


_captures = _Captures()


def is_real(x: Tensor) -> bool:
    """Tell whether x is an ordinary tensor, with an address, in eager mode."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def is_plain(x: Tensor) -> bool:
    """Tell whether `is_real(x)` and no dispatch mode but a capture is active: other modes would not see kernels."""
    if not is_real(x):
        return False
    modes = compat.modes()
    return not modes or (modes == 1 and _captures.active is not None)


def launches_unseen() -> None:
    """Mark the current call as not replayable: it launches another library's kernels, which a capture does not see."""
    if _captures.active is not None:
        _captures.active.give_up()


@functools.cache
def launching() -> ModuleType:
    """Import and return the launcher module, which imports Triton; so Triton is imported at the first launch."""
    from tokenmix_core.kernels.launch import launcher

    return launcher


class Capture(compat.Mode):
    """Capture a call: observe it, and postpone its launches until all are known or a torch operation needs results.

    Postponed launches are compiled in parallel and replayed by one call of the C launcher.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self._tensors = inputs
        self._inputs = {id(x): slot for slot, x in enumerate(inputs)}
        self._addresses = {x.data_ptr(): slot for slot, x in enumerate(inputs) if x.numel()}
        # maps a storage to the slot (index among the replay's tensors) of the only input in it: other tensors in this
        # storage count as views of the input. None if several inputs share the storage
        self._alone: dict[Any, int | None] = {}
        for slot, x in enumerate(inputs):
            memory = storage(x)
            self._alone[memory] = None if memory in self._alone else slot
        self._first = self._slots = len(inputs)
        # maps a storage to the last tensor allocated in it: its slot (index), size and stride
        self._made: dict[Any, tuple[int, tuple, tuple]] = {}
        # tensors allocated since the last step or postponed launch
        self._buffers: list[tuple] = []
        # postponed launches, each with the allocations before it
        self._waiting: list[tuple[Any, list[tuple]]] = []
        self._steps: list[Step] = []
        self._possible = True
        # the kernels that the call launches
        self._kernels: list[Any] = []
        # whether a kernel of the call is a general form, compiled for all lengths
        self.general = False
        # whether the replay serves other batch sizes and lengths
        self.by_rows = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe this thread's torch operations and kernel launches inside the block."""
        with self:
            _captures.active = self
            try:
                yield
            finally:
                _captures.active = None

    def give_up(self) -> None:
        """Make the postponed launches and discard the capture."""
        self.launch()
        self._possible = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            output = func(*args, **kwargs)
            self._buffers.append((self._slot(output), tuple(output.shape), output.stride(), output.dtype))
            return output
        # without autograd, as in compiled code, composite operations arrive here as a whole. Their effects depend on
        # the arguments (`contiguous` copies or does nothing), so observe the elementary operations that they consist of
        if func not in _not_composite:
            if func in _VIEWS_IF_CONTIGUOUS and not kwargs and args[0].is_contiguous():
                return func(*args)
            with self:
                output = compat.composed(func, args, kwargs)
            if output is not NotImplemented:
                return output
            _not_composite.add(func)
        operation = compat.operation(func)
        if (operation is not None and operation.views) or func in _OF_DTYPES:
            return func(*args, **kwargs)
        self.launch()
        output = func(*args, **kwargs)
        if operation is None:
            self._possible = False
        else:
            self._add_operation(func, operation, list(args), kwargs, output)
        return output

    def _slot(self, x: Tensor) -> int:
        """Assign the next slot, the index of a tensor in the replay, to a newly allocated tensor; return the slot."""
        self._slots += 1
        self._made[storage(x)] = self._slots - 1, tuple(x.shape), x.stride()
        return self._slots - 1

    def _find(self, x: Tensor) -> tuple[int, tuple | None] | None:
        """Return the slot of x, and its view of the slot's tensor (None if x is the whole tensor).

        Return None if x is neither a view of a tensor allocated in the call, nor a view with the address and dtype of
        an input that is the only one in its storage.
        """
        if id(x) in self._inputs:
            return self._inputs[id(x)], None
        memory = storage(x)
        if memory not in self._made:
            slot = self._alone.get(memory)
            if slot is None:
                return None
            given = self._tensors[slot]
            # the view is relative to the input's address, which need not be the start of its storage
            same = given.data_ptr() == x.data_ptr() and given.dtype == x.dtype
            return (slot, (tuple(x.shape), x.stride())) if same else None
        slot, *whole = self._made[memory]
        view = (tuple(x.shape), x.stride(), x.storage_offset())
        return slot, None if view == (*whole, 0) else view

    def take(self, launch: Any) -> None:
        """Postpone a launch: store it with the allocations before it."""
        self._waiting.append((launch, self._buffers))
        self._buffers = []

    def launch(self, foreseen: Sequence = ()) -> None:
        """Make and capture the postponed launches; compile their kernels together with those of `foreseen` launches."""
        waiting, self._waiting = self._waiting, []
        with launching().taken(None):
            packs = launching().launch_together([launch for launch, _ in waiting], foreseen)
        for pack, ((kernel, _, args, _), buffers) in zip(packs, waiting, strict=True):
            self._kernels.append(kernel)
            self._add_launch(pack, list(args), buffers)

    def _add_launch(self, pack: Any, args: list, buffers: list[tuple]) -> None:
        self._possible &= pack is not None
        self.general |= getattr(pack, "general", False)
        pointers = []
        for i, x in enumerate(args):
            # an empty tensor has no address to compare
            address = x.data_ptr() if isinstance(x, Tensor) else 0
            if not address:
                continue
            if address in self._addresses:
                pointers.append((i, self._addresses[address], 0))
            elif (memory := storage(x)) in self._made:
                pointers.append((i, self._made[memory][0], address - x.untyped_storage().data_ptr()))
            elif (slot := self._alone.get(memory)) is not None:
                pointers.append((i, slot, address - self._tensors[slot].data_ptr()))
            else:
                self._possible = False
        self._steps.append(Step(buffers, pack, True, [], pointers, None))

    def _add_operation(self, func: Any, operation: compat.Operation, args: list, kwargs: dict, output: Any) -> None:
        tensors = []
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                found = self._find(x)
                self._possible &= found is not None
                tensors.append((i, *(found or (0, None))))
                args[i] = None
        # only simple operations can be replayed: no lists of tensors, tensors by keyword, several results, or results
        # whose size depends on values
        simple = isinstance(output, Tensor) and not any(isinstance(x, (Tensor, list)) for x in kwargs.values())
        simple &= not any(isinstance(x, list) and any(isinstance(y, Tensor) for y in x) for x in args)
        self._possible &= simple and not operation.by_value
        # an operation that overwrites its argument returns the argument, which already has a slot
        result = self._slot(output) if simple and operation.makes else None
        call = functools.partial(func, **kwargs) if kwargs else func
        self._steps.append(Step(self._buffers, call, False, args, tensors, result))
        self._buffers = []

    def replay(self, output: Any, inputs: Sequence = (), by_rows: RowCall | None = None) -> Callable | None:
        """Return `call(stream, tensors, pointers)`, which replays the capture; None if it is not replayable.

        With `by_rows` the replay serves `inputs` of other batch sizes and lengths, too, if `row_call` allows that.
        """
        single = isinstance(output, Tensor)
        outputs = [None if x is None else self._find(x) or (-1, None) for x in ((output,) if single else output)]
        if not self._steps or not self._possible or (-1, None) in outputs:
            return None
        self._steps[-1].buffers.extend(self._buffers)
        make = (lambda x: x[0]) if single else getattr(type(output), "_make", type(output))
        if by_rows is not None and len(self._kernels) == len(self._steps) == 1:
            step = self._steps[0]
            launched = step.call, step.buffers, step.operands
            call = row_call(by_rows, self._kernels[0], *launched, inputs, outputs, make, launching().launch())
            self.by_rows = call is not None
            if call is not None:
                return call
        return compiled(self._steps, self._first, outputs, make, launching().launch())
