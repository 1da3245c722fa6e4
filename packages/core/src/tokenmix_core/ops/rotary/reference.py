"""The rotation in eager PyTorch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """y, computed in float32 at least."""
    if weight is not None:
        x = F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b = (x if x.dtype == torch.float64 else x.float()).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
