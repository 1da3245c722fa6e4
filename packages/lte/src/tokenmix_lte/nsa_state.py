"""The part of Native Sparse Attention's state for the means of blocks; keys and values are another part."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn import Bounds, KVState


class PooledKVState(KVState):
    """The means of keys and of values in complete blocks, `[N, capacity, H, K]`: block c of a sequence has index c.

    Args:
        heads: H.
        key_size, value_size: K and V.
        block: number of tokens in a block.
    """

    def __init__(self, heads: int, key_size: int, value_size: int, *, block: int):
        super().__init__(heads, key_size, value_size)
        self.block = block

    def reserve(self, max_length: int) -> None:
        """Announce `max_length`: the first write then allocates capacity for the blocks of this number of tokens."""
        super().reserve(cdiv(max_length, self.block))

    def grow(self, like: Float[Tensor, "_ _ H K"], rows: int, blocks: int) -> None:
        """Ensure capacity for `blocks` blocks of each of `rows` sequences, with the dtype and device of `like`."""
        if blocks > self.num_slots or self._stored is None:
            capacity = max(blocks + blocks // 2, self._expected, 1)
            grown = []
            for i, size in enumerate((self.key_size, self.value_size)):
                x = like.new_zeros(rows, capacity, self.heads, size)
                if self._stored is not None:
                    x[:, : self.num_slots] = self._stored[i]
                grown.append(x)
            self._stored = grown[0], grown[1]

    def write_one(self, k: Float[Tensor, "N H K"], v: Float[Tensor, "N H V"], block: Int[Tensor, "N"]) -> None:
        """Write the means of one block of each sequence at the index `block`, without waiting for the device."""
        index = block.view(-1, 1, 1, 1)
        for held, new in ((self.keys, k), (self.values, v)):
            held.scatter_(1, index.expand(-1, 1, *held.shape[2:]), new.unsqueeze(1).to(held.dtype))

    def _resize(self, max_length: int, more: int) -> None:
        super()._resize(cdiv(max_length, self.block), more)

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes of the complete blocks of `batch_size` sequences of `seq_len` tokens."""
        return super().bounds(seq_len // self.block, batch_size, dtype)

    def held(self, seq_len: int) -> int:
        """Return the bytes of the means of complete blocks in the state."""
        return super().held(seq_len // self.block)
