"""Launches without Triton's own search for the compiled kernel, which costs more host time than the launch itself."""

from __future__ import annotations

import triton
from torch import Tensor
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


class _Launcher:
    def __init__(self, kernel: triton.JITFunction) -> None:
        self.fn = kernel
        self.__doc__ = kernel.__doc__
        self._compiled: dict[tuple, tuple] = {}
        # how many of the first arguments may be tensors
        self._tensors = 0

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self._launch(grid, args, options)

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        found = self._compiled.get(self._key(args, options))
        if found is None:
            self._compile_and_launch(grid, args, options)
        else:
            compiled, named = found
            compiled[(*grid, 1, 1)](*args, *named)

    def _key(self, args: tuple, options: dict) -> tuple:
        tensors = [
            (x.dtype if x.data_ptr() & 15 == 0 else (x.dtype,)) if isinstance(x, Tensor) else x
            for x in args[: self._tensors]
        ]
        return driver.active.get_current_device(), *tensors, *args[self._tensors :], *options.values()

    def _compile_and_launch(self, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        compiled = self.fn[grid](*args, **options)
        self._tensors = max(self._tensors, *(i + 1 for i, x in enumerate(args) if isinstance(x, Tensor)))
        if len(self._compiled) >= _REMEMBERED:
            for old in list(self._compiled)[: _REMEMBERED // 2]:
                del self._compiled[old]
        named = tuple(options[name] for name in self.fn.arg_names[len(args) :])
        self._compiled[self._key(args, options)] = compiled, named
