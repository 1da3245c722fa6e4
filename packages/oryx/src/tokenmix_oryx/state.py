"""The cache of an Oryx model, which can free keys and values if all later tokens will be in linear mode."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.modeling import HybridCache, KVState, Span
from tokenmix_core.nn import Bounds


class DroppableKV(KVState):
    """A KV cache of all tokens; after `drop` it is empty, and later tokens are not stored."""

    dropped = False

    def drop(self) -> None:
        """Free all keys and values, and store no further ones."""
        self.clear()
        self.dropped = True

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        return Bounds(0, 0) if self.dropped else super().bounds(seq_len, batch_size, dtype)

    def write(self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], span: Span) -> None:
        if not self.dropped:
            super().write(k, v, span)


class OryxCache(HybridCache):
    """The cache of an Oryx model: for each layer keys and values, the linear state, and the convolutions' last inputs.

    After `promise_linear`, Oryx layers have only the parts of constant size; layers with other mixers are not affected.
    """

    # True after `promise_linear`: the model must then refuse attention mode
    linear_only = False
    # the mode of calls without a mode inside the model's `decoding`; None for the model's default mode
    decoding_mode: Any = None

    def promise_linear(self) -> None:
        """Free the keys and values of Oryx layers for good, because all later tokens will be in linear mode.

        The model raises a ValueError if a later call requests attention mode.
        """
        self.linear_only = True
        for part in self._parts():
            if isinstance(part, DroppableKV):
                part.drop()
