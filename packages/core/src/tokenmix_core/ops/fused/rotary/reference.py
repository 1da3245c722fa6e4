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


def rotate_step_reference(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, keys: Tensor, values: Tensor | None, places: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """q rotated; k, rotated, and v are stored at their places."""

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        if cos is not None and sin is not None:
            return rotate_reference(x.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1), weight, eps).squeeze(1)
        return x if weight is None else F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    rows = torch.arange(len(q), device=q.device)
    at = rows, torch.zeros_like(rows) if places is None else places
    keys.index_put_(at, rotated(k, k_weight))
    if v is not None and values is not None:
        values.index_put_(at, v)
    return rotated(q, q_weight)
