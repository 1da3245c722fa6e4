"""Keys and values that can be given up: after a promise of linear mode to the end nothing of them is kept."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.modeling import HybridCache, KVState, Span


class DroppableKV(KVState):
    """All keys and values, or none from `drop` on."""

    dropped = False

    def drop(self) -> None:
        """Free what is held and keep nothing from now on."""
        self.clear()
        self.dropped = True

    def nbytes(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> int:
        return 0 if self.dropped else super().nbytes(seq_len, batch_size, dtype)

    def write(self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], span: Span) -> None:
        if not self.dropped:
            super().write(k, v, span)


class OryxCache(HybridCache):
    """The cache of an Oryx model: for each layer keys and values, the linear state and the convolutions' last inputs.

    After `promise_linear` only the constant-size parts remain and grow no more.
    """

    linear_only = False

    def begin(self, *args: Any, **kwargs: Any) -> Span:
        span = super().begin(*args, **kwargs)
        # the model refuses attention where no keys are kept
        span.linear_only = self.linear_only  # pyright: ignore[reportAttributeAccessIssue]
        return span

    def promise_linear(self) -> None:
        """Take the caller's word that all further tokens are in linear mode: keys and values are freed and not kept.

        It holds as long as the cache exists; asking for attention later is a ValueError of the model.
        """
        self.linear_only = True
        for layer in self.layers:
            layer.kv.drop()
