"""Search for the layers that should have full attention, by changing windows at inference (paper, section 4.7.1)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenmix_core import write_atomically
from tokenmix_core.evaluation import (
    COMMONSENSE,
    LONGBENCH,
    RECALL,
    RULER,
    EvalOptions,
    Plot,
    Suite,
    SuiteResult,
    check_suites,
    format_rows,
    provenance,
    write_result,
)
from tokenmix_core.training import read_metrics
from tokenmix_nha.model_windows import nha_mixers, using_windows, windows_of
from tokenmix_nha.windows import FULL, Window, check_window, hybrid_windows, layers_with_windows

CHOSEN, TRIED = "chosen", "tried.jsonl"
# the lengths of blocks in the paper's Table 5; one layer in each block has full attention
BLOCKS = (8, 6, 4, 3, 2)
# for each task of lm-eval, the metric that is used as score
_METRICS = {**COMMONSENSE, **RECALL, **dict.fromkeys(LONGBENCH, "score")}


@dataclass(frozen=True)
class Candidate:
    """A choice of windows with its score.

    Attributes:
        pattern: name of the pattern, which is a row of the table.
        position: index of the full layer in each block, or of the full layer that was added to the model; None if all
            layers have the same window.
        windows: the window of each layer.
        score: the model's score with these windows; higher is better.
    """

    pattern: str
    position: int | None
    windows: tuple[Window, ...]
    score: float

    @property
    def full(self) -> list[int]:
        """Indices of the layers with full attention."""
        return [i for i, window in enumerate(self.windows) if window == FULL]


def search_windows(
    model: Any,
    score: Callable[[Any], float],
    *,
    window: Window,
    blocks: Sequence[int] = BLOCKS,
    insert: int = 1,
    max_full: int | None = None,
    progress: bool = True,
) -> tuple[list[Candidate], Candidate]:
    """Score every pattern of the paper's Table 5 at every position, then add full layers greedily; select the best one.

    Args:
        model: an NHA model, whose windows are restored at the end.
        score: returns the score of a model, higher is better; called once for each choice of windows.
        window: window of the layers without full attention.
        blocks: block lengths to try, with one full layer per block, at each position of the block.
        insert: number of full layers to add, starting from the best pattern with the fewest full layers; each step
            tries all layers and adds the best one.
        max_full: maximum number of full layers of the selected candidate; None allows the number after all insertions.
        progress: whether to show a progress bar.

    Returns:
        All candidates in the order in which they were tried, and the selected one: that with the best score and, among
        equal scores, the fewest full layers.

    Raises:
        ValueError: no block, a block of fewer than 2 layers or longer than the model, an invalid window, or a
            negative `insert` or `max_full`.
    """
    layers = len(nha_mixers(model))
    check_window(window)
    if not blocks or any(not 1 < block <= layers for block in blocks):
        raise ValueError(f"blocks must have from 2 to the model's {layers} layers, got {list(blocks)}")
    if insert < 0:
        raise ValueError(f"insert must be at least 0, got {insert}")
    tried: dict[tuple[Window, ...], float] = {}
    found: list[Candidate] = []
    meter = tqdm(desc="search", unit="pattern", disable=not progress)

    def attempt(pattern: str, position: int | None, windows: Sequence[Window]) -> Candidate:
        key = tuple(windows)
        if key not in tried:
            with using_windows(model, list(key)):
                tried[key] = score(model)
            meter.update()
        found.append(Candidate(pattern, position, key, tried[key]))
        return found[-1]

    attempt("pure linear", None, [window] * layers)
    for block in sorted(blocks, reverse=True):
        for position in range(block):
            attempt(f"1:{block}", position, hybrid_windows(layers, window, range(position, layers, block)))
    sparsest = [c for c in found if c.pattern == f"1:{max(blocks)}"]
    # if a block's length does not divide the number of layers, the number of full layers depends on the position
    best = max(sparsest, key=lambda c: (c.score, -len(c.full)))
    for added in range(1, insert + 1):
        rest = [i for i in range(layers) if i not in best.full]
        if not rest:
            break
        name = f"1:{max(blocks)} + {added}"
        full = best.full
        best = max((attempt(name, i, hybrid_windows(layers, window, [*full, i])) for i in rest), key=lambda c: c.score)
    attempt("all full", None, [FULL] * layers)
    meter.close()
    most = len(best.full) if max_full is None else max_full
    allowed = [c for c in found if len(c.full) <= most]
    if not allowed:
        raise ValueError(f"max_full must be at least 0, got {max_full}")
    return found, max(allowed, key=lambda c: (c.score, -len(c.full)))


def best_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidate of each pattern, in the order of the patterns, the rows of the paper's Table 5."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        current = best.setdefault(candidate.pattern, candidate)
        if candidate.score > current.score:
            best[candidate.pattern] = candidate
    return list(best.values())


def score_of(task: str, result: SuiteResult) -> float:
    """Return one score for the rows of a suite, higher is better: mean accuracy, mean of the tasks' metrics, or −loss.

    WikiText's perplexity does not enter the mean.

    Raises:
        ValueError: the rows have neither an accuracy nor a loss.
    """
    rows = result["rows"]
    measures = {(name, metric) for name, metric in _METRICS.items() if name != "wikitext"}
    # each of RULER's metrics is the accuracy at one length; their mean is the score
    values = [row["accuracy"] for row in rows if "accuracy" in row] or [
        row["value"] for row in rows if row.get("task") in RULER or (row.get("task"), row.get("metric")) in measures
    ]
    # use only the model's own loss over all positions, not losses over some positions or of the bigram baseline
    values = values or [-row["loss"] for row in rows if (row.get("predictor"), row.get("position")) == ("model", "all")]
    if not values:
        raise ValueError(f"--task {task}: this suite gives no accuracy and no loss to choose by")
    return sum(values) / len(values)


def remembered(
    score: Callable[[Any], float], log: Path, about: dict[str, Any], *, resume: bool
) -> Callable[[Any], float]:
    """Return `score` with a memory: the score of each choice of windows is also saved as a line of JSON in `log`.

    Args:
        log: the file, which is overwritten unless `resume`.
        about: settings on which scores depend besides the windows; only saved scores with equal settings are used.
        resume: whether to use saved scores instead of calling `score` again.
    """
    # convert to JSON and back, because the settings are compared with those read from the file
    about = json.loads(json.dumps(about))
    lines = read_metrics(log) if resume and log.exists() else []
    # rewrite the file without the incomplete last line that a killed process may have left
    write_atomically(log, "".join(json.dumps(line) + "\n" for line in lines))
    known = {tuple(line["windows"]): line["score"] for line in lines if line["about"] == about}

    def of(model: Any) -> float:
        windows = tuple(windows_of(model))
        if windows not in known:
            known[windows] = score(model)
            line = {"windows": windows, "score": known[windows], "about": about}
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return known[windows]

    return of


def result_of(task: str, candidates: Sequence[Candidate], chosen: Candidate, settings: dict[str, Any]) -> SuiteResult:
    """Return the table and the plot of a search in the form of a suite's result."""
    rows = [
        {
            "pattern": c.pattern,
            "position": c.position,
            "full layers": len(c.full),
            "which": ", ".join(map(str, c.full)) if len(c.full) < len(c.windows) else "all",
            task: c.score,
        }
        for c in best_of_each(candidates)
    ]
    plot = plot_of(task, [(c.pattern, len(c.full), c.score) for c in candidates], (len(chosen.full), chosen.score))
    tried = [{"pattern": c.pattern, "position": c.position, "full": c.full, "score": c.score} for c in candidates]
    chosen_row = {"full layers": chosen.full, "score": chosen.score}
    return {
        "suite": "search",
        "settings": {**settings, CHOSEN: json.dumps(chosen_row), "tried": json.dumps(tried)},
        "rows": rows,
        "plots": [plot],
    }


def plot_of(y: str, tried: Sequence[tuple[str, int, float]], chosen: tuple[int, float]) -> Plot:
    """Return a plot of each candidate's score over its number of full layers.

    Args:
        y: label of the axis of scores.
        tried: pattern, number of full layers and score of every candidate.
        chosen: number of full layers and score of the selected candidate.
    """
    best: dict[str, tuple[int, float]] = {}
    for pattern, full, score in tried:
        best[pattern] = max(best.get(pattern, (full, score)), (full, score), key=lambda found: found[1])
    curve = sorted(best.values())
    return {
        "title": "Hybrids of one model by windows at inference",
        "x": "full layers",
        "y": y,
        "series": {
            "best of each pattern": ([float(full) for full, _ in curve], [score for _, score in curve]),
            "all that were tried": ([float(full) for _, full, _ in tried], [score for _, _, score in tried]),
            CHOSEN: ([float(chosen[0])], [chosen[1]]),
        },
        "points": ["all that were tried", CHOSEN],
    }


def command(args: argparse.Namespace, context: Any) -> None:
    """Run the command `tokenmix-nha search`: write table, plot, and a configuration with the selected windows."""
    from tokenmix_core.cli import device_and_dtype, load_model, load_tokenizer

    name, _, tasks = args.task.partition(":")
    check_suites([name], context.suites)
    suite: Suite = context.suites[name]
    names = ("limit", "batch_size", "lengths", "max_length", "text", "vocab_size", "seed")
    chosen_tasks = tuple(part.strip() for part in tasks.split(",") if part.strip()) or None
    options = EvalOptions(**{n: getattr(args, n) for n in names}, tasks=chosen_tasks, progress=False)
    out = args.out or Path(args.checkpoint) / "search"
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder to write results to")
    model = load_model(args.checkpoint, *device_and_dtype(args.device, args.dtype))
    tokenizer = load_tokenizer(args.checkpoint)
    finite = [w for w in windows_of(model) if w != FULL]
    if args.window is None and not finite:
        raise ValueError("--window is needed: all layers of this model are full")
    window = min(finite) if args.window is None else args.window
    layers = len(nha_mixers(model))
    about = {"checkpoint": str(args.checkpoint), "task": args.task, **{n: getattr(args, n) for n in names}}
    candidates, chosen = search_windows(
        model,
        remembered(
            lambda m: score_of(args.task, suite.run(m, tokenizer, options)), out / TRIED, about, resume=args.resume
        ),
        window=window,
        blocks=args.blocks or [block for block in BLOCKS if block <= layers],
        insert=args.insert,
        max_full=args.max_full,
    )
    settings = {"checkpoint": str(args.checkpoint), "window": window, "layers": layers, "seed": args.seed}
    result = result_of(args.task, candidates, chosen, settings)
    print(f"\n{format_rows(result['rows'])}")
    result["provenance"] = provenance(model, tokenizer, options, reads_text=suite.reads_text)
    files = write_result(result, out)
    config = model.config.to_dict() | layers_with_windows(model.config, chosen.windows)
    text = json.dumps(type(model.config).from_dict(config).to_dict(), indent=2, default=str) + "\n"
    # AutoConfig and from_pretrained(..., config=...) can read a folder with config.json
    write_atomically(out / CHOSEN / "config.json", text)
    files.append(out / CHOSEN / "config.json")
    print(f"chosen: full layers {chosen.full or 'none'}, {args.task} {chosen.score:.4g}")
    print(f"written: {', '.join(map(str, files))}")
