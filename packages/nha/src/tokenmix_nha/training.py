"""Train with a random window for every layer and step, so that one model runs with any windows (paper, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from tokenmix_core import stream
from tokenmix_nha.model_windows import set_windows, windows_of
from tokenmix_nha.windows import Window, check_window


def draw_windows(choices: Sequence[Window], layers: int, *, seed: int, step: int) -> list[Window]:
    """Draw one window per layer, uniformly from `choices` and independently; the draw depends only on seed and step."""
    rng = stream("nha windows", seed, step)
    return [choices[i] for i in rng.integers(len(choices), size=layers)]


class DrawWindows(TrainerCallback):
    """Draws a random window for every layer at the beginning of each optimizer step (NHA paper, Figure 4).

    All micro-batches and processes of a step use the same windows. A resumed run draws the windows of an uninterrupted
    run. At the end of training, the model gets its own windows back.

    Args:
        choices: the windows from which to draw.
        seed: seed of the draws.

    Raises:
        ValueError: `choices` is empty or contains an invalid window.
    """

    def __init__(self, choices: Sequence[Window], seed: int):
        if not choices:
            raise ValueError("random_windows must name at least one window, got none")
        self.choices, self.seed = [check_window(window) for window in choices], seed
        self._own: list[Window] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        if self._own is None:
            self._own = windows_of(model)
        set_windows(model, draw_windows(self.choices, len(self._own), seed=self.seed, step=state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        if self._own is not None:
            set_windows(model, self._own)
