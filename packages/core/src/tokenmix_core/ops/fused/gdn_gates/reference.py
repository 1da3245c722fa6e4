"""The gates in eager PyTorch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_gates_reference(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, max_beta: float
) -> tuple[Tensor, Tensor]:
    """g and β, in float32 at least."""
    a, b = (x if x.dtype == torch.float64 else x.float() for x in (a, b))
    return -A_log.exp() * F.softplus(a + dt_bias), max_beta * b.sigmoid()
