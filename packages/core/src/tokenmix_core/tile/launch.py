"""Launches without Triton's own search for the compiled kernel, which costs more host time than the launch itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

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

    By then all kernels are known, so that those of `cached_launch` that are new are compiled side by side, where Triton
    can: compiling takes seconds a kernel, mostly outside Python.
    """
    launches = []
    yield lambda kernel, grid, *args, **options: launches.append((kernel, grid, args, options))
    new = [x for x in launches if isinstance(x[0], _Launcher) and not x[0].knows(x[2], x[3])]
    if len(new) > 1 and hasattr(triton, "AsyncCompileMode"):
        with ThreadPoolExecutor(len(new)) as pool, triton.AsyncCompileMode(pool):
            for kernel, grid, args, options in new:
                kernel.fn.warmup(*args, grid=grid, **options)
    for kernel, grid, args, options in launches:
        kernel[grid](*args, **options)


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

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        key, pointers = self._key(args, options)
        found = self._compiled.get(key)
        # what profilers hook into launches is called by Triton's own way alone
        if found is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            self._compile_and_launch(grid, args, options)
            return
        run, function, metadata, named = found
        stream = driver.active.get_current_stream(key[0])
        # a pointer given as a number is taken as it is; one given as a tensor is looked up in the driver
        run(
            *grid, *(1,) * (3 - len(grid)), stream, function, metadata, None, None, None,
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
        found = compiled.run, compiled.function, compiled.packed_metadata, named
        self._compiled[self._key(args, options)[0]] = found
