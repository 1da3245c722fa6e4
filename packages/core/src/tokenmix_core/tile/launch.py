"""Launches without Triton's own search for the compiled kernel, which costs more host time than the launch itself."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.runtime.driver import driver

# arguments that were launched before; beyond that many the oldest half is forgotten
_REMEMBERED = 4096


class Launcher:
    """A `triton.jit` kernel that remembers what it compiled for which arguments.

    Triton compiles a kernel anew for other dtypes, alignments of pointers, and divisibilities of numbers. To find the
    right one it inspects every argument at every launch. Here the arguments themselves are the key, tensors by dtype
    and alignment, so that a repeated call is one look-up. Used as a decorator above `triton.jit`; launched alike.
    """

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.fn = kernel
        self.__doc__ = kernel.__doc__
        self._compiled: dict[tuple, object] = {}

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self._launch(grid, args, options)

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict[str, int]) -> None:
        described = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in args]
        key = (*described, *options.values(), driver.active.get_current_device())
        compiled = self._compiled.get(key)
        if compiled is None:
            # the interpreter compiles nothing and returns nothing
            compiled = self.fn[grid](*args, **options)
            if compiled is not None:
                if len(self._compiled) >= _REMEMBERED:
                    for old in list(self._compiled)[: _REMEMBERED // 2]:
                        del self._compiled[old]
                self._compiled[key] = compiled
        else:
            compiled[(*grid, 1, 1)](*args)
