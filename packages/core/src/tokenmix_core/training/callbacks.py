"""Training callbacks: progress bar, JSONL log, stop with a checkpoint on a signal, adaptive weights of heads."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm
from transformers import TrainerCallback

from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.nn.head_weights import HeadWeights


class Progress(TrainerCallback):
    """A progress bar; each line of the log is printed above it."""

    def __init__(self) -> None:
        self._progress: tqdm | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            begun = {"total": state.max_steps, "initial": state.global_step}
            self._progress = tqdm(**begun, desc="training", unit="step", delay=0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._progress is not None:
            self._progress.update(state.global_step - self._progress.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self._progress is not None and logs and "loss" in logs:
            # show no `epoch`: the Trainer counts the whole run as one epoch
            shown = [
                f"{name} {_rounded(value)}"
                for name, value in logs.items()
                # show no metrics of single heads (two or more slashes in the name), which only the metrics file has
                if name != "epoch" and name.count("/") < 2
            ]
            self._progress.write(f"step {state.global_step}: {', '.join(shown)}")

    def close(self) -> None:
        """Close the progress bar, so that the next message begins on a new line."""
        if self._progress is not None:
            self._progress.refresh()
            self._progress.close()


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class MetricsFile(TrainerCallback):
    """Appends every line of the log to a JSONL file, and keeps the lines' values in `trainer_state.json`.

    When a run resumes at step s, the lines of later steps are removed, because training writes them again. Lines that a
    kill or a power loss has removed from the file are restored from the Trainer's state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        known = [{"step": line.pop("step"), **line} for line in map(dict, state.log_history) if "step" in line]
        written = [line for line in _readable_lines(self.path) if line.get("step", 0) <= state.global_step]
        # a line is lost if no line of the file has all its values; lines of the file may have more, because earlier
        # versions added values after the Trainer had stored the line
        lost = [line for line in known if not any(line.items() <= other.items() for other in written)]
        lines = sorted([*written, *lost], key=lambda line: (line.get("step", 0), "train_runtime" in line))
        if lines or self.path.exists():
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            if state.log_history:
                state.log_history[-1].update(logs)


def _readable_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL log; an empty list if the file does not exist."""
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, RecursionError):
            lines.append(_logged(line))
    return lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL log. Ignore an incomplete last line, which a killed process leaves.

    Raises:
        ValueError: a line before the last is damaged.
    """
    lines = []
    written = path.read_bytes().splitlines()
    for number, line in enumerate(written, start=1):
        try:
            lines.append(_logged(line))
        except (ValueError, TypeError, RecursionError) as error:
            if number < len(written):
                raise ValueError(f"{path}, line {number} is damaged: expected a JSON object ({error})") from error
    return lines


def _logged(line: bytes) -> dict[str, Any]:
    """Parse one line of the log; raise a ValueError unless its step is an integer."""
    found = dict(json.loads(line))
    if type(step := found.get("step", 0)) is not int:
        raise ValueError(f"its step must be an integer, got {step!r:.80}")
    return found


class StopOnSignal(TrainerCallback):
    """At Ctrl-C or SIGTERM, finishes the step, writes a checkpoint and stops; a second signal ends the process at once.

    Signals within one second count as one, because `timeout` and job schedulers signal the process and then its process
    group. Ranks exchange after every step whether they got a signal, on the CPU, so that no GPU waits.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._group: Any = None
        self._previous: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        except ValueError:
            # outside the main thread do nothing: Python allows signal handlers only there
            self._previous.clear()
        if args.world_size > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at > 1:
                self.close()
                signal.raise_signal(number)
            return
        self.received, self._received_at = number, time.monotonic()
        if int(os.environ.get("RANK", "0")) == 0:
            name = signal.Signals(number).name
            print(f"\n{name} received: finishing this step; a second signal quits at once", file=sys.stderr)

    def close(self) -> None:
        """Restore the signal handlers that were installed before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        stop = self.received is not None
        if args.world_size > 1:
            flag = torch.tensor(int(stop))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
            stop = bool(flag)
            self.received = self.received or (signal.SIGTERM if stop else None)
        if stop:
            control.should_save = control.should_training_stop = True


Rule = Callable[[Float[Tensor, "H"], Float[Tensor, "H"]], Float[Tensor, "H"]]


class AdaptHeadWeights(TrainerCallback):
    """Updates the weights of every `HeadWeights` module in a model from statistics of its heads.

    After each optimizer step, the statistics that the modules gathered over all micro-batches and processes give a mean
    c for each head, and c̄ ← α c̄ + (1 − α) c. Every `every` steps the weights become `rule(weights, c̄)`. Weights and
    c̄ are persistent buffers: checkpoints contain them, and they are equal on all processes.

    Args:
        rule: a function of the weights `[H]` and the averages `[H]` that returns the new weights `[H]`.
        every: steps between two updates of the weights.
        decay: α.
    """

    def __init__(self, rule: Rule, *, every: int, decay: float) -> None:
        if every < 1 or not 0 <= decay < 1:
            raise ValueError(f"every must be at least 1 and decay from 0 to below 1, got {every} and {decay}")
        self.rule, self.every, self.decay = rule, every, decay

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
        modules = [module for module in model.modules() if isinstance(module, HeadWeights)]
        if not modules:
            raise ValueError(f"{type(model).__name__} has no HeadWeights module whose weights could be adapted")
        # one all-reduce for the statistics of all layers together
        gathered = torch.cat([torch.cat([m.total, m.count[None]]) for m in modules])
        if args.world_size > 1:
            dist.all_reduce(gathered)
        for module, part in zip(modules, gathered.split([len(m.total) + 1 for m in modules]), strict=True):
            mean = part[:-1] / part[-1].clamp(min=1)
            module.average.lerp_(mean, 1 - self.decay)
            module.total.zero_()
            module.count.zero_()
            if state.global_step % self.every == 0:
                module.weight.copy_(self.rule(module.weight, module.average))
