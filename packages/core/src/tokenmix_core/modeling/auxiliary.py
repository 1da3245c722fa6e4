"""Auxiliary losses of the mixers, for training loops that compute their loss from hidden states or logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class AuxiliaryLoss(NamedTuple):
    """The auxiliary losses of one call: their sum over layers and tokens, and the call's number of real tokens."""

    total: Tensor
    tokens: int


@contextmanager
def collected_losses(model: nn.Module) -> Iterator[list[AuxiliaryLoss]]:
    """Context manager: yield a list that gets the auxiliary losses of training calls, for callers that add them."""
    found: list[AuxiliaryLoss] = []
    backbones: list[Any] = [module for module in model.modules() if hasattr(module, "auxiliary_losses")]
    outer = [backbone.auxiliary_losses for backbone in backbones]
    for backbone in backbones:
        backbone.auxiliary_losses = found
    try:
        yield found
    finally:
        for backbone, losses in zip(backbones, outer, strict=True):
            backbone.auxiliary_losses = losses


def summed_losses(auxiliary: dict[str, Tensor | tuple[Tensor, ...]] | None) -> list[Tensor]:
    """Return each auxiliary loss of a call, summed over layers."""
    return [x.sum() for name, values in (auxiliary or {}).items() if name.endswith("_loss") for x in values]


def report_uncounted(model: Any, auxiliary: dict[str, Tensor | tuple[Tensor, ...]] | None, tokens: int) -> None:
    """Append a training call's auxiliary losses to the list of `collected_losses`; outside that context, warn once."""
    if not (auxiliary and model.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    if not (losses := summed_losses(auxiliary)):
        return
    if model.auxiliary_losses is not None:
        model.auxiliary_losses.append(AuxiliaryLoss(torch.stack(losses).sum(), tokens))
    elif not model.warned_of_losses:
        model.warned_of_losses = True
        names = ", ".join(name for name in auxiliary if name.endswith("_loss"))
        warnings.warn(
            f"the caller of {type(model).__name__} computes its own loss, which does not include {names} unless it "
            "adds them from the output's `auxiliary`; with a trainer of TRL, use "
            "tokenmix_core.integrations.count_auxiliary_losses(SFTTrainer)",
            stacklevel=2,
        )
