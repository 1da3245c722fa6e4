"""Division of the kernels' work: slices of queries that fit in the workspace, pairs per program, and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2

# rows (one query and head each) in a split: a number so large that loading a block of keys costs little in comparison
_SPLIT_ROWS = 4096
# maximum bytes of workspace for partial outputs, partial gradients of queries, or probabilities of blocks
_MAX_WORKSPACE = 1 << 31
MAX_HEAD_SIZE = 128


class Tile(NamedTuple):
    """The number BM of query rows that one MMA multiplies by a block of keys, and compile options."""

    BM: int
    num_warps: int
    num_stages: int


# tiles by step of the operation, then by (bytes per element, head size)
_TILES: dict[str, dict[tuple[int, int], Tile]] = {
    "forward": {(2, 64): Tile(64, 4, 3), (2, 128): Tile(64, 4, 2), (4, 64): Tile(32, 8, 1), (4, 128): Tile(32, 8, 1)},
    "backward": {(2, 64): Tile(64, 4, 2), (2, 128): Tile(64, 8, 2), (4, 64): Tile(16, 8, 1), (4, 128): Tile(16, 8, 1)},
}


def tile(step: str, size: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a step of the operation for heads of up to `size` channels."""
    return _TILES[step][dtype.itemsize, 64 if size <= 64 else 128]


def limit(K: int, V: int, block_size: int | None, q: Tensor) -> str | None:
    """Return why the kernels do not support a call, as a clause after the implementation's name; None if they do."""
    if q.dtype == torch.float64:
        return "has no float64; pass impl='reference'"
    if max(K, V) > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got K={K} and V={V}; pass impl='reference'"
    if block_size not in (None, 16, 32, 64, 128):
        return f"takes blocks of 16, 32, 64 or 128 keys, got {block_size}; pass impl='reference'"
    return None


def pairs_per_run(U: int) -> int:
    """Return the number of consecutive (query, block) pairs in a run, which one program ranks; a row has U blocks.

    A program compares each pair with all pairs of its run, which favours short runs. Each run stores U counts, which
    favours long ones: these are U / `pairs_per_run` counts per pair, at most 8 for U ≤ 4,096.
    """
    return min(512, max(128, next_power_of_2(U) // 8))


def pairs_per_split(group: int) -> int:
    """Return the number of pairs in a split, the part of a list for one program; a key head has `group` query heads."""
    return max(1, _SPLIT_ROWS // group)


def query_runs(q: Tensor, V: int, listed: int) -> Iterator[slice]:
    """Yield slices of queries whose partial results fit in the workspace; most calls need a single slice.

    `listed` is the number of blocks that each query lists.
    """
    B, T, HQ, K = q.shape
    return runs(T, B * HQ * listed * max(K, V) * q.element_size())


def runs(T: int, size: int) -> Iterator[slice]:
    """Yield slices that divide T queries evenly, such that `size` bytes per query of a slice fit in the workspace."""
    longest = max(1, _MAX_WORKSPACE // size)
    step = cdiv(T, cdiv(T, longest))
    for first in range(0, T, step):
        yield slice(first, min(T, first + step))
