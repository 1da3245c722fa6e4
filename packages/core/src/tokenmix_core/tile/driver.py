"""Launches bound to a compiled kernel: what Triton finds out anew at every launch is found out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton

# stands for the stream among a launch's arguments
STREAM = object()
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


def bound(kernel: Any, grid: tuple[int, int, int], args: list) -> tuple[Callable, list]:
    """What to call with which arguments to launch a compiled kernel; tensors may be replaced by their addresses.

    It is Triton's launcher in C where its Python is known to do nothing else before.
    """
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    # what observes launches is told nothing, and has two hooks
    unobserved = None, None, None
    if not (3, 6) <= _VERSION < (3, 10) or _has_more_to_do(kernel.metadata):
        return run, [*grid, STREAM, function, metadata, *unobserved, *args]
    launch, first = run.launch, (function, run.launch_cooperative_grid, run.launch_pdl)
    no_scratch = None, None
    if _VERSION < (3, 7):
        return launch, [*grid, STREAM, *first, *no_scratch, metadata, *unobserved, *args]
    last = *first, metadata, *unobserved, *no_scratch, run.arg_annotations, run.kernel_signature
    return lambda stream, *args: launch(*grid, stream, *last, args), [STREAM, *args]


def _has_more_to_do(metadata: Any) -> bool:
    """Whether a launch also makes scratch memory, serves an instrument or another vendor's device."""
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    return bool(scratch or getattr(metadata, "instrumentation_mode", "") or metadata.target.backend != "cuda")
