"""Which scorers the kernels take, and the tiles they take them in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import next_power_of_2


class Tile(NamedTuple):
    """BT tokens a program."""

    BT: int
    num_warps: int
    num_stages: int


class Sizes(NamedTuple):
    """How a call is cut up.

    Attributes:
        channels: K, and each layer's outputs.
        blocks: the same as tiles hold them.
        taps: how many, the first one's offset, and from one to the next.
        layers: the tile of all layers, forward.
        layer: that of one layer, in its gradients.
    """

    channels: tuple[int, int, int, int]
    blocks: tuple[int, int, int, int]
    taps: tuple[int, int, int]
    layers: Tile
    layer: Tile

    @property
    def own(self) -> int:
        """Tokens of a tile of all layers that are not there as neighbours of others."""
        taps, _, step = self.taps
        return self.layers.BT - 2 * (taps - 1) * step


# of all layers and of one, by bytes of an element: chosen by registers and shared memory of the machine code for sm_90
_TILES = {2: (Tile(128, 8, 2), Tile(64, 8, 2)), 4: (Tile(32, 8, 2), Tile(16, 8, 1))}
# on Hopper: streams of a program, the rows of one product of four warps, and blocks of keys and values that it holds:
# three are read, one is dropped from, two are on their way
BLOCK_STREAMS, RING = 64, 6
# with more, logits in 16 bits were wrong on an H200 with Triton 3.6.0 and its assembler, in two tiles; right with 3.9.0
MOST_CHANNELS = 64


def channels_of_layers(channels: int, layers: int = 3) -> list[int]:
    """Channels of a model's scorer: of its input, and half as many of each layer as of what it reads."""
    return [channels >> i for i in range(layers + 1)]


def limit(K: int, V: int, outs: Sequence[int], offsets: Sequence[int], dtype: torch.dtype) -> str | None:
    """Why the kernels do not take a scorer, as a clause; None where they do."""
    if dtype == torch.float64:
        return "takes bfloat16, float16 or float32, got float64"
    if K != V:
        return f"takes keys and values of one size, got {K} and {V}"
    if len(outs) != 3:
        return f"takes three convolutions, got {len(outs)}"
    if max(K, *outs) > MOST_CHANNELS:
        return f"takes up to {MOST_CHANNELS} channels of keys and of each layer, got {max(K, *outs)}"
    steps = {b - a for a, b in pairwise(offsets)}
    if len(offsets) != 3 or len(steps) != 1 or not 1 <= min(steps) <= 2 or 0 not in offsets:
        return f"takes three offsets, 1 or 2 apart, with 0 among them, got {list(offsets)}"
    return None


def sizes(k: Tensor, outs: Sequence[int], offsets: Sequence[int]) -> Sizes:
    """How a call is cut up. A token's logit is made alike wherever it lies, so that pieces agree with the whole."""
    channels = k.shape[-1], *outs
    blocks = tuple(max(16, next_power_of_2(C)) for C in channels)
    taps = len(offsets), offsets[0], offsets[1] - offsets[0]
    return Sizes(channels, blocks, taps, *_TILES[k.dtype.itemsize])
