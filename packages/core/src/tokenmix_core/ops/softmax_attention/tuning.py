"""Tiles of the attention kernels by head size and dtype, measured once on an H200 (docs/log/attention.md)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmix_core.kernels.tuning import ALL_REGISTERS, block_memory, many_waves, sm_count


class AttentionTile(NamedTuple):
    """A tile of BM queries by BN keys; `maxnreg` limits the registers per thread unless it is None."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# for each portable kernel of 16-bit inputs: maps the largest head size of a range to a tile
ATTENTION: dict[str, dict[int, AttentionTile]] = {
    "forward": {64: AttentionTile(64, 64, 4, 3), 128: AttentionTile(64, 64, 4, 3), 256: AttentionTile(128, 64, 8, 2)},
    "backward_queries": {
        64: AttentionTile(64, 64, 4, 3),
        128: AttentionTile(64, 64, 4, 2),
        256: AttentionTile(64, 32, 4, 2),
    },
    "backward_keys": {
        64: AttentionTile(64, 64, 4, 2),
        128: AttentionTile(32, 64, 4, 3),
        256: AttentionTile(32, 64, 8, 2),
    },
}
# float32 tiles are smaller: MMAs run without Tensor Cores, and elements take twice the shared memory
_FLOAT32: dict[int, AttentionTile] = {
    64: AttentionTile(32, 32, 4, 2),
    128: AttentionTile(32, 32, 8, 1),
    256: AttentionTile(16, 16, 4, 1),
}


def attention(kernel: str, head_size: int, dtype: torch.dtype) -> AttentionTile:
    """Return the tile of a portable kernel: "forward", "backward_keys" or "backward_queries".

    Lists of query tiles depend on BM of the dK/dV kernel, so BM is halved here until the tile fits the device's shared
    memory; all other loop tiles are reduced when a kernel is compiled (`kernels.launch.fit`).
    """
    table = _FLOAT32 if dtype == torch.float32 else ATTENTION[kernel]
    bound, tile = next((bound, tile) for bound, tile in table.items() if head_size <= bound)
    while kernel == "backward_keys" and tile.BM > 16 and _keys_bytes(tile, bound, dtype) > block_memory():
        tile = tile._replace(BM=tile.BM // 2)
    return tile


def _keys_bytes(tile: AttentionTile, head_size: int, dtype: torch.dtype) -> int:
    """Return a dK/dV program's bytes of shared memory: K, V, the stages of Q and dO, probabilities, lse and delta."""
    elements = 2 * head_size * (tile.BN + max(1, tile.num_stages - 1) * tile.BM) + tile.BM * tile.BN
    return dtype.itemsize * elements + 8 * tile.BM


def listed_keys(head_size: int, dtype: torch.dtype) -> AttentionTile:
    """Return the tile of the portable dK/dV kernel for keys given in lists (`listed_keys/`); BN divides 64."""
    tile = attention("backward_keys", head_size, dtype)
    return tile._replace(maxnreg=ALL_REGISTERS) if dtype == torch.float32 and head_size > 128 else tile


def work_tiles(tiles: int, device: torch.device) -> int:
    """Return how many work tiles to add to the `tiles` key tiles of the dK/dV kernel for listed keys (`listed_keys/`).

    Key tiles with many queries are split into several work tiles. Eight additional work tiles per SM balance the load;
    with few key tiles fewer are added, since a split key tile's partial sums take memory.
    """
    return min(8 * sm_count(device), max(2 * sm_count(device), tiles // 4))


def hopper_forward(head_size: int, programs: int) -> tuple[int, int]:
    """Return the number of pipeline stages of K and V, and the registers per thread, of the Hopper forward kernel.

    With two stages an SM holds four CTAs with heads of 64, and two with heads of 128. With many waves, heads of 128 get
    one stage: an SM then holds three CTAs, which is faster.
    """
    if head_size == 64:
        return 2, 128
    return (1, 168) if many_waves(programs) else (2, ALL_REGISTERS)


def attention_decode(head_size: int, dtype: torch.dtype) -> tuple[int, int, int, int | None]:
    """Return BN, num_warps, num_stages and maxnreg of the decoding kernel, which is bound by reading the cache."""
    if dtype == torch.float32 or head_size > 128:
        return 32, 4, 2, ALL_REGISTERS if dtype == torch.float32 and head_size > 128 else None
    return 64, 4, 3, None
