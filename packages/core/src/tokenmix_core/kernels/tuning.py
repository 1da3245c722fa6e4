"""Kernel configurations by shape: small fixed tables, measured once, in place of autotuning at a user's first call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.kernels.launch.cache.replay import invalidate


@contextmanager
def override(
    table: ModuleType | MutableMapping[Any, Any], entries: Mapping[Any, Any] | None = None, **named: Any
) -> Iterator[None]:
    """Replace entries of a tuning table, or names of a module of such tables, inside the block.

    Cached launches follow from these values, so the launch cache is invalidated on entry and on exit.

    Args:
        table: a dict such as `STATE_STEPS` of an operation, or a module.
        entries: the new values by key, or by name in the module.
        named: more of them, by name.

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


# of a thread, which ptxas is told of for wide tiles of float32: by itself, as 12.8 and 12.9, it falls back to 32 there,
# and spills up to 16 KB
ALL_REGISTERS = 255


def splits(programs: int, tiles: int, device: torch.device) -> int:
    """Into how many parts each of `programs` loops over `tiles` tiles is split, to give every SM two."""
    return max(1, min(2 * sm_count(device) // programs, tiles // 2, 64))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where kernels are only interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def one_round() -> int:
    """As many programs as the current GPU has SMs; 132, as of an H100 or H200, before there is a GPU."""
    if not torch.cuda.is_initialized():
        return 132
    return sm_count(torch.device("cuda", torch.cuda.current_device()))


class RowTile(NamedTuple):
    """BM rows of at most BD elements a step."""

    BM: int
    BD: int
    num_warps: int


def crowded(programs: int) -> bool:
    """Tell whether eight programs a SM wait, or more."""
    return programs >= 8 * one_round()


def registers_of_many(programs: int, registers: int) -> int | None:
    """So many registers a thread where programs crowd; None leaves it to the compiler.

    With fewer registers more programs run side by side, each more slowly, which few programs have nothing of.
    """
    return registers if crowded(programs) else None


def row_tile(size: int) -> RowTile:
    """The tile of what works on whole rows of `size` elements, such as a norm: 4,096 elements, 16 a thread."""
    BD = next_power_of_2(size)
    BM = max(1, 4096 // BD)
    return RowTile(BM, BD, min(max(BM * BD // 512, 4), 16))


def row_programs(blocks: int) -> int:
    """Programs that walk so many blocks of rows, each with a sum of its own: two a SM."""
    return min(blocks, 2 * one_round())
