"""Keys and values that can be given up: after a promise of linear mode to the end nothing of them is kept."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.modeling import HybridCache, KVState, Span
from tokenmix_core.nn import Bounds


class DroppableKV(KVState):
    """All keys and values, or none from `drop` on."""

    dropped = False

    def drop(self) -> None:
        """Free what is held and keep nothing from now on."""
        self.clear()
        self.dropped = True

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        return Bounds(0, 0) if self.dropped else super().bounds(seq_len, batch_size, dtype)

    def write(self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], span: Span) -> None:
        if not self.dropped:
            super().write(k, v, span)


class OryxCache(HybridCache):
    """The cache of an Oryx model: for each layer keys and values, the linear state and the convolutions' last inputs.

    After `promise_linear` only the constant-size parts remain of Oryx layers and grow no more; other mixers keep what
    they keep.
    """

    # the model refuses attention where no keys are kept
    linear_only = False

    def promise_linear(self) -> None:
        """Take the caller's word that all further tokens are in linear mode: Oryx' keys and values are freed for good.

        It holds as long as the cache exists; asking for attention later is a ValueError of the model.
        """
        self.linear_only = True
        for part in self._parts():
            if isinstance(part, DroppableKV):
                part.drop()
