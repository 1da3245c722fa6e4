"""Launches bound to a compiled kernel, by what torch's compiled code launches with: a third of Triton's host time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

# the first and the first later version of Triton whose kernels are known to take their arguments so
_VERSIONS = (3, 6), (3, 10)
# Triton's types of arguments in torch's letters
_LETTERS = {
    "i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "u1": "I", "u8": "B", "u16": "H", "u32": "I", "u64": "K",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


def bound(kernel: Any, grid: tuple[int, int, int], args: list) -> tuple[Callable, list]:
    """`call(stream, *args)`, which launches a compiled kernel, and those of the arguments that it takes.

    Tensors may be given by their addresses.
    """
    letters = _letters(kernel, args)
    # no block is no launch, which is an error to the driver
    if letters is None or 0 in grid:
        run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
        return lambda stream, *args: run(*grid, stream, function, metadata, None, None, None, *args), args
    launch, function, (x, y, z) = torch._C._StaticCudaLauncher._launch_kernel, kernel.function, grid
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    taken = [x for x, letter in zip(args, letters, strict=True) if letter]
    # Triton's kernels end in two addresses of scratch memory
    types = "".join(letters) + "OO"

    def call(stream, *args):
        launch(function, x, y, z, warps, shared, types, args, stream)

    return call, [*taken, None, None]


def _letters(kernel: Any, args: list) -> list[str] | None:
    """A letter for each argument, none for what was compiled in; None where torch cannot launch the kernel."""
    metadata, signature = kernel.metadata, list(kernel.src.signature.values())
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    simple = _VERSIONS[0] <= version < _VERSIONS[1] and metadata.target.backend == "cuda" and metadata.num_ctas == 1
    simple &= not (metadata.launch_cooperative_grid or metadata.launch_pdl)
    simple &= not (metadata.global_scratch_size or metadata.profile_scratch_size)
    simple &= not getattr(metadata, "instrumentation_mode", "")
    simple &= hasattr(torch._C, "_StaticCudaLauncher") and len(signature) == len(args)
    if not simple or not all(isinstance(x, str) for x in signature):
        return None
    letters = {"constexpr": "", **_LETTERS, **{x: "O" for x in signature if x[0] == "*"}}
    return [letters[x] for x in signature] if letters.keys() >= set(signature) else None
