"""Tiles of the kernels over retained keys, chosen by the compiled kernels' registers and shared memory on sm_90."""

from __future__ import annotations

import torch

from tokenmix_core.kernels.tuning import ALL_REGISTERS
from tokenmix_core.ops.softmax_attention import tuning
from tokenmix_core.ops.softmax_attention.tuning import AttentionTile

# maps K and V to the tile of the Hopper forward: the one with the most CTAs per SM (two to four) whose loop does not
# spill. BN divides 64, so that a tile of keys lies in one unit; BM is BN if K and V differ
HOPPER_FORWARD: dict[tuple[int, int], AttentionTile] = {
    (64, 64): AttentionTile(64, 64, 4, 1, 128),
    (64, 128): AttentionTile(64, 64, 4, 1, 168),
    (128, 64): AttentionTile(64, 64, 4, 1, 168),
    (128, 128): AttentionTile(64, 64, 4, 1, 255),
}


def kept_attention(kernel: str, head_size: int, dtype: torch.dtype, unit: int) -> AttentionTile:
    """Return the tile of a portable kernel, "forward" or "backward_queries"; BN divides 64."""
    tile = tuning.attention(kernel, head_size, dtype)
    if dtype == torch.float32:
        return tile._replace(maxnreg=ALL_REGISTERS) if head_size > 128 else tile
    if head_size <= 64:
        # with this register limit three CTAs share an SM
        tile = tile._replace(maxnreg=168)
    if unit == 1 and head_size <= 128:
        # deeper pipeline: two of the stages hold positions of keys that are gathered later
        tile = tile._replace(num_stages=5 if head_size <= 64 else 3)
    return tile
