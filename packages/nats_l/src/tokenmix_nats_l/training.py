"""The log of a training run's chunk types."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from tokenmix_core.training import Recipe
from tokenmix_nats_l.mixer import NatsL


class LogSoftmaxShares(TrainerCallback):
    """Adds to the log, for each NAtS-L layer, the share of chunks that were softmax, as `softmax_share/LAYER`.

    Means over heads, and over all chunks of all processes since the last line, or since the run went on from a
    checkpoint. Shares are summed on the device; only a line of the log waits for it. The JSONL log and the progress bar
    have them; loggers of `report_to` are told before.
    """

    def __init__(self) -> None:
        self._places: list[int] = []
        # for each layer the softmax chunks, averaged over heads, and all chunks
        self._sums: Tensor | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        backbone: Any = model.get_submodule("model")
        self._places = [i for i, mixer in enumerate(backbone.mixers) if isinstance(mixer, NatsL)]
        if self._places:
            self._sums = torch.zeros(2, len(self._places), dtype=torch.float64, device=args.device)
            self._hook = model.register_forward_hook(self._gather)

    @torch.no_grad()
    def _gather(self, model: nn.Module, args: Any, output: Any) -> None:
        if model.training and self._sums is not None:
            # a tensor of all layers, or one of each if they differ in heads
            shares = torch.stack([share.float().mean() for share in output.auxiliary["softmax_share"]])
            chunks = torch.stack([count.float() for count in output.auxiliary["chunks"]])
            self._sums += torch.stack((shares * chunks, chunks))

    # a recorded pass does all that it does
    _gather.on_device = True  # type: ignore[attr-defined]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._sums is None or not logs or "loss" not in logs:
            return
        if args.world_size > 1:
            dist.all_reduce(self._sums)
        for place, softmax, chunks in zip(self._places, *self._sums.tolist(), strict=True):
            logs[f"softmax_share/{place}"] = softmax / max(1.0, chunks)
        self._sums.zero_()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()


def log_shares(recipe: Recipe) -> LogSoftmaxShares:
    """The callback that logs the shares of a recipe's run."""
    return LogSoftmaxShares()
