"""The loss at each position around switches between the modes (Oryx paper, Figures 3 to 10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.evaluation import (
    BUILT_IN_TEXT,
    EvalOptions,
    Parts,
    Plot,
    Series,
    SuiteResult,
    cut_sequences,
    smooth,
    text_tokens,
    token_losses,
)
from tokenmix_oryx.modes import ATTENTION, LINEAR, MODES

Schedule = list[tuple[int, str]]
# ranges of distances from a switch, in tokens, over each of which the excess loss is averaged
AFTER = ((0, 16), (16, 64), (64, 128))
# an entry in the settings of suites whose result rows state their own modes
BY_ROW = {"modes": "each row's"}


def switch_schedules(length: int, chunk_size: int) -> dict[str, dict[str, Schedule]]:
    """Return schedules by plot and curve: one switch, several, or switches inside chunks; either mode is first."""
    quarter = max(chunk_size, length // 4 // chunk_size * chunk_size)
    off = quarter + chunk_size // 3 + 1
    if length <= off + 1:
        raise ValueError(f"switches of chunks of {chunk_size} tokens need more than {off + 1} tokens, got {length}")
    # the last token predicts nothing, so positions end before it
    end = length - 1
    plots: dict[str, dict[str, Schedule]] = {"one switch": {}, "several switches": {}, "unaligned switches": {}}
    for first, second in ((ATTENTION, LINEAR), (LINEAR, ATTENTION)):
        for at in range(quarter, end, quarter):
            plots["one switch"][f"{first} → {second} at {at}"] = [(0, first), (at, second)]
        alternating = [(at, (first, second)[i % 2]) for i, at in enumerate(range(0, end, quarter))]
        plots["several switches"][f"{first} first, every {quarter}"] = alternating
        shifted = [(0, first)] + [(at, (second, first)[i % 2]) for i, at in enumerate(range(off, end, off))]
        plots["unaligned switches"][f"{first} first, every {off}"] = shifted
    return plots


def switch_suite(model: Any, tokenizer: Any, options: EvalOptions) -> SuiteResult:
    """Measure perplexity by position with switches of the mode, and in each mode without them (paper, Figures 3 to 10).

    The excess loss after a switch is the loss minus that of a run wholly in the new mode, on the same tokens. It is
    averaged over ranges of distances from the switch; its standard error is taken over sequences.
    """
    plots = options.choose("switch-perplexity", ("one switch", "several switches", "unaligned switches"))
    length = options.one_length("switch-perplexity", 2048)
    schedules = switch_schedules(length, model.config.mode_chunk_size)
    sequences = cut_sequences(
        text_tokens(options.text, tokenizer, 4 * (options.limit or 64) * length), length, options.limit or 64
    )
    alone = {mode: _losses(model, sequences, [(0, mode)], options) for mode in MODES}
    rows = [_loss_row(f"{mode} alone", losses) for mode, losses in alone.items()]
    samples = [losses.mean(1).tolist() for losses in alone.values()]
    drawn: list[Plot] = []
    parts = Parts()
    for plot in plots:
        curves = {f"{mode} alone": losses for mode, losses in alone.items()}
        for name, schedule in schedules[plot].items():
            with parts.part(name):
                curves[name] = losses = _losses(model, sequences, schedule, options)
                row = {**_loss_row(name, losses), **_excess(losses, alone, schedule)}
                samples.append(_excess_of_sequences(losses, alone, schedule, 0, AFTER[-1][1]).mean(1).tolist())
                rows.append(row)
        drawn.append(_switch_plot(plot, curves, length))
        if plot == "one switch":
            drawn.append(_excess_plot(curves, alone, schedules[plot]))
    settings = {"length": length, "sequences": len(sequences), "text": options.text or BUILT_IN_TEXT, **BY_ROW}
    result = {"suite": "switch-perplexity", "settings": settings, "rows": rows, "plots": drawn, "samples": samples}
    return parts.result(SuiteResult(**result))


def _losses(
    model: Any, sequences: Int[Tensor, "N T"], schedule: Schedule, options: EvalOptions
) -> Float[np.ndarray, "N T-1"]:
    with model.modes(schedule):
        batches = sequences.split(options.batch_size or 8)
        losses = [token_losses(model, batch.to(model.device)).double().cpu() for batch in batches]
    return torch.cat(losses).numpy()


def _loss_row(name: str, losses: Float[np.ndarray, "N T"]) -> dict[str, Any]:
    return {"modes": name, "loss": float(losses.mean()), "perplexity": float(np.exp(losses.mean()))}


def _excess(losses: np.ndarray, alone: dict[str, np.ndarray], schedule: Schedule) -> dict[str, float | None]:
    """Return, for each range of distances in AFTER, the mean excess loss over all switches and its standard error."""
    found: dict[str, float | None] = {}
    for low, high in AFTER:
        each = _excess_of_sequences(losses, alone, schedule, low, high)
        if each.shape[1]:
            found[f"excess, {low}-{high} tokens after"] = float(each.mean())
            found[f"± {low}-{high}"] = float(each.mean(1).std(ddof=1) / len(each) ** 0.5) if len(each) > 1 else None
    return found


def _excess_of_sequences(
    losses: np.ndarray, alone: dict[str, np.ndarray], schedule: Schedule, low: int, high: int
) -> np.ndarray:
    """Return each sequence's excess loss at the tokens `low` to `high` after every switch, joined along tokens."""
    ends = [start for start, _ in schedule[1:]] + [losses.shape[1]]
    parts = [
        (losses - alone[mode])[:, start + low : min(start + high, end)]
        for (start, mode), end in zip(schedule[1:], ends[1:], strict=True)
    ]
    return np.concatenate(parts, 1)


def _switch_plot(title: str, curves: dict[str, np.ndarray], length: int) -> Plot:
    series: Series = {}
    for name, losses in curves.items():
        curve = np.exp(smooth(losses.mean(0), max(1, length // 64)))
        series[name] = (list(range(1, length)), curve.tolist())
    title = f"Perplexity by position, {title}, smoothed"
    return Plot(title=title, x="position (tokens)", y="perplexity", log_y=True, series=series)


def _excess_plot(curves: dict[str, np.ndarray], alone: dict[str, np.ndarray], schedules: dict[str, Schedule]) -> Plot:
    """Plot the excess loss over distance from the switch: mean over sequences and switches, smoothed over 8 tokens."""
    series: Series = {}
    for first, second in ((ATTENTION, LINEAR), (LINEAR, ATTENTION)):
        parts = [
            (curves[name] - alone[second])[:, at:].mean(0)
            for name, ((_, start), (at, _)) in ((n, s) for n, s in schedules.items() if len(s) == 2 and n in curves)
            if start == first
        ]
        shortest = min(map(len, parts), default=0)
        if shortest:
            mean = smooth(np.mean([part[:shortest] for part in parts], 0), 8)
            series[f"{first} → {second}"] = (list(range(shortest)), mean.tolist())
    title = "Loss above the new mode alone, after a switch"
    return Plot(title=title, x="tokens since the switch", y="nats", series=series)
