"""Per-head weights of a term of the loss, and the statistics by which training adapts these weights."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.kernels.launch import compat
from tokenmix_core.nn.dtypes import KeepsFloat32
from tokenmix_core.nn.init import is_loaded


class HeadWeights(KeepsFloat32):
    """One weight per head in buffers, which are saved with the model, equal on all processes and not optimised.

    The module that owns this one reads `weight` in its forward pass and, in training, passes its observations to
    `observe`. A training callback updates the weights from the observations between optimizer steps.

    Args:
        num_heads: H.
        initial: initial value of the weights.

    Attributes:
        weight: the weights, float32, `[H]`.
        average: moving average of the mean of each optimizer step's observations, `[H]`.
        total, count: sum and count of the observations since the last optimizer step, `[H]` and `[]`.
    """

    # these buffers stay float32 in a bfloat16 model, which would round averages and sums, and a `count` above 256
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
        """Add N observed values of each head to `total`, and N to `count`.

        Under `torch.func` transforms, whose functions cannot change a buffer, nothing is added.
        """
        if compat.in_transform():
            return
        self.total += values.float().sum(0)
        self.count += values.shape[0]
