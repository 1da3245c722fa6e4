"""Context managers that forbid launches, list grids, or count replays of the launch cache, also in the interpreter."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from tokenmix_core.kernels.launch import compat
from tokenmix_core.kernels.launch.cache import capture, codegen, replay
from tokenmix_core.kernels.launch.pdl import PDL


@contextmanager
def no_launches() -> Iterator[None]:
    """Context manager that raises an AssertionError if a kernel is launched in it."""
    from tokenmix_core.kernels.launch import launcher

    def refuse(launch: tuple) -> NoReturn:
        raise AssertionError(f"{launch[0].fn.__name__} was launched")

    with pytest.MonkeyPatch.context() as patch, launcher.taken(refuse):
        _let_launches_be_taken(patch)
        yield


@contextmanager
def grids() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Context manager: launches do nothing; yield a list that collects names and grids of launched kernels."""
    from tokenmix_core.kernels.launch import launcher

    found: list[tuple[str, tuple[int, ...]]] = []
    with pytest.MonkeyPatch.context() as patch, launcher.taken(lambda x: found.append((x[0].fn.__name__, x[1]))):
        _let_launches_be_taken(patch)
        yield found


@contextmanager
def replays() -> Iterator[list[int]]:
    """Context manager: count the calls that the launch cache replays; yield a list whose only element is the count."""
    made, compiled = [0], codegen.compiled

    def counted(*captured: Any) -> Callable:
        call = compiled(*captured)

        def count(*inputs: Any) -> Any:
            made[0] += 1
            return call(*inputs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "compiled", counted)
        if not torch.cuda.is_available():
            _take_for_a_gpu(patch)
        replay.invalidate()
        yield made
    replay.invalidate()


def _take_for_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Make the launch cache treat a CPU as a GPU."""
    from tokenmix_core.kernels.launch import launcher

    patch.setattr(replay, "on_gpu", lambda x: True)
    patch.setattr(compat, "empty", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
    patch.setattr(launcher, "current_device", lambda: -1)
    patch.setattr(launcher, "current_stream", lambda device: 0)
    launches: list[_Packed] = []
    patch.setattr(launcher, "launch", lambda: lambda packed, *addresses: _launch(launches, packed, addresses))
    _let_launches_be_taken(patch, launches)


def _let_launches_be_taken(patch: pytest.MonkeyPatch, launches: list | None = None) -> None:
    """Pass launches of interpreted kernels to `launcher.taken`'s function, as `cached_launch` passes compiled ones."""
    from triton.runtime.interpreter import InterpretedFunction

    from tokenmix_core.kernels.launch import launcher

    def getitem(kernel: Any, grid: tuple) -> Callable:
        def launch(*args: Any, **options: Any) -> None:
            take = launcher._taker.take
            if take is None:
                kernel.run(*args, grid=grid, warmup=False, **options)
            else:
                # pass all arguments by position, with PDL off; the other options are for the compiler and do nothing
                # here
                options = {PDL: False, **options}
                args = (*args, *(options[name] for name in kernel.arg_names[len(args) :]))
                take((_Interpreted(kernel, launches), grid, args, {}))

        return launch

    patch.setattr(InterpretedFunction, "__getitem__", getitem, raising=False)


class _Packed:
    """A launch, stored with the dtypes of its tensors instead of the tensors.

    `pointers` maps a tensor's index in `args` to the index of an address that a replay passes, and an offset in bytes.
    """

    def __init__(self, kernel: Any, grid: tuple, args: tuple, pointers: dict[int, tuple[int, int]]) -> None:
        self.kernel, self.grid, self.pointers = kernel, grid, pointers
        self.args = [x.dtype if isinstance(x, Tensor) else x for x in args]
        self.tensors = [i for i, x in enumerate(args) if isinstance(x, Tensor)]


class _Interpreted:
    """An interpreted kernel with the interface that the launchers of `cached_launch` have."""

    def __init__(self, kernel: Any, launches: list[_Packed] | None) -> None:
        self.fn, self._launches = kernel, launches

    def __getitem__(self, grid: tuple) -> Callable:
        return self.fn[grid]

    def packing(self, grid: tuple, args: tuple, options: dict) -> Callable[[dict], bytes]:
        """Return `pack(pointers)`, which stores the launch and returns its index in place of packed arguments."""

        def pack(pointers: dict) -> bytes:
            assert self._launches is not None
            self._launches.append(_Packed(self.fn, grid, args, pointers))
            return struct.pack("q", len(self._launches) - 1)

        return pack


def _launch(launches: list[_Packed], packed: bytes, addresses: tuple) -> None:
    """Replacement of the C launcher: run the kernels whose indices are in `packed`, with tensors at `addresses`."""
    for (number,) in struct.iter_unpack("q", packed):
        found = launches[number]
        args, known = list(found.args), {}
        for i in found.tensors:
            name, offset = found.pointers.get(i, (None, 0))
            if name is None:
                args[i] = torch.empty(0, dtype=args[i])
                continue
            address = addresses[name] + offset
            # one storage for each address: the interpreter tells memory apart by storage
            if address not in known:
                known[address] = torch.frombuffer((ctypes.c_char * 8).from_address(address), dtype=torch.uint8)
            args[i] = known[address].view(args[i])
        found.kernel[found.grid](*args)
