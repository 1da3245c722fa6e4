"""The gated sum in eager PyTorch, for any device and dtype."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def gated_sum_reference(
    compressed: Float[Tensor, "B T HQ V"],
    selected: Float[Tensor, "B T HQ V"],
    window: Float[Tensor, "B T HQ V"],
    gates: Float[Tensor, "B T HQ 3"],
) -> Float[Tensor, "B T HQ V"]:
    """Compute `gated_sum` with torch operations, differentiable by autograd."""
    a, b, c = gates.unsqueeze(-1).unbind(-2)
    return torch.addcmul(torch.addcmul(a * compressed, b, selected), c, window)
