"""Types that all operations share."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Impl = Literal["gluon", "triton", "reference"]

# a tensor's shape and dtype
Layout = tuple[tuple[int, ...], torch.dtype]


class ScanOutput(NamedTuple):
    """The result of a recurrence or of a short convolution.

    Attributes:
        o: outputs, `[B, T, HV, V]`; of a convolution `[B, T, D]`.
        final_state: the state after the last token of each sequence, `[N, HV, K, V]`, float32 (float64 for float64
            inputs); of a convolution the last W − 1 inputs of each sequence, in their dtype, `[N, D, W − 1]`. None if
            the call was not asked for it.
    """

    o: Tensor
    final_state: Tensor


class AttentionOutput(NamedTuple):
    """The result of attention.

    Attributes:
        o: outputs, `[B, T, HQ, V]`.
        lse: natural log of the sum of exponentials of the scores, `[B, T, HQ]`, float32 (float64 for float64 inputs);
            −∞ if the query sees no key.
    """

    o: Tensor
    lse: Tensor
