"""The gates in eager PyTorch, on any device and in any dtype."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.nn import at_least_float32


def log_forget_gates_reference(f: Tensor, normalizer: float) -> Tensor:
    """Return log α = log σ(f) / τ, in float32 or a wider dtype."""
    return F.logsigmoid(at_least_float32(f)) / normalizer
