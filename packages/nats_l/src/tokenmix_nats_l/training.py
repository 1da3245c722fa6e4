"""Training callback that moves the fraction of softmax chunks to a target, and logs the fraction."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from tokenmix_core.training import Recipe
from tokenmix_nats_l.mixer import NatsL
from tokenmix_nats_l.share import adapt_thresholds


class SteerShares(TrainerCallback):
    """Adapts the thresholds of layers with a `softmax_share`, and logs the fraction of each layer and head.

    `softmax_share/LAYER` is a mean over heads; `softmax_share/LAYER/HEAD`, only in `metrics.jsonl`, is the fraction of
    one head. Both are means over the forward passes of all processes since the last line of the log, or since the run
    was resumed. Sums are kept on the device, so that only lines of the log wait for it. The values appear in the JSONL
    log and above the progress bar, but not in loggers of `report_to`, which run before this callback.
    """

    def __init__(self) -> None:
        self._layers: list[int] = []
        # number of heads per layer; and sums on the device: of softmax chunks per head, layer by layer, then of all
        # chunks per layer
        self._heads: list[int] = []
        self._sums: Tensor | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        backbone: Any = model.get_submodule("model")
        found = {i: mixer.num_heads for i, mixer in enumerate(backbone.mixers) if isinstance(mixer, NatsL)}
        self._layers, self._heads = list(found), list(found.values())
        if found:
            self._sums = torch.zeros(sum(self._heads) + len(found), dtype=torch.float64, device=args.device)
            self._hook = model.register_forward_hook(self._gather)

    @torch.no_grad()
    def _gather(self, model: nn.Module, args: Any, output: Any) -> None:
        # `auxiliary` lacks the fractions if the batch has only padding
        if model.training and self._sums is not None and "softmax_share" in (output.auxiliary or {}):
            # these entries are one tensor, or a tuple if layers have different head counts
            chunks = torch.stack([count.float() for count in output.auxiliary["chunks"]])
            shares = [x.float() * count for x, count in zip(output.auxiliary["softmax_share"], chunks, strict=True)]
            self._sums += torch.cat((*shares, chunks))

    # `_gather` never waits for the device, so it may run inside a CUDA graph
    _gather.on_device = True  # type: ignore[attr-defined]

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        adapt_thresholds(model, processes=args.world_size)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._sums is None or not logs or "loss" not in logs:
            return
        if args.world_size > 1:
            dist.all_reduce(self._sums)
        *by_layer, counts = self._sums.split([*self._heads, len(self._layers)])
        for layer, softmax, chunks in zip(self._layers, by_layer, counts.tolist(), strict=True):
            shares = (softmax / max(1.0, chunks)).tolist()
            logs[f"softmax_share/{layer}"] = sum(shares) / len(shares)
            logs |= {f"softmax_share/{layer}/{head}": share for head, share in enumerate(shares)}
        self._sums.zero_()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()


def steer_shares(recipe: Recipe) -> SteerShares:
    """Return the callback that adapts and logs softmax fractions during a run of `recipe`."""
    return SteerShares()
