"""The norms in eager PyTorch, for any device and dtype."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GatePlace = Literal["before", "after"]


def rms_norm_reference(
    x: Tensor, weight: Tensor, branch: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y and the sum that was normalised."""
    total = x if branch is None else x + branch
    return F.rms_norm(total, weight.shape, weight.to(total.dtype), eps).to(dtype), total


def gated_rms_norm_reference(
    x: Tensor, z: Tensor | None, weight: Tensor, eps: float, gate: GatePlace, size: int, dtype: torch.dtype
) -> Tensor:
    """y, in rows of `size` elements."""
    shape, factor = x.shape, None if z is None else F.silu(z)
    if factor is not None and gate == "before":
        x = x * factor
    weight, rows = weight.to(x.dtype), x.unflatten(-1, (-1, size))
    if len(weight) == size:
        y = F.rms_norm(rows, weight.shape, weight, eps).view(shape)
    else:
        y = F.rms_norm(rows, (size,), None, eps).view(shape) * weight
    if factor is not None and gate == "after":
        y = y * factor
    return y.to(dtype)
