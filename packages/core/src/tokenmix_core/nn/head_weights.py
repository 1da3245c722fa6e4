"""Per-head weights of a loss term, and the statistics that adapt them during training."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.nn.dtypes import KeepsFloat32
from tokenmix_core.nn.init import is_loaded


class HeadWeights(KeepsFloat32):
    """One weight per head, stored in buffers: saved with the model, equal on all processes, invisible to the optimizer.

    The owner's forward pass reads `weight` and, in training, passes its observations to `observe`. A callback updates
    the weights from them between optimizer steps.

    Args:
        num_heads: H.
        initial: initial value of the weights.

    Attributes:
        weight: the weights, float32, `[H]`.
        average: the moving average of the observed mean, `[H]`.
        total, count: sum and count of the observations since the last optimizer step, `[H]` and `[]`.
    """

    # bfloat16 represents integers exactly only up to 256
    float32 = ("weight", "average", "total", "count")
    weight: Tensor
    average: Tensor
    total: Tensor
    count: Tensor

    def __init__(self, num_heads: int, initial: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.initial = num_heads, initial
        for name in ("weight", "average", "total"):
            self.register_buffer(name, torch.empty(num_heads, dtype=torch.float32))
        self.register_buffer("count", torch.empty((), dtype=torch.float32))
        self.init_weights_()

    @torch.no_grad()
    def init_weights_(self) -> None:
        """Reset every buffer that was not loaded from a checkpoint."""
        for name, buffer in self.named_buffers():
            if not is_loaded(buffer):
                buffer.fill_(self.initial if name == "weight" else 0.0)

    @torch.no_grad()
    def observe(self, values: Float[Tensor, "N H"]) -> None:
        """Add N observations of each head."""
        self.total += values.float().sum(0)
        self.count += values.shape[0]
