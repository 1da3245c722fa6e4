"""The products in eager PyTorch, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def fused_linears_reference(x: Float[Tensor, "B D"], weights: Sequence[Float[Tensor, "_N D"]]) -> tuple[Tensor, ...]:
    """`[B, N]` of each weight."""
    return tuple(F.linear(x, weight) for weight in weights)
