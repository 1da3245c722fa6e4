"""Selection of kernel configurations by the device, and `override`; tables of tiles are in `ops/<op>/tuning.py`.

Tables are fixed and measured once, so that a user's first call needs no autotuning.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.kernels.launch import fit
from tokenmix_core.kernels.launch.cache.replay import invalidate


@contextmanager
def override(
    table: ModuleType | MutableMapping[Any, Any], entries: Mapping[Any, Any] | None = None, **named: Any
) -> Iterator[None]:
    """Replace entries of a tuning table, or names of a module of such tables, inside the block.

    Cached launches depend on these values, so the launch cache is invalidated on entry and on exit.

    Args:
        table: a dict such as `STATE_STEPS` of an operation, or a module.
        entries: maps keys of the dict, or names of the module, to new values.
        named: further new values, passed by keyword.

    Raises:
        ValueError: the table or module has no such entry.
    """
    values = vars(table) if isinstance(table, ModuleType) else table
    entries = dict(entries or {}, **named)
    if unknown := [key for key in entries if key not in values]:
        raise ValueError(f"override: {unknown[0]!r} is not an entry of {getattr(table, '__name__', 'the table')}")
    before = {key: values[key] for key in entries}
    try:
        values.update(entries)
        invalidate()
        yield
    finally:
        values.update(before)
        invalidate()


# number of SMs of an H100 or H200, and bytes of shared memory of a block; tiles were measured on these GPUs
_HOPPER_SMS = 132
_HOPPER_BLOCK = 232_448
# precision of float32 MMAs: three tf32 MMAs are nearly as precise as float32. AMD's compiler has no such mode, but
# AMD's MMAs multiply float32 without rounding
FLOAT32_DOT = "ieee" if torch.version.hip else "tf32x3"
# registers per thread, passed to ptxas for wide float32 tiles: ptxas 12.8 and 12.9 would use 32 and spill up to 16 KB
ALL_REGISTERS = 255


def splits(programs: int, tiles: int, device: torch.device) -> int:
    """Return into how many programs to split each of `programs` loops over `tiles` tiles, so that each SM gets two.

    The result is at most 64, and leaves each program at least two tiles if the loop has two.
    """
    return max(1, min(2 * sm_count(device) // programs, tiles // 2, 64))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for a CPU, where kernels are interpreted; an H100's for meta tensors."""
    if device.type == "meta":
        return _HOPPER_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def one_wave() -> int:
    """Return the number of SMs of the current GPU; before CUDA is initialised 132, the number of an H100 or H200."""
    if not torch.cuda.is_initialized():
        return _HOPPER_SMS
    return sm_count(torch.device("cuda", torch.cuda.current_device()))


def block_memory() -> int:
    """Return the bytes of shared memory that a block of the current GPU may have; without CUDA, those on Hopper."""
    return fit.shared_memory() or _HOPPER_BLOCK


class RowTile(NamedTuple):
    """Tile of one iteration (BM rows by BD elements of each row), and warps per program."""

    BM: int
    BD: int
    num_warps: int


def many_waves(programs: int) -> bool:
    """Tell whether there are at least eight programs per SM."""
    return programs >= 8 * one_wave()


def register_limit(programs: int, registers: int) -> int | None:
    """Return `registers`, a limit per thread, if `many_waves(programs)`; else None: the compiler chooses.

    Fewer registers increase occupancy but slow down each program: this pays only with many programs.
    """
    return registers if many_waves(programs) else None


def row_tile(size: int) -> RowTile:
    """Return the tile of operations on whole rows of `size` elements, such as norms.

    It has about 4,096 elements, 16 per thread; a longer row is a tile of its own.
    """
    BD = next_power_of_2(size)
    BM = max(1, 4096 // BD)
    return RowTile(BM, BD, min(max(BM * BD // 512, 4), 16))


def row_programs(blocks: int) -> int:
    """Return how many programs loop over `blocks` blocks of rows; each stores a partial sum. At most two run per SM."""
    return min(blocks, 2 * one_wave())
