"""The cache of an Oryx model, which can drop keys and values if all further tokens will be in linear mode."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.modeling import HybridCache, KVState, Span
from tokenmix_core.nn import Bounds


class DroppableKV(KVState):
    """A KV cache of all tokens, which holds nothing after `drop`."""

    dropped = False

    def drop(self) -> None:
        """Free all keys and values, and store none from now on."""
        self.clear()
        self.dropped = True

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        return Bounds(0, 0) if self.dropped else super().bounds(seq_len, batch_size, dtype)

    def write(self, k: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"], span: Span) -> None:
        if not self.dropped:
            super().write(k, v, span)


class OryxCache(HybridCache):
    """The cache of an Oryx model: keys and values, linear state and the convolutions' last inputs of each layer.

    After `promise_linear` only the parts of constant size of Oryx layers remain; other mixers are not affected.
    """

    # whether the model must refuse attention
    linear_only = False
    # within the model's `decoding`: the mode of calls that give no mode; None for the model's default
    decoding_mode: Any = None

    def promise_linear(self) -> None:
        """Free keys and values of Oryx layers for good, as all further tokens will be in linear mode.

        The model raises a ValueError if attention is requested later.
        """
        self.linear_only = True
        for part in self._parts():
            if isinstance(part, DroppableKV):
                part.drop()
