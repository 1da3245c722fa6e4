"""Feedback for the sparsity loss (Algorithm 1): each head's λ adapts to the fraction of keys that the head retains."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tokenmix_core.nn import HeadWeights
from tokenmix_core.training import AdaptHeadWeights, Recipe
from tokenmix_lte.mixer import FIRST_WEIGHT, Lte
from tokenmix_lte.scorers import FIXED

# number of steps between two updates of λ; the moving average covers half of this number
EVERY = 32
DECAY = 1 - 2 / (1 + EVERY / 2)
RISE, FALL = 1.5, 0.5
# λ, a head's weight of the sparsity loss, falls if the retained fraction is below this part of the target
SLACK = 0.95


class SteerSparsity(AdaptHeadWeights, ExportableState):
    """Adapts λ so that a head retains about `target` keys of a training row: λ rises if it retains more, else λ falls.

    Layers observe the retained fraction of a row's keys, which does not depend on batch size and gradient accumulation.
    For each layer, the log has the number of retained keys per row, averaged over heads, as `kept/LAYER`, and the
    largest λ as `lambda/LAYER`. Only `metrics.jsonl` also has `kept/LAYER/HEAD` and `lambda/LAYER/HEAD` for each head.
    Retained keys are averaged over steps by a moving average that starts at 0. The log corrects the bias of this start,
    so that its first lines are right; the rule for λ uses the average without this correction, as in the paper.

    Args:
        target: number of keys of a row, window included, that a head should retain.
        length: number of tokens in a row.

    Raises:
        ValueError: a target or a length below 1.
    """

    def __init__(self, target: int, length: int) -> None:
        if target < 1 or length < 1:
            raise ValueError(f"target and length must be at least 1, got {target} and {length}")
        self.target, self.length, self.share, self.from_zero = target, length, target / length, True
        super().__init__(self.next_weights, every=EVERY, decay=DECAY)

    def next_weights(self, weight: Float[Tensor, "H"], average: Float[Tensor, "H"]) -> Float[Tensor, "H"]:
        """Return the new λ of each head, given its average retained fraction.

        λ is at most 1. If it falls below its initial value it becomes 0; from 0 it rises to the initial value.
        """
        above, below = average > self.share, average < SLACK * self.share
        changed = torch.where(above, weight * RISE, torch.where(below, weight * FALL, weight)).clamp(max=1.0)
        changed = changed.masked_fill(changed < FIRST_WEIGHT, 0.0)
        return changed.masked_fill((changed == 0) & above, FIRST_WEIGHT)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        # if the model was trained before, its averages do not start at 0 and need no correction
        averages = [m.average for m in model.modules() if isinstance(m, HeadWeights)]
        self.from_zero = not any(bool(x.any()) for x in averages)
        if state.global_step > 0:
            # a resumed run: its checkpoint tells how the averages started, if it is not older than this information
            saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state() | {"attributes": {}})
            self.from_zero = saved["attributes"].get("from_zero", True)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint saves of this callback: its arguments, and whether the averages started at 0."""
        return {
            "args": {"target": self.target, "length": self.length},
            "attributes": {"from_zero": self.from_zero},
        }

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, *, model: nn.Module, **_: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        backbone: Any = model.get_submodule("model")
        unbiased = 1 - self.decay**state.global_step if self.from_zero else 1.0
        for i, mixer in enumerate(backbone.mixers):
            if isinstance(mixer, Lte) and mixer.sparsity is not None:
                kept = (self.length / unbiased * mixer.sparsity.average.double()).tolist()
                weights = mixer.sparsity.weight.tolist()
                logs |= {f"kept/{i}": sum(kept) / len(kept), f"lambda/{i}": max(weights)}
                for name, values in (("kept", kept), ("lambda", weights)):
                    logs |= {f"{name}/{i}/{head}": value for head, value in enumerate(values)}


def steer_sparsity(recipe: Recipe) -> TrainerCallback:
    """Return the callback that adapts λ during a run of `recipe`, so that heads retain about `cap` keys.

    Raises:
        ValueError: the model has no layers that score keys, or layers with different caps.
    """
    config: Any = recipe.model_config()
    default, caps = inspect.signature(Lte).parameters["cap"].default, set()
    for i in range(config.num_hidden_layers):
        options = config.options_of(i)
        if config.mixer_type(i) == "lte" and options.get("scorer") not in FIXED:
            caps.add(options.get("cap", default))
    if not caps:
        raise ValueError("steer_sparsity needs a model with LTE layers that score keys; drop the callback or add one")
    if len(caps) > 1:
        raise ValueError(f"steer_sparsity needs LTE layers with one cap, got {', '.join(map(str, sorted(caps)))}")
    return SteerSparsity(caps.pop(), recipe.data.seq_len)
