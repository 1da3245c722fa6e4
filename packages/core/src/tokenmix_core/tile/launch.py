"""Launches without Triton's own search for the compiled kernel, which costs more host time than the launch itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from tokenmix_core.tile.driver import STREAM as STREAM
from tokenmix_core.tile.driver import bound

# a kernel, its grid, arguments, and those given by name
Launch = tuple[Any, tuple[int, ...], tuple, dict[str, Any]]

# calls remembered by a kernel; beyond that many the older half is forgotten
_REMEMBERED = 4096


def cached_launch(kernel):
    """A decorator above `triton.jit`: the kernel is launched as before, but faster from the second time on.

    Triton compiles a kernel anew for other dtypes, for other alignments of pointers, for other divisibilities of
    numbers, and inspects every argument at every launch to find the right one. Here the arguments themselves are the
    key, tensors by dtype and alignment, so that a repeated call is one look-up. All parameters must be given at each
    launch, tensors first. The interpreter's kernels stay as they are.
    """
    return _Launcher(kernel) if isinstance(kernel, triton.runtime.JITFunction) else kernel


@contextmanager
def compiled_together() -> Iterator[Callable]:
    """Gives `launch(kernel, grid, *args, **options)`, which launches in turn, at the end of the block.

    By then all kernels are known, so that the new ones are compiled side by side.
    """
    launches: list[Launch] = []
    yield lambda kernel, grid, *args, **options: launches.append((kernel, grid, args, options))
    launch_together(launches)


def launch_together(launches: list[Launch]) -> None:
    """Launch in turn, after making those kernels of `cached_launch` that are new side by side, where Triton can.

    That takes seconds a kernel, mostly outside Python: first they are compiled, then loaded with what launches them.
    """
    new = [x for x in launches if isinstance(x[0], _Launcher) and not x[0].knows(x[2], x[3])]
    if len(new) > 1 and hasattr(triton, "AsyncCompileMode"):
        device = current_device()
        with ThreadPoolExecutor(len(new)) as pool:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                made = [kernel.fn.warmup(*args, grid=grid, **options) for kernel, grid, args, options in new]
            loaded = list(pool.map(_load, made, [device] * len(made)))
        for (kernel, *_), compiled, succeeded in zip(new, made, loaded, strict=True):
            if not succeeded:
                _forget(kernel.fn, compiled)
    for kernel, grid, args, options in launches:
        kernel[grid](*args, **options)


def _load(kernel: Any, device: int) -> bool:
    # a thread begins on the first device
    with torch.cuda.device(device):
        kernel = kernel.result(ignore_errors=True) if isinstance(kernel, triton.FutureKernel) else kernel
        if kernel is not None:
            # asked for, it is there
            kernel.run  # noqa: B018
    return kernel is not None


def _forget(kernel: triton.JITFunction, failed: Any) -> None:
    # what did not compile beside others, which happens once in thousands, the launch compiles by itself or says why not
    for compiled, *_ in kernel.device_caches.values():
        for key in [key for key, value in compiled.items() if value is failed]:
            del compiled[key]


class _Taker(threading.local):
    take: Callable[[Launch], None] | None = None


_taker = _Taker()


@contextmanager
def taken(take: Callable[[Launch], None] | None) -> Iterator[None]:
    """Launches of this thread by `cached_launch` are handed to `take` instead; None: they are made."""
    before, _taker.take = _taker.take, take
    try:
        yield
    finally:
        _taker.take = before


def observed() -> bool:
    """Whether something, such as a profiler, wants to be told of launches by Triton itself."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def being_taken() -> bool:
    """Whether launches of this thread are handed to somebody."""
    return _taker.take is not None


def current_device() -> int:
    """The device that kernels are launched on."""
    return driver.active.get_current_device()


def current_stream(device: int) -> int:
    """The stream that kernels are launched on."""
    return driver.active.get_current_stream(device)


class _Launcher:
    def __init__(self, kernel: triton.JITFunction) -> None:
        self.fn = kernel
        self.__doc__ = kernel.__doc__
        self._compiled: dict[tuple, tuple] = {}
        # how many of the first arguments may be tensors
        self._tensors = 0

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self._launch(grid, args, options)

    def knows(self, args: tuple, options: dict) -> bool:
        """Whether such a call was made before."""
        return self._key(args, options)[0] in self._compiled

    def driver_call(self, grid: tuple[int, ...], args: tuple, options: dict) -> tuple[Callable, list]:
        """What a launch came to, `call(*args)`, with tensors as they were given, and `STREAM` for the stream."""
        *_, named, kernel = self._compiled[self._key(args, options)[0]]
        return bound(kernel, _three(grid), [*args, *named])

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        if _taker.take is not None:
            _taker.take((self, grid, args, options))
            return
        key, pointers = self._key(args, options)
        found = self._compiled.get(key)
        # what profilers hook into launches is called by Triton's own way alone
        if found is None or observed():
            self._compile_and_launch(grid, args, options)
            return
        run, function, metadata, named, _ = found
        stream = driver.active.get_current_stream(key[0])
        # a pointer given as a number is taken as it is; one given as a tensor is looked up in the driver
        run(
            *_three(grid), stream, function, metadata, None, None, None,
            *pointers, *args[len(pointers) :], *named,
        )  # fmt: skip

    def _key(self, args: tuple, options: dict) -> tuple[tuple, list]:
        """The key of a call, which begins with the device, and its first arguments with tensors as their addresses."""
        kinds, pointers = [], []
        for x in args[: self._tensors]:
            if isinstance(x, Tensor):
                pointer = x.data_ptr()
                kinds.append(x.dtype if pointer & 15 == 0 else (x.dtype,))
                pointers.append(pointer)
            else:
                kinds.append(x)
                pointers.append(x)
        key = (driver.active.get_current_device(), *kinds, *args[self._tensors :], *options.values())
        return key, pointers

    def _compile_and_launch(self, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        compiled = self.fn[grid](*args, **options)
        self._tensors = max(self._tensors, *(i + 1 for i, x in enumerate(args) if isinstance(x, Tensor)))
        if len(self._compiled) >= _REMEMBERED:
            for old in list(self._compiled)[: _REMEMBERED // 2]:
                del self._compiled[old]
        named = tuple(options[name] for name in self.fn.arg_names[len(args) :])
        found = compiled.run, compiled.function, compiled.packed_metadata, named, compiled
        self._compiled[self._key(args, options)[0]] = found


def _three(grid: tuple[int, ...]) -> tuple[int, ...]:
    return (*grid, *(1,) * (3 - len(grid)))
