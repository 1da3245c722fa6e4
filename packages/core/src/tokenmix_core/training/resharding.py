"""FSDP2: decide, by sizes and memory, whether gathered parameters are freed after each layer or after each step."""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Resharding = Literal["auto", "always", "never"]

# bytes of bfloat16 activations per token, layer and channel. Measured: a Gated DeltaNet of 380M parameters takes 35.9
# GiB on one H100 with 32,768 tokens (docs/step_time.md); of these, weights, gradients and moments take 16 bytes per
# parameter
_ACTIVATION_BYTES = 42
# bytes of logits and their gradient per token and vocabulary entry
_LOGIT_BYTES = 10
# fraction of the device's memory that the allocator can use
_USABLE = 0.85


class MemoryPlan(NamedTuple):
    """An estimate of the peak memory that a rank needs, in bytes.

    Attributes:
        available: memory of the device or, on a CPU, the rank's share of the host's memory.
        kept: peak with FSDP2 if gathered parameters and their gradients are kept until the end of a step.
        replicated: peak with DDP instead of FSDP2.
    """

    available: float
    kept: float
    replicated: float

    def reshards(self, asked: Resharding) -> bool:
        """True if gathered parameters are freed after each layer and gradients are reduced after each micro-batch."""
        return asked == "always" or (asked == "auto" and self.kept > _USABLE * self.available)

    def told(self, asked: Resharding) -> str:
        """Return a line of text that states what `reshards` decides, and why."""
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
    """Return the memory estimate for a model that is not sharded yet.

    Args:
        tokens: tokens in a micro-batch on one rank.
        ranks: number of ranks over which parameters are sharded.
        bf16: whether activations are bfloat16; if not, they are float32.
        checkpointing: whether the backward pass computes activations again (gradient checkpointing).
    """
    parameters = sum(p.numel() for p in model.parameters())
    config: Any = getattr(model, "config", None)
    layers, width, vocabulary = (
        int(getattr(config, name, 0) or 0) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    # with checkpointing: the inputs of all layers, and all other activations of a single layer
    per_channel = 2 * layers + _ACTIVATION_BYTES if checkpointing else _ACTIVATION_BYTES * layers
    activations = tokens * (per_channel * width * (1 if bf16 else 2) + _LOGIT_BYTES * vocabulary)
    # float32 weight, gradient and two moments take 16 bytes. FSDP2 shards these and also needs whole weights and
    # gradients; DDP also needs buckets of gradients
    kept = 16 * parameters / ranks + 8 * parameters + activations
    return MemoryPlan(_memory(), kept, 20 * parameters + activations)


def _memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def prepare_micro_batch(model: nn.Module, *, reshard: bool, last: bool) -> None:
    """Prepare the FSDP2 units of a model for the next micro-batch; `last` is True for the last one of a step."""
    root: Any = model if isinstance(model, FSDPModule) else getattr(model, "_orig_mod", model)
    if reshard:
        # accelerate would delay the reduction to the last micro-batch, and until then keep whole gradients of all
        # layers
        root.set_requires_gradient_sync(True)
    else:
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(last)
