"""Initialisation of parameters.

Every function overwrites its argument and uses random and pointwise operations only. So it is safe on the meta device
(where it does nothing) and on the sharded tensors of FSDP2. A parameter that was loaded from a checkpoint carries the
mark `_is_hf_initialized` of transformers and stays unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def is_loaded(x: Tensor) -> bool:
    """Return whether transformers has loaded this tensor from a checkpoint."""
    return getattr(x, "_is_hf_initialized", False)


@torch.no_grad()
def init_decay_(A_log: Tensor, *, low: float = 1.0, high: float = 16.0) -> Tensor:
    """Draw A ~ Uniform(low, high), stored as its natural log: the decay rate of a head is −exp(A_log)."""
    return A_log if is_loaded(A_log) else A_log.uniform_(low, high).log_()


@torch.no_grad()
def init_time_step_(dt_bias: Tensor, *, low: float = 1e-3, high: float = 1e-1, floor: float = 1e-4) -> Tensor:
    """Draw Δ = max(exp(Uniform(log low, log high)), floor), stored as softplus⁻¹(Δ) = log(exp(Δ) − 1)."""
    if is_loaded(dt_bias):
        return dt_bias
    return dt_bias.uniform_(math.log(low), math.log(high)).exp_().clamp_(min=floor).expm1_().log_()


def init_short_conv_(weight: Tensor, bias: Tensor | None = None) -> None:
    """Draw a depthwise kernel `[D, W]` from Uniform(−1/√W, 1/√W), torch's default for fan-in W; zero the bias."""
    bound = weight.shape[1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.zeros_(bias)


@torch.no_grad()
def init_weights_(module: nn.Module, std: float) -> None:
    """Initialise one module's own parameters and non-persistent buffers, not those of its children.

    An `init_weights_` method of the module takes precedence; else linear and embedding weights are Normal(0, std) and
    biases zero.
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
