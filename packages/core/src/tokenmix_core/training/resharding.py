"""Decide for FSDP2, by sizes and memory, whether gathered parameters are freed after each layer or after each step."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule

Resharding = Literal["auto", "always", "never"]

# bytes of bfloat16 activations per token, layer and channel. Measured: a Gated DeltaNet of 380M parameters takes 35.9
# GiB on one H100 with 32,768 tokens (docs/step_time.md), of which weights, gradients and moments take 16 bytes per
# parameter
_ACTIVATION_BYTES = 42
# bytes of logits and of their gradient, per token and vocabulary entry
_LOGIT_BYTES = 10
# fraction of the device's memory that the allocator can use
_USABLE = 0.85
# minimum bytes of float32 parameters per collective, and minimum number of collectives per pass, so that they overlap
# with computation. At most two units are gathered at once, each with its gradients: less than 1 GB more than with one
# layer per unit
_UNIT_BYTES, _LEAST_UNITS = 2**27, 4


class MemoryPlan(NamedTuple):
    """An estimate of the peak memory that a rank needs, in bytes.

    Attributes:
        available: memory of the device or, on a CPU, the rank's share of the host's memory.
        kept: peak with FSDP2 if gathered parameters and their gradients are kept until the end of a step.
        replicated: peak with DDP instead of FSDP2.
        layers: the number of layers if units of FSDP2 may hold several; 1 if each must be a unit of its own.
        layer: size of a layer's float32 parameters.
    """

    available: float
    kept: float
    replicated: float
    layers: int = 1
    layer: float = _UNIT_BYTES

    def unit_layers(self, asked: int) -> int:
        """Return the number of layers in an FSDP2 unit: `asked` or, if that is 0, enough for large collectives."""
        return asked or max(1, min(math.ceil(_UNIT_BYTES / self.layer), self.layers // _LEAST_UNITS))

    def reshards(self, asked: Resharding) -> bool:
        """True if gathered parameters are freed after each layer and gradients are reduced after each micro-batch."""
        return asked == "always" or (asked == "auto" and self.kept > _USABLE * self.available)

    def told(self, asked: Resharding, unit_layers: int = 0) -> str:
        """Return a line of text that states what `reshards` and `unit_layers` decide, and why."""
        reshards = self.reshards(asked)
        way = (
            "gathers the parameters of each layer in each pass, and reduces gradients in each micro-batch"
            if reshards
            else "gathers parameters once a step, and reduces gradients at its end"
        )
        sizes = f"estimate {self.kept / 1e9:.3g} GB, available {_USABLE * self.available / 1e9:.3g} GB"
        line = f"FSDP2 {way} ({sizes}; --fsdp_reshard {asked})"
        line += f"; layers per unit: {self.unit_layers(unit_layers)} (a layer has {self.layer / 1e6:.3g} MB)"
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
    # with checkpointing, memory holds the inputs of all layers and all other activations of one layer
    per_channel = 2 * layers + _ACTIVATION_BYTES if checkpointing else _ACTIVATION_BYTES * layers
    activations = tokens * (per_channel * width * (1 if bf16 else 2) + _LOGIT_BYTES * vocabulary)
    # float32 weight, gradient and two moments take 16 bytes per parameter. FSDP2 shards these, and also needs whole
    # weights and gradients; DDP also needs buckets of gradients
    kept = 16 * parameters / ranks + 8 * parameters + activations
    units = layer_modules(model)
    layer = 4 * sum(p.numel() for unit in units for p in unit.parameters()) / max(1, len(units))
    # use one layer per unit if dtypes differ, which FSDP2 forbids inside a unit, or if layers are recomputed, which was
    # not tested with larger units
    kinds = {(p.dtype, p.requires_grad) for p in model.parameters()}
    shared = len(units) if len(kinds) == 1 and not checkpointing else 1
    return MemoryPlan(_memory(), kept, 20 * parameters + activations, shared, layer or _UNIT_BYTES)


def layer_modules(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers in the order of the forward pass; the accelerate library makes FSDP2 units of them.

    The class of a sharded layer is a subclass, which FSDP2 creates.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if names.intersection(kind.__name__ for kind in type(module).__mro__)]


def _memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def prepare_micro_batch(model: nn.Module, *, reshard: bool, last: bool) -> None:
    """Prepare the FSDP2 units of a model for the next micro-batch; `last` is True for the last one of a step.

    If `reshard`, units are sharded again after each pass; else only after the backward pass of the last micro-batch.
    """
    root: Any = model if isinstance(model, FSDPModule) else getattr(model, "_orig_mod", model)
    if reshard:
        # accelerate would delay the reduction to the last micro-batch, and keep whole gradients of all layers until
        # then
        root.set_requires_gradient_sync(True)
    else:
        root.set_reshard_after_forward(False)
        root.set_reshard_after_backward(last)


@contextmanager
def grouped_layers(model: nn.Module, count: int) -> Iterator[None]:
    """Make accelerate shard `count` successive layers of a model as one FSDP2 unit, in this `with` block.

    accelerate calls `fully_shard` for each layer that belongs to no unit yet, and maps the optimizer's parameters to
    their shards afterwards, so the units must be made within its call.
    """
    layers = layer_modules(model)
    units = [layers[i : i + count] for i in range(0, len(layers), count)]
    unit_of = {layer: unit for unit in units for layer in unit if len(unit) > 1}
    shard = fsdp.fully_shard

    def shard_unit(module: Any, **options: Any) -> Any:
        return shard(unit_of.get(module, module) if isinstance(module, nn.Module) else module, **options)

    # copy the attributes of `fully_shard` that torch reads
    replaced: Any = functools.update_wrapper(shard_unit, shard)
    fsdp.fully_shard = replaced
    try:
        yield
    finally:
        fsdp.fully_shard = shard
