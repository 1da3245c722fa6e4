"""The scorers that the kernels support, and the kernels' tile sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import next_power_of_2


class Tile(NamedTuple):
    """A tile of BT tokens per program, and compile options."""

    BT: int
    num_warps: int
    num_stages: int


class Taps(NamedTuple):
    """The taps of the convolutions: their number, the offset of the first, and the distance between two of them."""

    count: int
    first: int
    step: int


class Sizes(NamedTuple):
    """The sizes of a call and its tiles.

    Attributes:
        channels: K, then the number of output channels of each layer.
        blocks: the same, padded to sizes of tiles.
        taps: the convolutions' taps.
        layers: the forward kernel's tile.
        layer: the tile of the kernel of one layer's gradients.
    """

    channels: tuple[int, int, int, int]
    blocks: tuple[int, int, int, int]
    taps: Taps
    layers: Tile
    layer: Tile

    @property
    def own(self) -> int:
        """Number of tokens in a forward tile whose logits the program stores; its other tokens are their neighbours."""
        return self.layers.BT - 2 * (self.taps.count - 1) * self.taps.step


# tiles of the forward and of a layer's backward, by bytes per element; limited by registers and shared memory on sm_90
_TILES = {2: (Tile(128, 8, 2), Tile(64, 8, 2)), 4: (Tile(32, 8, 2), Tile(16, 8, 1))}
# z of a layer's dropped outputs: SiLU of it and the derivative of SiLU are 0, also after rounding to 16 bits
DROPPED = -30000.0
# number of streams (see hopper/streams.py) that a program on Hopper computes: 64, the rows of a warpgroup's WGMMA
BLOCK_STREAMS = 64
# pipeline stages of keys and values on Hopper: WGMMAs read three, dropout is applied to one, async copies fill two
INPUT_STAGES = 6
# maximum number of channels: above it, logits of 16-bit inputs were wrong on an H200 with Triton 3.6.0 and its
# assembler, for two tile sizes; with Triton 3.9.0 they are right
MAX_CHANNELS = 64


def channels_of_layers(channels: int, layers: int = 3) -> list[int]:
    """Return the default scorer's channel counts: of its input, then of each layer, half as many as its input's."""
    return [channels >> i for i in range(layers + 1)]


def limit(K: int, V: int, outs: Sequence[int], offsets: Sequence[int], dtype: torch.dtype) -> str | None:
    """Return why the kernels do not support a scorer, as a clause of an error message; None if they do."""
    if dtype == torch.float64:
        return "takes bfloat16, float16 or float32, got float64"
    if K != V:
        return f"takes keys and values of one size, got {K} and {V}"
    if len(outs) != 3:
        return f"takes three convolutions, got {len(outs)}"
    if max(K, *outs) > MAX_CHANNELS:
        return f"takes up to {MAX_CHANNELS} channels of keys and of each layer, got {max(K, *outs)}"
    steps = {b - a for a, b in pairwise(offsets)}
    if len(offsets) != 3 or len(steps) != 1 or not 1 <= min(steps) <= 2 or 0 not in offsets:
        return f"takes three offsets, 1 or 2 apart, with 0 among them, got {list(offsets)}"
    return None


def sizes(k: Tensor, outs: Sequence[int], offsets: Sequence[int]) -> Sizes:
    """Return the sizes of a call.

    They do not depend on T, so that a token's logit is bit-identical in calls of any length.
    """
    channels = k.shape[-1], *outs
    blocks = tuple(max(16, next_power_of_2(C)) for C in channels)
    taps = Taps(len(offsets), offsets[0], offsets[1] - offsets[0])
    return Sizes(channels, blocks, taps, *_TILES[k.dtype.itemsize])
