"""Feedback that moves the fraction of softmax chunks to a target, by a threshold on each head's scores."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from tokenmix_core.nn import KeepsFloat32, is_loaded

# weights of the feedback in optimizer step k, with w = 1 / (1 + k / SPAN): a moving average has the weight max(w,
# LEAST_WEIGHT), and the offset the gain max(GAIN w, LEAST_GAIN)
SPAN = 16
LEAST_WEIGHT, LEAST_GAIN, GAIN = 0.1, 0.2, 0.4
# maximum of |z|, the threshold in standard deviations of the scores: a head whose chunks all have one type then has
# both types again within about ten steps
MOST_OFFSET = 4.0


def check_share(share: float | None, budget: float | None, budget_weight: float, types: str) -> None:
    """Check the options that control the fraction of softmax chunks in a layer.

    Raises:
        ValueError: a value out of range; `share` and `budget` together; or one of them although `types` is not
            "learned".
    """
    if share is not None and not (0 < share < 1 and types == "learned"):
        raise ValueError(
            f"NatsL: softmax_share is above 0 and below 1, of learned types, got {share!r} with {types!r} ones; "
            'types="linear" and types="softmax" give 0 and 1'
        )
    if budget is not None and not (0 <= budget <= 1 and types == "learned"):
        raise ValueError(f"NatsL: budget is a share from 0 to 1 of learned types, got {budget!r} with {types!r} ones")
    if share is not None and budget is not None:
        raise ValueError("NatsL: give softmax_share (of chunks) or budget (a mean probability), not both")
    if budget_weight < 0:
        raise ValueError(f"NatsL: budget_weight must be at least 0, got {budget_weight}")


class ShareThreshold(KeepsFloat32):
    """A threshold θ for each head: a chunk is softmax if its softmax score exceeds its linear score by more than θ.

    Scores are computed from a chunk's mean input minus `center`, the moving average of the mean inputs of all chunks.
    Without `center`, one optimizer step could shift all scores of a head by many times their spread, and all chunks
    would change their type at once. θ = z σ, where σ² is a moving average of the variance of the score differences, and
    the offset z rises while more than `target` of the chunks are softmax and falls otherwise. All these values are
    buffers: saved with the model, equal on all processes, and not changed by the optimizer.

    Args:
        hidden_size: D.
        num_heads: H.
        target: fraction of softmax chunks, above 0 and below 1.

    Attributes:
        threshold, variance, offset: θ, σ² and z, float32, `[H]`.
        center: moving average of the chunks' mean inputs, `[D]`.
        steps: number of optimizer steps that were observed.
        inputs: sum of the chunks' mean inputs since the last optimizer step, `[D]`.
        sums: since the last optimizer step, the number of chunks, the number of softmax chunks, and the sums of the
            score differences minus θ and of their squares, `[4, H]`.
    """

    float32 = ("threshold", "variance", "offset", "center", "steps", "inputs", "sums")
    threshold: Tensor
    variance: Tensor
    offset: Tensor
    center: Tensor
    steps: Tensor
    inputs: Tensor
    sums: Tensor

    def __init__(self, hidden_size: int, num_heads: int, target: float) -> None:
        super().__init__()
        self.target = target
        shapes = {"steps": (), "center": (hidden_size,), "inputs": (hidden_size,), "sums": (4, num_heads)}
        for name in self.float32:
            self.register_buffer(name, torch.empty(shapes.get(name, (num_heads,)), dtype=torch.float32))
        self.init_weights_()

    @torch.no_grad()
    def init_weights_(self) -> None:
        """Reset the buffers that no checkpoint has set; the offset z starts at the normal quantile of 1 − target."""
        for name, buffer in self.named_buffers():
            if not is_loaded(buffer):
                buffer.zero_()
                if name == "offset":
                    buffer.add_(1 - self.target).copy_(torch.special.ndtri(buffer))

    @torch.no_grad()
    def observe(
        self, margin: Float[Tensor, "B slots H"], means: Float[Tensor, "B slots D"], real: Bool[Tensor, "B slots"]
    ) -> None:
        """Update `sums` and `inputs` by the chunks that `real` selects: score differences minus θ, and mean inputs."""
        each = torch.stack((torch.ones_like(margin), (margin > 0).to(margin.dtype), margin, margin.square()))
        self.sums += (each * real.unsqueeze(-1)).sum((1, 2))
        self.inputs += (means * real.unsqueeze(-1)).sum((0, 1))

    @torch.no_grad()
    def update(self, sums: Float[Tensor, "4 H"], inputs: Float[Tensor, "D"]) -> None:
        """Adapt θ by the sums over all processes, without waiting for the device; without chunks, nothing changes."""
        seen, count = sums[0, 0] > 0, sums[0, 0].clamp(min=1)
        share, first, second = sums[1:] / count
        weight = 1 / (1 + self.steps / SPAN)
        average = weight.clamp(min=LEAST_WEIGHT) * seen
        self.center.lerp_(inputs / count, average)
        self.variance.lerp_((second - first.square()).clamp(min=0), average)
        self.offset += (GAIN * weight).clamp(min=LEAST_GAIN) * seen * (share - self.target)
        self.offset.clamp_(-MOST_OFFSET, MOST_OFFSET)
        self.threshold.copy_(self.offset * self.variance.sqrt())
        self.steps += seen
        self.sums.zero_()
        self.inputs.zero_()


def adapt_thresholds(model: nn.Module, *, processes: int = 1) -> None:
    """Adapt the thresholds of all layers with a `softmax_share`; must be called after every optimizer step.

    Args:
        processes: number of processes that train the model, over which observations are summed.
    """
    modules = [module for module in model.modules() if isinstance(module, ShareThreshold)]
    if not modules:
        return
    # use one all-reduce for all layers together
    gathered = torch.cat([torch.cat((m.sums.flatten(), m.inputs)) for m in modules])
    if processes > 1:
        dist.all_reduce(gathered)
    for module, part in zip(modules, gathered.split([m.sums.numel() + m.inputs.numel() for m in modules]), strict=True):
        sums, inputs = part.tensor_split([module.sums.numel()])
        module.update(sums.unflatten(0, (4, -1)), inputs)
