"""Choose the compiled form of a kernel: one for a call's numbers, or one for all lengths.

Triton compiles a kernel again if an integer argument becomes 1 or a multiple of 16. With lengths that vary, each of a
kernel's counts (tokens, tiles, documents) is such a multiple now and then, and every combination of them would be
compiled, which takes seconds. So the first call is compiled for its numbers; for later calls whose numbers combine
otherwise, those arguments that were seen to vary are left unspecialised, in one form that serves all their values. A
call that is replayed often gets a form of its own (`specialised`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tokenmix_core.kernels.launch import compat

# kinds of calls of a kernel whose first numbers are remembered; beyond that many the first are forgotten
_REMEMBERED = 1024


class _Specialised(threading.local):
    on = False


_specialised = _Specialised()


@contextmanager
def specialised() -> Iterator[None]:
    """Within it, launches of this thread are compiled for their own numbers."""
    before, _specialised.on = _specialised.on, True
    try:
        yield
    finally:
        _specialised.on = before


def asked() -> bool:
    """Tell whether this thread is within `specialised`."""
    return _specialised.on


class Forms:
    """The forms of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._names = compat.argument_names(kernel)
        # which arguments are compiled in
        self._constant = compat.compiled_in(kernel)
        # by kind of call but for numbers, the numbers of the first such call by place, and places where they varied
        self._first: dict[tuple, tuple[dict[int, int], set[int]]] = {}
        # by places, the kernel with these left unspecialised
        self._general: dict[frozenset[int], Any] = {}

    def key(self, device: int, args: tuple, options: dict) -> tuple:
        """What Triton compiles a kernel for: the device, arguments by kind or, if compiled in, value, and options."""
        kinds: list[Any] = [device]
        for x, constant in zip(args, self._constant, strict=True):
            kinds.append(x if constant and not isinstance(x, Tensor) else kind(x))
        return (*kinds, *options.items())

    def general(self, key: tuple, args: tuple) -> tuple[tuple, Any] | None:
        """The key and the kernel for all values of the numbers that vary; None for the first call of its kind."""
        numbers = {
            i: x for i, (x, c) in enumerate(zip(args, self._constant, strict=True)) if x.__class__ is int and not c
        }
        alike = tuple(None if i - 1 in numbers else x for i, x in enumerate(key))
        found = self._first.get(alike)
        if found is None:
            if len(self._first) >= _REMEMBERED:
                del self._first[next(iter(self._first))]
            self._first[alike] = numbers, set()
            return None
        first, varying = found
        # strides that stay multiples of 16 remain known as such: copies may need it
        varying.update(i for i, x in numbers.items() if (y := first.get(i, 1)) != x and (x | y) & 15)
        if not varying:
            return None
        places = frozenset(varying)
        if places not in self._general:
            names = [self._names[i] for i in sorted(places)]
            self._general[places] = compat.unspecialised(self.kernel, names)
        kernel = self._general[places]
        if kernel is None:
            return None
        return ("any", *(_width(args[i - 1]) if i - 1 in varying else x for i, x in enumerate(key))), kernel

    def refuse(self, kernel: Any) -> None:
        """Compile no more calls by this kernel, which does not compile."""
        self._general |= {places: None for places, known in self._general.items() if known is kernel}


def kind(x: Any) -> Any:
    """What Triton distinguishes an argument by: dtype and alignment, or 1, divisibility by 16, and size of a number."""
    cls = x.__class__
    if cls is int:
        found = 1 if x == 1 else 2 if x & 15 else 16
        return found if -0x80000000 <= x <= 0x7FFFFFFF else (found, _width(x))
    if cls is float or cls is bool:
        return cls
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() & 15 == 0 else (x.dtype,)
    return x


def _width(x: Any) -> Any:
    """The size of a number in Triton; the kind of what is none."""
    if x.__class__ is not int:
        return kind(x)
    return "i32" if -0x80000000 <= x <= 0x7FFFFFFF else "i64" if x < 1 << 63 else "u64"
