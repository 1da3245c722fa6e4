"""Gradients of replicated models in one buffer, which one collective averages: the exchange of DDP for CUDA graphs.

DDP averages gradients in hooks of an eager backward pass, which a replay of a CUDA graph does not call. With graphs the
trainer runs the module inside of DDP's wrapper instead, so that each rank accumulates its own gradients, and averages
them after the last micro-batch of a step. This does not overlap with computation: 1.5 GB for 380M parameters, a few
milliseconds over NVLink.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

# elements to which each gradient's place in the buffer is padded: 256 bytes in float32, for vectorised loads
_ALIGNMENT = 64


class AveragedGradients:
    """The gradients of a replica's trainable parameters, views of one buffer.

    Args:
        parameters: all parameters of the model, in the same order on all ranks; frozen ones have no gradient.

    Attributes:
        gradients: the gradient of each parameter, or None if it is frozen.

    Raises:
        ValueError: the trainable parameters have several dtypes or devices.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        trainable = [p for p in self.parameters if p.requires_grad]
        kinds = {(p.dtype, p.device) for p in trainable}
        if len(kinds) != 1:
            raise ValueError(f"gradients of one dtype and device can share a buffer, got {len(kinds)} kinds")
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in trainable]
        self.buffer = trainable[0].new_zeros(sum(sizes))
        parts = iter(self.buffer.split(sizes))
        self.gradients = [next(parts)[: p.numel()].view(p.shape) if p.requires_grad else None for p in self.parameters]

    def average(self) -> None:
        """Replace each gradient by its mean over all ranks; parameters then have the buffer's gradients.

        Raises:
            RuntimeError: a parameter has no gradient, or a frozen one has one; DDP refuses both as well.
        """
        for parameter, average in zip(self.parameters, self.gradients, strict=True):
            gradient = parameter.grad
            if (gradient is None) != (average is None):
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} has "
                    f"{'no gradient' if gradient is None else 'a gradient, but was frozen before'}: "
                    "train with training_graph='never'"
                )
            # eager passes make gradients of their own
            if gradient is not None and average is not None and gradient is not average:
                average.copy_(gradient)
                parameter.grad = average
        # DDP divides before the sum as well
        self.buffer.div_(dist.get_world_size())
        dist.all_reduce(self.buffer)
