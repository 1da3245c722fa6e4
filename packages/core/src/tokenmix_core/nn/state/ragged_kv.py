"""Keys and values of tokens that each head selects for itself, in a fixed number of entries (slots) per head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn.state.parts import Bounds, StatePart
from tokenmix_core.ops import attention_decode
from tokenmix_core.ops.types import AttentionOutput, Impl


def first_taken(take: Bool[Tensor, "N H C"], most: int) -> tuple[Int[Tensor, "N H most"], Int[Tensor, "N H"]]:
    """For each head, return the indices of the first `most` tokens that it takes, and the number of all that it takes.

    C must be at least 1. The index of a head's last token is repeated to fill `most` entries; 0 if it takes none.
    """
    counts = take.contiguous().cumsum(-1)
    lengths = counts[..., -1]
    ranks = torch.arange(1, most + 1, device=take.device).minimum(lengths.unsqueeze(-1))
    return torch.searchsorted(counts, ranks), lengths


class RaggedKVState(StatePart):
    """Keys `[N, H, slots, K]` and values `[N, H, slots, V]`; head h of row n fills the first `lengths[n, h]` slots.

    Args:
        heads: H.
        key_size: K.
        value_size: V.
        slots: maximum number of tokens that a head holds.
    """

    keeps_tokens = True

    def __init__(self, heads: int, key_size: int, value_size: int, slots: int):
        self.heads, self.key_size, self.value_size, self.num_slots = heads, key_size, value_size, slots
        self._stored: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def keys(self) -> Float[Tensor, "N H slots K"]:
        """The keys; raises a ValueError before the first write."""
        return self._held()[0]

    @property
    def values(self) -> Float[Tensor, "N H slots V"]:
        """The values; raises a ValueError before the first write."""
        return self._held()[1]

    @property
    def lengths(self) -> Int[Tensor, "N H"]:
        """Number of tokens held by each head, int32."""
        return self._held()[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and lengths; empty before the first write."""
        return self._stored or ()

    def allocate(self, batch: int, like: Tensor) -> None:
        """Allocate empty lists for `batch` rows, with the dtype and device of `like`."""
        keys, values = (
            like.new_zeros(batch, self.heads, self.num_slots, size) for size in (self.key_size, self.value_size)
        )
        self._stored = keys, values, like.new_zeros(batch, self.heads, dtype=torch.int32)

    def hold(self, keys: Tensor, values: Tensor, lengths: Int[Tensor, "N H"]) -> None:
        """Replace the contents, without a copy, by `[N, H, slots, K]`, `[N, H, slots, V]` and int32 lengths."""
        self._stored = keys, values, lengths

    def attend(
        self, q: Float[Tensor, "N HQ K"], *, scale: float | None = None, impl: Impl | None = None
    ) -> AttentionOutput:
        """Attend with one query token per row: each query head to the tokens that its key head holds.

        Returns:
            o `[N, 1, HQ, V]` and the log-sum-exp `[N, 1, HQ]`, −∞ for a head without keys.
        """
        N, HQ, K = q.shape
        keys, values, lengths = self._held()
        folded = q.view(N * self.heads, 1, HQ // self.heads, K)
        keys, values = (x.flatten(0, 1).unsqueeze(2) for x in (keys, values))
        o, lse = attention_decode(folded, keys, values, lengths.flatten(), scale=scale, impl=impl)
        return AttentionOutput(o.view(N, 1, HQ, -1), lse.view(N, 1, HQ))

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor `x` by `fn(x)`."""
        if self._stored is not None:
            keys, values, lengths = map(fn, self._stored)
            self._stored = keys, values, lengths

    def clear(self) -> None:
        """Drop all tokens."""
        self._stored = None

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes of all entries, filled or not."""
        token = (self.key_size + self.value_size) * dtype.itemsize
        size = batch_size * self.heads * (self.num_slots * token + torch.int32.itemsize)
        return Bounds(size, size)

    def held(self, seq_len: int) -> int:
        """Return the bytes of all entries, filled or not; 0 before the first write."""
        return self.allocated

    @property
    def allocated(self) -> int:
        """Bytes of allocated memory."""
        return sum(x.nbytes for x in self.tensors)

    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._stored is None:
            raise ValueError("RaggedKVState: nothing has been written yet")
        return self._stored
