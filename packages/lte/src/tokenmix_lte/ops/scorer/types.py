"""Inputs of the scorer's kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import aligned
from tokenmix_lte.ops.scorer.plan import takes_gluon
from tokenmix_lte.ops.scorer.sizes import Sizes, sizes


class Inputs(NamedTuple):
    """Inputs of the forward pass.

    Attributes:
        k, v: `[B, T, H, K]`.
        w1, bias1, w2, bias2, w3, bias3: convolutions `[H, out, in, taps]` and `[H, out]`.
        weight, bias: the linear map after the convolutions, `[H, C3]` and `[H]`.
        begin, cu_seqlens: each row's first existing token, or the boundaries of packed sequences.
        seed, threshold: dropout's seed and threshold; see `reference.dropout_mask`.
        first, middle, last: offsets of the taps.
        impl: as for `retention_logits`, but never "reference".
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
        """Return each layer's number of output channels."""
        return [w.shape[1] for w in (self.w1, self.w2, self.w3)]

    def takes_gluon(self) -> bool:
        """Return True if Gluon kernels run the call; raise the errors of `plan.takes_gluon`."""
        return takes_gluon(self.impl, self.k.device, self.k.dtype, self.k.shape[-1], self.outs())

    def readable(self) -> Inputs:
        """Return the inputs as kernels read them: convolutions `[taps, H, in, out]` in the keys' dtype, all aligned."""

        def taps_first(w: Tensor) -> Tensor:
            return w.permute(3, 0, 2, 1).to(self.k.dtype, memory_format=torch.contiguous_format)

        begin = None if self.begin is None else self.begin.contiguous()
        x = self._replace(w1=taps_first(self.w1), w2=taps_first(self.w2), w3=taps_first(self.w3), begin=begin)
        return Inputs(*map(aligned, x[:10]), *x[10:])


class BackwardInputs(NamedTuple):
    """Inputs of the backward pass: the inputs of the forward pass, and the gradient of the logits."""

    inputs: Inputs
    dlogits: Tensor
