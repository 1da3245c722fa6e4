"""Kernel configurations by shape: rules with constants that were chosen by measurement."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmix_core.kernels import one_wave


class Tile(NamedTuple):
    """Tile sizes: BT tokens per chunk, BM slots per backward iteration (per program in the kernel of the gates), BN
    window keys or queries per iteration."""

    BT: int
    BM: int
    BN: int
    num_warps: int
    num_stages: int


class ScanConfig(NamedTuple):
    """Parallelism of a scan: a head's channels split over ND programs, a sequence over at most `segments` segments."""

    ND: int
    segments: int
    num_warps: int
    num_stages: int


# minimum number of slots in a memory tile of 16-bit kernels, masked padding included (see `slot_tile`), if slots and
# window use the same keys and GROUP is 1
_MIN_TILE = 32
# minimum number of slots in a memory tile if the slots have keys of their own, or a key head has several query heads
_MIN_TILE_GENERAL = 64
# number of slots in a register tile of 16-bit Triton kernels
_SLOT_TILE = 64
_MAX_SEGMENTS = 32
# maximum window for which the Hopper forward kernel (32 window keys per iteration) is faster than the Triton kernel
HOPPER_WINDOW = 256
# maximum window for which δ is summed from probabilities instead of from the rounded o
SHORT_WINDOW = 64


def slot_tile(slots: int, dtype: torch.dtype, own_keys: bool, group: int) -> int:
    """Return the slots of a tile in memory, masked ones included; see README.md, "Tiles of 16 and 32 slots"."""
    return slots if dtype == torch.float32 else max(slots, _MIN_TILE_GENERAL if own_keys or group > 1 else _MIN_TILE)


def whole_tile(slots: int, dtype: torch.dtype) -> int:
    """Return the number of slots in a register tile of Triton kernels that hold all slots at once."""
    return slots if dtype == torch.float32 else max(slots, _SLOT_TILE)


def chunk_size(dtype: torch.dtype) -> int:
    """Return the number of tokens in a chunk.

    All kernels of a call use chunks of one size, because they share the chunks' states.
    """
    return 16 if dtype == torch.float32 else 64


def tile(slots: int, window: int, dtype: torch.dtype) -> Tile:
    """Return the tile sizes of the kernels that have one program per chunk."""
    # use one pipeline stage: a second stage for the window's tiles would leave one CTA per SM instead of two
    BT = chunk_size(dtype)
    BM = min(slots, _SLOT_TILE) if dtype == torch.float32 else _SLOT_TILE
    return Tile(BT, BM, min(BT, 32 if window <= 32 else 64), 4, 1)


def scan_config(heads: int, chunks: int, slots: int, dtype: torch.dtype) -> ScanConfig:
    """Return the configuration of the Triton scans for `heads` = N · H heads and at most `chunks` chunks a sequence."""
    parts = 4 if dtype == torch.float32 or slots > 64 else 2
    return ScanConfig(parts, _num_segments(heads * parts, chunks), 4, 1 if dtype == torch.float32 else 3)


def hopper_scan_config(heads: int, chunks: int) -> ScanConfig:
    """Return the configuration of the Hopper scan, whose programs hold whole heads."""
    # the occupancy is one CTA per SM
    return ScanConfig(1, _num_segments(2 * heads, chunks), 8, 3)


def strong_heads(chunks: int, heads: int) -> int:
    """Return how many heads a program checks for strong chunks (`ops.slot_window.tile`): 8 if enough programs remain,
    else 1."""
    return 8 if chunks * heads >= 32 * one_wave() else 1


def _num_segments(programs: int, chunks: int) -> int:
    return max(1, min(_MAX_SEGMENTS, 2 * one_wave() // programs, chunks // 8))
