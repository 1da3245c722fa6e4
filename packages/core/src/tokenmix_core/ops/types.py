"""Types that all operations share."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Impl = Literal["gluon", "triton", "reference"]

# a tensor's shape and dtype
Layout = tuple[tuple[int, ...], torch.dtype]


class ScanOutput(NamedTuple):
    """The result of a recurrence.

    Attributes:
        o: outputs, `[B, T, HV, V]`.
        final_state: the state after the last token of each sequence, float32, `[N, HV, K, V]`.
    """

    o: Tensor
    final_state: Tensor


class AttentionOutput(NamedTuple):
    """The result of attention.

    Attributes:
        o: outputs, `[B, T, HQ, V]`.
        lse: natural log of the sum of exponentials of the scores, `[B, T, HQ]`, float32; −∞ if the query sees no key.
    """

    o: Tensor
    lse: Tensor
