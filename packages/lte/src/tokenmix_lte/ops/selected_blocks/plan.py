"""How calls are cut up: which queries are taken at once, how many pairs a program takes, and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv, next_power_of_2

# rows, a query and a head, of one program: enough to be worth a block of keys and what is known of it
_ROWS = 4096
# bytes of partial outputs, of partial gradients of queries, or of blocks' probabilities, that lie in memory at one time
_ROOM = 1 << 31
MAX_HEAD_SIZE = 128


class Tile(NamedTuple):
    """Rows that meet a block of keys at one time, and how kernels are compiled."""

    BM: int
    num_warps: int
    num_stages: int


# by step, and by bytes of an element and head size
_TILES: dict[str, dict[tuple[int, int], Tile]] = {
    "forward": {(2, 64): Tile(64, 4, 3), (2, 128): Tile(64, 4, 2), (4, 64): Tile(32, 8, 1), (4, 128): Tile(32, 8, 1)},
    "backward": {(2, 64): Tile(64, 4, 2), (2, 128): Tile(64, 8, 2), (4, 64): Tile(16, 8, 1), (4, 128): Tile(16, 8, 1)},
}


def tile(step: str, size: int, dtype: torch.dtype) -> Tile:
    """The tile of a step for heads of `size` channels at the most."""
    return _TILES[step][dtype.itemsize, 64 if size <= 64 else 128]


def limit(K: int, V: int, block_size: int | None, q: Tensor) -> str | None:
    """Say which part of a call the kernels cannot do, to follow the implementation's name; None if they can do it."""
    if q.dtype == torch.float64:
        return "has no float64; pass impl='reference'"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "takes float16 and float32 in Triton's interpreter, got bfloat16; pass impl='reference'"
    if max(K, V) > MAX_HEAD_SIZE:
        return f"takes head sizes up to {MAX_HEAD_SIZE}, got K={K} and V={V}; pass impl='reference'"
    if block_size not in (None, 16, 32, 64, 128):
        return f"takes blocks of 16, 32, 64 or 128 keys, got {block_size}; pass impl='reference'"
    return None


def ranked(U: int) -> int:
    """Pairs, one after the other in `blocks`, that one program ranks, where rows have U blocks.

    Twice as many are twice the comparisons for a pair, and half of its U / RANKED counts: of these there are at most 8
    up to 4,096 blocks.
    """
    return min(512, max(128, next_power_of_2(U) // 8))


def piece(group: int) -> int:
    """Pairs of one program for `group` query heads a key head."""
    return max(1, _ROWS // group)


def slices(q: Tensor, V: int, listed: int) -> Iterator[slice]:
    """Runs of queries whose partial results have room, each with `listed` blocks: one run for most calls."""
    B, T, HQ, K = q.shape
    return runs(T, B * HQ * listed * max(K, V) * q.element_size())


def runs(T: int, size: int) -> Iterator[slice]:
    """Runs of T queries, of equal length, for which there is room where each takes `size` bytes."""
    longest = max(1, _ROOM // size)
    step = cdiv(T, cdiv(T, longest))
    for first in range(0, T, step):
        yield slice(first, min(T, first + step))
