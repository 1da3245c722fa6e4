"""Tile sizes of the convolution's kernels."""

from __future__ import annotations

from typing import NamedTuple

from tokenmix_core.chunking import cdiv, next_power_of_2


class Conv1dTile(NamedTuple):
    """Tile of a one-warp program: BT tokens and BD channels, with BU tokens per iteration of its loop."""

    BT: int
    BU: int
    BD: int


def conv1d_forward_tile(tokens: int, channels: int) -> Conv1dTile:
    """Return the tile of the forward pass for this total of tokens and of channels."""
    BT = next_power_of_2(cdiv(tokens * cdiv(channels, 128), 2048))
    BT = min(max(BT, 4), 32)
    return Conv1dTile(BT, min(BT, 8), 128)


def conv1d_backward_tile(tokens: int, channels: int) -> Conv1dTile:
    """Return the tile of the backward pass: a larger BT loads fewer tokens twice, a smaller BT gives more programs."""
    BT = next_power_of_2(cdiv(tokens * cdiv(channels, 128), 4096))
    return Conv1dTile(min(max(BT, 16), 128), 4, 128)
