"""Initialisation of parameters.

Every function overwrites its argument and uses random and pointwise operations only. The functions are therefore safe
on the meta device (where they do nothing) and on the sharded tensors of FSDP2. A parameter that was loaded from a
checkpoint carries transformers' mark `_is_hf_initialized` and stays unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def is_loaded(x: Tensor) -> bool:
    """Return whether transformers loaded this tensor from a checkpoint."""
    return getattr(x, "_is_hf_initialized", False)


@torch.no_grad()
def init_decay_(A_log: Tensor, *, low: float = 1.0, high: float = 16.0) -> Tensor:
    """Draw A from Uniform(low, high) and store log A: a head's decay rate is −exp(A_log)."""
    return A_log if is_loaded(A_log) else A_log.uniform_(low, high).log_()


@torch.no_grad()
def init_time_step_(dt_bias: Tensor, *, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> Tensor:
    """Draw Δ = max(exp(Uniform(log low, log high)), floor) and store softplus⁻¹(Δ) = log(exp(Δ) − 1)."""
    if is_loaded(dt_bias):
        return dt_bias
    return dt_bias.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor).expm1_().log_()


def init_short_conv_(weight: Tensor, bias: Tensor | None = None) -> None:
    """Draw a depthwise kernel `[D, W]` from Uniform(−1/√W, 1/√W), torch's default for W inputs; zero the bias."""
    bound = weight.shape[1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.zeros_(bias)


@torch.no_grad()
def init_weights_(module: nn.Module, std: float) -> None:
    """Initialise the parameters and non-persistent buffers of `module` itself, not those of its children.

    A module with a method `init_weights_` initialises itself by it; for others, linear and embedding weights become
    Normal(0, std) and biases zero.
    """
    own = getattr(module, "init_weights_", None)
    if own is not None:
        own()
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, 0.0, std)
