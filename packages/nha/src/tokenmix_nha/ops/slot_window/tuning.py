"""Kernel configurations by shape: a small fixed table, measured once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmix_core.changes import watch
from tokenmix_core.tuning import one_round


class Tile(NamedTuple):
    """BT tokens of a chunk; BM slots that the backward takes at a time; BN keys or queries of the window beyond it."""

    BT: int
    BM: int
    BN: int
    num_warps: int
    num_stages: int


class Walk(NamedTuple):
    """The head sizes in ND parts, a program each, and at most so many segments of a sequence."""

    ND: int
    segments: int
    num_warps: int
    num_stages: int


# the fewest slots of a tile in memory of 16-bit kernels, for slots with the window's keys and one query head each
_NARROWEST = 32
_NARROWEST_ELSE = 64
# the slots of a tile in registers of 16-bit kernels in Triton
_SLOT_TILE = 64
_MAX_SEGMENTS = 32
# the widest window for which the forward kernel on Hopper, which takes 32 keys of it at a time, is the faster one
HOPPER_WINDOW = 256
# the widest window for which δ is summed up from probabilities and not from o, whose rounding would not cancel
SHORT_WINDOW = 64


def slot_tile(slots: int, dtype: torch.dtype, own_keys: bool, group: int) -> int:
    """Slots of a tile in memory, of which the surplus stays masked: see README.md, "Tiles of 16 and 32 slots"."""
    return slots if dtype == torch.float32 else max(slots, _NARROWEST_ELSE if own_keys or group > 1 else _NARROWEST)


def whole_tile(slots: int, dtype: torch.dtype) -> int:
    """Slots of a tile of Triton's kernels that take all slots at once."""
    return slots if dtype == torch.float32 else max(slots, _SLOT_TILE)


def chunk_size(dtype: torch.dtype) -> int:
    """Tokens of a chunk, the same in all kernels of a call, since they share the states at its borders."""
    return 16 if dtype == torch.float32 else 64


def tile(slots: int, window: int, dtype: torch.dtype) -> Tile:
    """The tile of the kernels whose programs take a chunk each."""
    # one stage: a second buffer for the window's tiles costs the second program of a multiprocessor
    BT = chunk_size(dtype)
    BM = min(slots, _SLOT_TILE) if dtype == torch.float32 else _SLOT_TILE
    return Tile(BT, BM, min(BT, 32 if window <= 32 else 64), 4, 1)


def walk(heads: int, chunks: int, slots: int, dtype: torch.dtype) -> Walk:
    """How the kernels that carry slots along time divide `heads` heads of all sequences, of at most `chunks` chunks."""
    parts = 4 if dtype == torch.float32 or slots > 64 else 2
    return Walk(parts, _segments(heads * parts, chunks), 4, 1 if dtype == torch.float32 else 3)


def hopper_walk(heads: int, chunks: int) -> Walk:
    """As `walk`, for the kernel on Hopper, whose programs take all of a head."""
    # one program fills a multiprocessor
    return Walk(1, _segments(2 * heads, chunks), 8, 3)


def strong_heads(chunks: int, heads: int) -> int:
    """Query heads of a program that looks for strong chunks: several where there are programs enough."""
    return 8 if chunks * heads >= 32 * one_round() else 1


def _segments(programs: int, chunks: int) -> int:
    return max(1, min(_MAX_SEGMENTS, 2 * one_round() // programs, chunks // 8))


# recorded calls are forgotten with every change of these
watch(__name__)
