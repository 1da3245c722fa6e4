"""Select the compiled form of a kernel: specialised for a call's integers, or general for all lengths.

Triton compiles a kernel again if an integer argument becomes 1 or a multiple of 16, unless the kernel declares it in
`do_not_specialize`. If lengths vary, each integer argument (number of tiles, of documents, …) is occasionally such a
multiple, and every combination would be compiled, which takes seconds. So the first call is compiled for its integers.
Later calls with other integers use a general form, in which the arguments that have varied are not specialised either,
except those that were multiples of 16 in both calls; if none of the varied arguments was 1 or a multiple of 16 at the
first call, the first call's form is the general one. A call that is replayed often gets a form of its own
(`specialised`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tokenmix_core.kernels.launch import compat

# maximum number of a kernel's signatures for which the first call's integers are stored; the oldest is dropped
_MAX_SIGNATURES = 1024


class _Specialised(threading.local):
    on = False


_specialised = _Specialised()


@contextmanager
def specialised() -> Iterator[None]:
    """Compile the kernels that this thread launches inside the block for the integers of each launch."""
    before, _specialised.on = _specialised.on, True
    try:
        yield
    finally:
        _specialised.on = before


def asked() -> bool:
    """True if this thread is inside a `specialised` block."""
    return _specialised.on


class Forms:
    """The compiled forms of one kernel, specialised and general."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._names = compat.argument_names(kernel)
        # for each parameter, whether it is a constexpr
        self._constant = compat.constexprs(kernel)
        # for each parameter, whether the kernel declares it unspecialised, so that its values select no other form
        self._declared = compat.declared_unspecialised(kernel)
        # maps the classes of arguments to generated code that reads them, see `read`
        self._readers: dict[tuple, Callable] = {}
        # maps a signature without its integers to the first call's integers by argument index, and to the indices that
        # have varied
        self._first: dict[tuple, tuple[dict[int, int], set[int]]] = {}
        # maps indices of integers to the kernel that does not specialise these integers; None if it does not compile
        self._general: dict[frozenset[int], Any] = {}

    def read(self, device: int, args: tuple, options: dict) -> tuple[tuple, tuple]:
        """Return the key of a call's kernel, and the call's arguments with addresses instead of tensors.

        The key has the device, kinds of arguments, values of constexprs, and options.
        """
        classes = tuple(map(type, args))
        reader = self._readers.get(classes)
        if reader is None:
            reader = self._readers[classes] = self._reader(classes)
        return reader(device, options, *args)

    def _reader(self, classes: tuple[type, ...]) -> Callable:
        """Generate `read` for arguments of these classes: code without a loop takes a third of the time."""
        lines, kinds, values = [], [], []
        for i, (cls, constant, declared) in enumerate(zip(classes, self._constant, self._declared, strict=True)):
            x = f"x{i}"
            if issubclass(cls, Tensor):
                lines.append(f"    p{i} = {x}.data_ptr()\n")
                kinds.append(f"({x}.dtype,) if p{i} & 15 else {x}.dtype")
                values.append(f"p{i}")
                continue
            if not constant and cls is int:
                usual, other = ("'i32'", _width) if declared else (f"1 if {x} == 1 else 2 if {x} & 15 else 16", kind)
                kinds.append(f"({usual}) if -0x80000000 <= {x} <= 0x7FFFFFFF else {other.__name__}({x})")
            else:
                kinds.append(cls.__name__ if not constant and cls in (float, bool) else x)
            values.append(x)
        given = "".join(f", x{i}" for i in range(len(classes)))
        key = ", ".join(["device", *kinds, "*options.items()"])
        names = {"kind": kind, "_width": _width}
        exec(f"def read(device, options{given}):\n{''.join(lines)}    return ({key}), ({', '.join(values)},)", names)
        return names["read"]  # type: ignore[return-value]

    def tile_key(self, device: int, args: tuple, options: dict) -> tuple:
        """Return the key under which a kernel's reduced tiles are stored: `key` without integers, floats, alignment."""
        kinds = (
            x if constant or x is None else x.dtype if isinstance(x, Tensor) else type(x)
            for x, constant in zip(args, self._constant, strict=True)
        )
        return (device, *kinds, *options.items())

    def general(self, key: tuple, args: tuple, loaded: Container[tuple]) -> tuple[tuple, Any] | None:
        """Return key and kernel of the general form; None if no integer has varied or no general form exists.

        `loaded` are the keys of the kernel's loaded forms, one of which may serve as its general form.
        """
        fixed = [a or b for a, b in zip(self._constant, self._declared, strict=True)]
        integers = {i: x for i, (x, c) in enumerate(zip(args, fixed, strict=True)) if x.__class__ is int and not c}
        alike = tuple(None if i - 1 in integers else x for i, x in enumerate(key))
        found = self._first.get(alike)
        if found is None:
            if len(self._first) >= _MAX_SIGNATURES:
                del self._first[next(iter(self._first))]
            self._first[alike] = integers, set()
            return None
        first, varying = found
        # integers that remain multiples of 16 stay specialised: async copies may need strides known to be aligned
        varying.update(i for i, x in integers.items() if (y := first.get(i, 1)) != x and (x | y) & 15)
        if not varying:
            return None
        plain = tuple(_unspecialised(args[i - 1]) if i - 1 in varying else x for i, x in enumerate(key))
        if plain in loaded:
            return plain, self.kernel
        indices = frozenset(varying)
        if indices not in self._general:
            names = [self._names[i] for i in sorted(indices)]
            self._general[indices] = compat.unspecialised(self.kernel, names)
        kernel = self._general[indices]
        if kernel is None:
            return None
        return ("any", *(_width(args[i - 1]) if i - 1 in varying else x for i, x in enumerate(key))), kernel

    def refuse(self, kernel: Any) -> None:
        """Stop using the general form `kernel`, because it does not compile."""
        self._general |= {indices: None for indices, known in self._general.items() if known is kernel}


def kind(x: Any) -> Any:
    """Return what kernels are specialised for: a tensor's dtype and alignment, an integer's divisibility and width.

    Of a float or bool it is the class, of any other argument the argument itself.
    """
    cls = x.__class__
    if cls is int:
        found = 1 if x == 1 else 2 if x & 15 else 16
        return found if -0x80000000 <= x <= 0x7FFFFFFF else (found, _width(x))
    if cls is float or cls is bool:
        return cls
    if isinstance(x, Tensor):
        return x.dtype if x.data_ptr() & 15 == 0 else (x.dtype,)
    return x


def _unspecialised(x: int) -> Any:
    """Return `kind` of an integer of x's width that is neither 1 nor a multiple of 16: a form for it serves x, too."""
    width = _width(x)
    return 2 if width == "i32" else (2, width)


def _width(x: Any) -> Any:
    """Return Triton's type of an integer argument, and `kind(x)` of any other argument."""
    if x.__class__ is not int:
        return kind(x)
    return "i32" if -0x80000000 <= x <= 0x7FFFFFFF else "i64" if x < 1 << 63 else "u64"
