"""Fit a portable kernel into the shared memory of its device: fewer pipeline stages, then smaller loop tiles.

Tiles are measured on Hopper, whose blocks have more shared memory than those of most chips. A compiled kernel tells
how much shared memory it needs; if a block of the device has less, the next smaller configuration is compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenmix_core.kernels.launch import compat

# minimum size of a tile's dimension in an MMA
_SMALLEST = 16
# Triton's default of `num_stages`
_STAGES = 3


def shared_memory() -> int | None:
    """Return the bytes of shared memory that a block may have on the current GPU; None without CUDA, or if unknown."""
    found = compat.find("triton.compiler.compiler:max_shared_mem")
    return found(compat.current_device()) if found is not None and torch.cuda.is_initialized() else None


def compiled(
    kernel: Any, grid: tuple, args: tuple, options: dict, loop_tiles: tuple[str, ...], limit: int | None
) -> tuple[Any, tuple, dict]:
    """Compile a launch's kernel so that it needs at most `limit` bytes of shared memory; None means no limit.

    Args:
        kernel: the `triton.jit` function.
        grid, args, options: those of the launch; `args` are all arguments in order.
        loop_tiles: names of the constexprs that may be reduced: neither the grid nor a tensor's shape depends on them.
        limit: bytes of shared memory that a block may have.

    Returns:
        The compiled kernel, and the arguments and options that it was compiled with.

    Raises:
        ValueError: the smallest configuration needs more than `limit`.
    """
    while True:
        made = compat.result(kernel.warmup(*args, grid=grid, **options))
        if fits(made, limit):
            return made, args, options
        smaller = _reduced(compat.argument_names(kernel), loop_tiles, args, options)
        if smaller is None:
            raise ValueError(
                f"{kernel.__name__} needs {made.metadata.shared:,} bytes of shared memory with its smallest tiles, and "
                f"a block of this device has {limit:,}; pass 16-bit inputs, smaller heads or impl='reference'"
            )
        args, options = smaller


def fits(made: Any, limit: int | None) -> bool:
    """Tell whether the compiled kernel `made` needs at most `limit` bytes of shared memory; None means no limit."""
    return limit is None or getattr(getattr(made, "metadata", None), "shared", 0) <= limit


def _reduced(names: list[str], loop_tiles: tuple[str, ...], args: tuple, options: dict) -> tuple[tuple, dict] | None:
    """Return arguments and options with one stage less or, if there is one stage, half the widest loop tile.

    Return None if nothing can be reduced.
    """
    if (stages := options.get("num_stages", _STAGES)) > 1:
        return args, {**options, "num_stages": stages - 1}
    sizes = {names.index(name): args[names.index(name)] for name in loop_tiles}
    widest = max(sizes, key=lambda i: sizes[i], default=None)
    if widest is None or sizes[widest] <= _SMALLEST:
        return None
    return (*args[:widest], sizes[widest] // 2, *args[widest + 1 :]), options
