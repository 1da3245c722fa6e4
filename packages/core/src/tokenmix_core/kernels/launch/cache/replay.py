"""Replay calls whose signature was captured before, and skip argument checks that passed before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels.launch import compat, flags, forms
from tokenmix_core.kernels.launch.cache.admission import Admission, keep_last
from tokenmix_core.kernels.launch.cache.capture import Capture, is_plain, launching
from tokenmix_core.kernels.launch.cache.codegen import alike, matching, renew
from tokenmix_core.kernels.launch.cache.row_calls import RowCall

# maximum number of calls that are cached for a function
MAX_CALLS = 96
# number of replays after which a call with a general form (`forms.py`) is captured again, compiled for its lengths
_SPECIALISED = 512
# maximum number of recent signatures with which a call is compared before its own signature is computed and looked up
_COMPARED = 4
# all instances of `Replayed` and `Checked`
_caches: list[Any] = []
# on_gpu(x): True if the tensor x is on a GPU, where kernels are compiled and launched
on_gpu = attrgetter("is_cuda")


def invalidate() -> None:
    """Drop all cached calls and checks; call this after changing a value that they depend on."""
    for x in _caches:
        x.clear()


class Replayed:
    """Wrap `run` with the launch cache: a GPU call whose signature recurs is captured, and replayed if possible.

    The launches of `run` may depend only on the call's signature: shapes, strides, dtypes and alignment of tensors, and
    values of other arguments. A call can be replayed if `run` only makes and views buffers, launches kernels of
    `cached_launch` and calls simple torch operations; else every call is run. A replay reuses the captured tiles, so
    `tuning.override` invalidates the cache, and code that changes another choice calls `invalidate`. The kernels of a
    captured call are compiled in parallel; for this purpose the first call with sizes of new bit lengths is captured at
    once. With `by_rows` one capture serves all batch sizes and lengths (`row_calls`).
    """

    def __init__(self, run: Callable, by_rows: RowCall | None = None) -> None:
        self.run, self._by_rows = run, by_rows
        # maps signatures to cached calls, in order of their last use; to None if the call cannot be replayed
        self._calls: dict[tuple, _Call | None] = {}
        # `match(*inputs)` of the latest signatures; it returns a replay's `call, stream, tensors, pointers`, or None
        self.recent: tuple[Callable, ...] = ()
        self._admission = Admission()
        _caches.append(self)

    def __call__(self, *inputs: Any) -> Any:
        for match in self.recent:
            found = match(*inputs)
            if found is not None:
                call, stream, tensors, pointers = found
                return call(stream, tensors, pointers)
        return self.miss(inputs)

    def miss(self, inputs: tuple, foresee: Callable | None = None) -> Any:
        """Make a call for which no function of `recent` matched.

        If the call is captured, its kernels are compiled together with those of `foresee(inputs, output)`, the call
        that is expected to follow.
        """
        signature, tensors, pointers = [], [], []
        for x in inputs:
            if isinstance(x, Tensor):
                pointer = x.data_ptr()
                tensors.append(x)
                pointers.append(pointer)
                signature += (x.dtype, x.shape, x.stride(), pointer & 15)
            else:
                signature.append(x)
        if not on_gpu(tensors[0]):
            return self.run(*inputs)
        launch = launching()
        device = launch.current_device()
        if tensors[0].get_device() != device:
            with torch.cuda.device(tensors[0].device):
                return self.miss(inputs, foresee)
        # captures find tensors by address, so a tensor given twice is ambiguous; empty tensors have no address
        addresses = [x for x in pointers if x]
        repeated = len(set(addresses)) < len(addresses)
        if repeated or not compat.captures or launch.replays_on(device) is None:
            return self.run(*inputs)
        key = (device, *signature)
        if key not in self._calls:
            magnitude = self._admission.new_magnitude(inputs)
            if magnitude is None and not self._admission.count(key, inputs):
                return self.run(*inputs)
            output = self._capture(inputs, tensors, key, None if magnitude is None else foresee)
            self._admission.add_magnitude(magnitude)
            return output
        known = self._calls[key] = self._calls.pop(key)
        if known is None:
            return self.run(*inputs)
        if known.general and known.replays[0] >= _SPECIALISED:
            # capture the call again: its kernels are then compiled for its lengths
            self.recent = tuple(x for x in self.recent if x is not known.match)
            with forms.specialised():
                return self._capture(inputs, tensors, key, None)
        if known.match is not None and known.match in self.recent:
            renew(known.match, inputs)
        self._expect(known)
        known.replays[0] += 1
        return known.replay(launch.current_stream(device), tensors, pointers)

    def _capture(self, inputs: tuple, tensors: list[Tensor], key: tuple, foresee: Callable | None) -> Any:
        capture = Capture(tensors)
        with capture.observing(), launching().taken(capture.take):
            output = self.run(*inputs)
        capture.launch([] if foresee is None else _foreseen(foresee, inputs, output))
        call, replays = capture.replay(output, inputs, self._by_rows), [0]
        self._admission.captured(inputs, replays)
        if call is None:
            self._calls[key] = None
        else:
            most = _SPECIALISED if capture.general else None
            match = matching(call, inputs, key[0], launching(), replays, most, by_rows=capture.by_rows)
            known = _Call(call, match, replays, capture.general)
            self._calls[key] = known
            self._expect(known)
        keep_last(self._calls, MAX_CALLS)
        return output

    def _expect(self, known: _Call) -> None:
        """Compare the next calls with the signature of `known` first."""
        if known.match is not None:
            self.recent = (known.match, *(x for x in self.recent if x is not known.match))[:_COMPARED]

    def clear(self) -> None:
        """Drop this function's cached calls."""
        self._calls.clear()
        self.recent = ()
        self._admission = Admission()


class _Call(NamedTuple):
    """A cached call.

    Attributes:
        replay: `replay(stream, tensors, pointers)`, which makes the call's launches.
        match: `match(*inputs)` of `codegen.matching`, which recognises calls with its signature; None if unavailable.
        replays: the number of replays, as a list of one element.
        general: whether one of its kernels is compiled for all lengths.
    """

    replay: Callable
    match: Callable | None
    replays: list[int]
    general: bool


class Checked:
    """Wrap `check` to return its earlier result for plain GPU tensors of a signature that passed before.

    A signature is stored, with generated code that compares arguments with it, when `Replayed` would capture a call: if
    it has a new magnitude or has occurred often enough (`Admission`).
    """

    def __init__(self, check: Callable) -> None:
        self.check = check
        # for each of the last signatures: its number of arguments, the function that recognises it, `check`'s result
        self._passed: tuple[tuple[int, Callable, Any], ...] = ()
        self._admission = Admission()
        _caches.append(self)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not flags.on:
            return self.check(*inputs)
        for number, same, result in self._passed:
            if number == len(inputs) and same(*inputs):
                return result
        result = self.check(*inputs)
        # do not cache checks of tensors without dimensions: the check may have read their values, which the signature
        # lacks
        if all(is_plain(x) and on_gpu(x) and x.dim() for x in inputs if isinstance(x, Tensor)):
            key = tuple((x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in inputs)
            magnitude = self._admission.new_magnitude(inputs)
            if magnitude is not None or self._admission.count(key, inputs):
                replays = [0]
                self._admission.captured(inputs, replays)
                self._admission.add_magnitude(magnitude)
                self._passed = ((len(inputs), alike(inputs, replays), result), *self._passed[: _COMPARED - 1])
        return result

    def clear(self) -> None:
        """Drop the signatures that passed, so that all calls are checked again."""
        self._passed = ()
        self._admission = Admission()


def _foreseen(foresee: Callable, *inputs: Any) -> list:
    """Return the launches that `foresee(*inputs)` would make, without making them."""
    launches: list = []
    # ignore errors here: the call itself will raise them again if it is ever made
    with launching().taken(launches.append), suppress(Exception):
        foresee(*inputs)
    return launches
