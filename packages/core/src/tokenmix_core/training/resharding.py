"""FSDP2: whether gathered parameters stay between layers and micro-batches, by a rule of sizes and memory."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Resharding = Literal["auto", "always", "never"]

# bytes of activations for each token, layer and channel in bfloat16: Gated DeltaNet of 380M takes 35.9 GiB on one H100
# with 32,768 tokens (docs/step_time.md), of which 16 bytes a parameter are weights, gradients and moments
_ACTIVATION_BYTES = 42
# of logits and their gradient for each token and entry of the vocabulary
_LOGIT_BYTES = 10
# share of the memory that the allocator can fill
_USABLE = 0.85


class MemoryPlan(NamedTuple):
    """The estimate of a rank's memory, in bytes.

    Attributes:
        available: memory of the device, or the rank's share of the host's.
        kept: peak if gathered parameters and their gradients stay until the end of a step.
        replicated: peak of DDP.
    """

    available: float
    kept: float
    replicated: float

    def reshards(self, asked: Resharding) -> bool:
        """Return whether gathered parameters are freed after each layer, and gradients reduced in each micro-batch."""
        return asked == "always" or (asked == "auto" and self.kept > _USABLE * self.available)

    def told(self, asked: Resharding) -> str:
        """Return the choice and its reason as one line."""
        reshards = self.reshards(asked)
        way = (
            "gathers the parameters of each layer in each pass, and reduces gradients in each micro-batch"
            if reshards
            else "gathers parameters once a step, and reduces gradients at its end"
        )
        sizes = f"estimate {self.kept / 1e9:.3g} GB, available {_USABLE * self.available / 1e9:.3g} GB"
        line = f"FSDP2 {way} ({sizes}; --fsdp_reshard {asked})"
        if self.replicated <= _USABLE * self.available:
            line += f"; DDP needs {self.replicated / 1e9:.3g} GB, so it fits and sends less: leave out --fsdp"
        return line


def memory_plan(model: nn.Module, tokens: int, ranks: int, *, bf16: bool, checkpointing: bool) -> MemoryPlan:
    """Return the estimate for a model before it is sharded.

    Args:
        tokens: tokens of a micro-batch on one rank.
        ranks: number of shards.
        bf16: whether activations are bfloat16, else float32.
        checkpointing: whether the backward pass computes activations again.
    """
    parameters = sum(p.numel() for p in model.parameters())
    config: Any = getattr(model, "config", None)
    layers, width, vocabulary = (
        int(getattr(config, name, 0) or 0) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    # with checkpointing, the inputs of all layers and the activations of one
    per_channel = 2 * layers + _ACTIVATION_BYTES if checkpointing else _ACTIVATION_BYTES * layers
    activations = tokens * (per_channel * width * (1 if bf16 else 2) + _LOGIT_BYTES * vocabulary)
    # float32 weight, gradient and two moments; FSDP2 has shards of them, and whole weights and gradients beside;
    # DDP has buckets of gradients beside
    kept = 16 * parameters / ranks + 8 * parameters + activations
    return MemoryPlan(_memory(), kept, 20 * parameters + activations)


def _memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def prepare_micro_batch(model: nn.Module, *, reshard: bool, last: bool) -> None:
    """Set the units of a sharded model for the next micro-batch; `last` for the last one of a step."""
    root: Any = model if isinstance(model, FSDPModule) else getattr(model, "_orig_mod", model)
    if reshard:
        # accelerate would keep whole gradients of all layers until the last micro-batch
        root.set_requires_gradient_sync(True)
    else:
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(last)
