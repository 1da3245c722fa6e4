"""Inputs of the scorer's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import aligned
from tokenmix_lte.ops.scorer.plan import takes_gluon
from tokenmix_lte.ops.scorer.sizes import Sizes, sizes


class Inputs(NamedTuple):
    """The inputs of the forward pass.

    Attributes:
        k, v: `[B, T, H, K]`.
        w1, bias1, w2, bias2, w3, bias3: weights `[H, out, in, taps]` and biases `[H, out]` of the convolutions.
        weight, bias: the linear map after the convolutions, `[H, C3]` and `[H]`.
        begin, cu_seqlens: first existing token of each row, or boundaries of packed sequences.
        seed, threshold: seed and threshold of dropout; see `reference.dropout_mask`.
        first, middle, last: offsets of the three taps.
        impl: the same as for `retention_logits`, but never "reference".
    """

    k: Tensor
    v: Tensor
    w1: Tensor
    bias1: Tensor
    w2: Tensor
    bias2: Tensor
    w3: Tensor
    bias3: Tensor
    weight: Tensor
    bias: Tensor
    begin: Tensor | None
    cu_seqlens: Tensor | None
    seed: Tensor | None
    threshold: int
    first: int
    middle: int
    last: int
    impl: str | None

    def sizes(self) -> Sizes:
        """Return the call's sizes."""
        return sizes(self.k, self.outs(), (self.first, self.middle, self.last))

    def outs(self) -> list[int]:
        """Return the number of output channels of each layer."""
        return [w.shape[1] for w in (self.w1, self.w2, self.w3)]

    def takes_gluon(self) -> bool:
        """Return True if the Gluon kernels compute the call; raises the errors of `plan.takes_gluon`."""
        return takes_gluon(self.impl, self.k.device, self.k.dtype, self.k.shape[-1], self.outs())

    def readable(self) -> Inputs:
        """Return the inputs aligned as kernels read them; convolutions are `[taps, H, in, out]` in the keys' dtype."""

        def taps_first(w: Tensor) -> Tensor:
            return w.permute(3, 0, 2, 1).to(self.k.dtype, memory_format=torch.contiguous_format)

        begin = None if self.begin is None else self.begin.contiguous()
        x = self._replace(w1=taps_first(self.w1), w2=taps_first(self.w2), w3=taps_first(self.w3), begin=begin)
        return Inputs(*map(aligned, x[:10]), *x[10:])


class BackwardInputs(NamedTuple):
    """The inputs of the backward pass: those of the forward pass, and the gradient of the logits."""

    inputs: Inputs
    dlogits: Tensor
