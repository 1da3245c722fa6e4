"""Launch kernels by NVIDIA's driver: arguments are packed once, and a call in C (`launches.c`) launches them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, NamedTuple

from tokenmix_core.kernels.launch import compat, compiled

# maps Triton's argument types to format characters of `struct`; compiled kernels get no constexprs
_FORMATS = {
    "*": "Q", "constexpr": None, "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip
# maximum number of arguments of a kernel, as in `launches.c`
_MAX_PARAMETERS = 96
# maximum size of a grid's second and third axis; the maximum of the first axis is 2^31 − 1
_MAX_PROGRAMS = 65_535


class Loaded(NamedTuple):
    """A compiled kernel on a device.

    Attributes:
        function: CUDA's handle of the kernel.
        threads: threads of a program.
        shared: bytes of shared memory of a program.
        pdl: whether the kernel is launched with programmatic dependent launch.
        formats: `struct` format of each argument; None for constexprs.
    """

    function: int
    threads: int
    shared: int
    pdl: bool
    formats: tuple[str | None, ...]


@functools.cache
def loaded(kernel: Any, device: int) -> Loaded | None:
    """Load a compiled kernel on a device; return None if Triton must launch the kernel or report its error."""
    names, x = compat.launching(), compiled.described(kernel)
    if names is None or x is None or x.more:
        return None
    types, threads = ["*" if y[0] == "*" else y for y in x.types], 32 * x.warps
    usual = x.backend == "cuda" and x.ctas == 1 and all(y in _FORMATS for y in types)
    small = len(types) + 2 <= _MAX_PARAMETERS and x.shared <= names.max_shared(device)
    found = compiled.put_on_device(x, device) if usual and small else None
    if found is None:
        return None
    function, most = found
    return Loaded(function, threads, x.shared, x.pdl, tuple(_FORMATS[y] for y in types)) if threads <= most else None


def packed(kernel: Loaded, grid: tuple[int, ...], args: Iterable, pointers: Mapping[int, tuple[int, int]]) -> bytes:
    """Return a launch as bytes for `launch`, which accepts the concatenated bytes of several launches.

    A grid without programs gives no bytes.

    `pointers` maps the index of each argument that only the launch sets to `(i, byte offset)`: the argument is the i-th
    of the addresses that `launch` gets, counted from 1 (0 is the stream), plus the offset.

    Raises:
        ValueError: the grid is larger than GPUs allow.
    """
    grid = (*grid, 1, 1)[:3]
    if not all(grid):
        return b""
    if grid[1] > _MAX_PROGRAMS or grid[2] > _MAX_PROGRAMS:
        raise ValueError(
            f"a kernel needs {grid[1]:,} × {grid[2]:,} programs along its grid's second and third axis, and GPUs "
            f"launch up to {_MAX_PROGRAMS:,} along each: split heads or channels over several calls"
        )
    pack, given, places = _packing(kernel.formats)
    values, later = [*compress(args, given)], []
    for i, pointer in pointers.items():
        if given[i]:
            values[places[i]] = 0
            later += [places[i], *pointer]
    sizes = kernel.threads, kernel.shared, kernel.pdl, len(values) + 2, len(later) // 3
    words = pack(_cuda_launch(), kernel.function, *grid, *sizes, *values)
    return words + struct.pack(f"{len(later)}Q", *later) if later else words


@functools.cache
def _packing(formats: tuple[str | None, ...]) -> tuple[Callable[..., bytes], tuple[bool, ...], tuple[int, ...]]:
    """Return a function that packs a launch; for each argument, whether it is packed, and its index among those packed.

    The function packs ten header values, arguments, and two null pointers for scratch memory.
    """
    given = tuple(form is not None for form in formats)
    words = (f"{form}{8 - struct.calcsize(form)}x" for form in formats if form is not None)
    return struct.Struct(f"<10Q{''.join(words)}16x").pack, given, tuple(accumulate(given, initial=0))


@functools.cache
def launch() -> Callable[..., None] | None:
    """Return `launch(packed, stream, *addresses)` of `launches.c`, compiled at its first use like Triton's launchers.

    Returns None if Triton makes all launches.
    """
    names = compat.launching()
    if names is None:
        return None
    text = Path(__file__).with_name("launches.c").read_text()
    module = names.build(text, "launches", include_dirs=names.include_dirs)
    module.enter, module.fail = _enter, _fail
    return module.launch


def _enter() -> None:
    """Make the device's context current if this thread has none: the driver, unlike CUDA's runtime, needs one."""
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
    """Return the CUDA version of the driver, 1000 · major + 10 · minor."""
    found = ctypes.c_int()
    _cuda().cuDriverGetVersion(ctypes.byref(found))
    return found.value


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _cuda_launch() -> int:
    return ctypes.cast(_cuda().cuLaunchKernelEx, ctypes.c_void_p).value or 0
