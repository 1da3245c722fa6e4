"""Select the parameters to which weight decay applies: matrices, but no vectors (norms, biases, decay rates)."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters of two or more dimensions; others (norms, biases, A_log) do not decay."""
    return [name for name, p in model.named_parameters() if p.dim() >= 2]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of trainable parameters for an optimizer, one with and one without weight decay.

    transformers' Trainer selects parameters by name, and would apply weight decay to `A_log` and `D`. Pass to it (or to
    a trainer of TRL) `optimizers=(torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4), None)`.
    """
    decaying = set(decay_parameter_names(model))
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups[name in decaying].append(p)
    return [{"params": groups[decays], "weight_decay": weight_decay * decays} for decays in (True, False)]
