"""The product in eager PyTorch, for any device and dtype."""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b."""
    return F.silu(a) * b
