"""Launches by NVIDIA's driver: what one needs is packed once, and later handed over by a call in C (`launches.c`)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenmix_core.kernels.launch import compat

# how `struct` packs arguments of Triton's types: addresses, numbers, and what is compiled in
_FORMATS = {
    "*": "Q", "constexpr": None, "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip
# as in `launches.c`
_MOST_PARAMETERS = 96


class Loaded(NamedTuple):
    """A compiled kernel on a device.

    Attributes:
        function: CUDA's handle of it.
        threads: a program's.
        shared: bytes of shared memory.
        early: whether it may begin before the launch ahead of it has ended.
        formats: of its arguments; None for those that are compiled in.
    """

    function: int
    threads: int
    shared: int
    early: bool
    formats: tuple[str | None, ...]


@functools.cache
def loaded(kernel: Any, device: int) -> Loaded | None:
    """A kernel that Triton compiled, put on a device; None for one that Triton itself has to launch, or to refuse."""
    names, x = compat.launching(), compat.described(kernel)
    if names is None or x is None or x.more:
        return None
    types, threads = ["*" if y[0] == "*" else y for y in x.types], 32 * x.warps
    usual = x.backend == "cuda" and x.ctas == 1 and all(y in _FORMATS for y in types)
    small = len(types) + 2 <= _MOST_PARAMETERS and x.shared <= names.most_shared(device)
    found = compat.put_on_device(x, device) if usual and small else None
    if found is None:
        return None
    function, most = found
    return Loaded(function, threads, x.shared, x.early, tuple(_FORMATS[y] for y in types)) if threads <= most else None


def packed(kernel: Loaded, grid: tuple[int, ...], args: Iterable, places: Mapping[int, tuple[int, int]]) -> bytes:
    """One launch for `launch`, which may be followed by others.

    `places` tells which arguments are addresses of a later call, `place: (which of them, bytes from there)`; the stream
    comes first among these.
    """
    grid = (*grid, 1, 1)[:3]
    if not all(grid):
        return b""
    values, later = [], []
    for place, (form, x) in enumerate(zip(kernel.formats, args, strict=True)):
        if form is None:
            continue
        if place in places:
            later += [len(values), *places[place]]
            x = 0
        values.append(x)
    sizes = kernel.threads, kernel.shared, kernel.early, len(values) + 2, len(later) // 3
    pack = _packing(kernel.formats)
    return pack(_cuda_launch(), kernel.function, *grid, *sizes, *values) + struct.pack(f"{len(later)}Q", *later)


@functools.cache
def _packing(formats: tuple[str | None, ...]) -> Callable[..., bytes]:
    """Pack the head of a launch and its arguments, a word each, with empty fields for scratch memory."""
    words = (f"{form}{8 - struct.calcsize(form)}x" for form in formats if form is not None)
    return struct.Struct(f"<10Q{''.join(words)}16x").pack


@functools.cache
def launch() -> Callable[..., None] | None:
    """`launch(packed, stream, *addresses)`, compiled on its first use as Triton compiles its own launchers.

    None where Triton makes all launches.
    """
    names = compat.launching()
    if names is None:
        return None
    text = Path(__file__).with_name("launches.c").read_text()
    module = names.build(text, "launches", include_dirs=names.include_dirs)
    module.enter, module.fail = _enter, _fail
    return module.launch


def _enter() -> None:
    """Let this thread use the current device: the driver, unlike CUDA's runtime, waits to be told."""
    context = ctypes.c_void_p()
    _cuda().cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), compat.current_device())
        _cuda().cuCtxSetCurrent(context)


def _fail(error: int) -> None:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(error, ctypes.byref(text))
    raise RuntimeError(f"CUDA error {error} at a launch: {(text.value or b'unknown').decode()}")


def version() -> int:
    """The driver's version of CUDA, 1000 · major + 10 · minor."""
    found = ctypes.c_int()
    _cuda().cuDriverGetVersion(ctypes.byref(found))
    return found.value


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _cuda_launch() -> int:
    return ctypes.cast(_cuda().cuLaunchKernelEx, ctypes.c_void_p).value or 0
