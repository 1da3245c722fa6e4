"""Tables, pictures and words from the results that are there; what is not there is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arena import measures
from arena.claims import CLAIMS, LEARNT, NOT_MEASURED, judge
from arena.contestants import (
    BOUNDED,
    CONTESTANTS,
    EVICTIONS,
    PARAMETERS,
    solve,
    state_bytes,
    taking_part,
    target_state,
)
from arena.measures import EXCESS, MEAN, Estimate, Line, Scores, decisions, front, title
from arena.pieces import Comparison
from arena.sizes import LEAST_RATES, Size
from arena.tasks import MQAR, TASKS, TEXT
from tokenmix_core.evaluation.report import format_table
from tokenmix_core.extras import require
from tokenmix_core.files import write_atomically

REPORT = "report.md"
# what every report says against itself
OBJECTIONS = """\
- The models are small and read few tokens; what is learnt late, or only by large models, is not seen.
- The rate is the only thing that is chosen. Batch, schedule, decay and initial weights are the same for all, and may
  suit some mixers better; papers that start from other weights or a larger batch are not reproduced here.
- Rates are chosen by the training loss at one seed, on a grid; three seeds give wide intervals.
- Equal parameters are reached by the width of MLPs, so that a heavy mixer has a narrow one, and a model with modes pays
  for weights that a mode does not use. Equal state changes mixers from what their authors chose.
- State is counted as what inference must keep of one sequence. Where data decide, it is the most that can be kept.
- Lengths beyond the training length are read without any change of positions, which is hard on attention.
- Training time is that of forward and backward passes of one sequence at the shortest context of the cost table, with
  the kernels of this workspace on one GPU.
- Where models are narrow a GPU waits for its host: training and prefill times are more the host's than the kernels'.
- Recall and copying are synthetic; the text is one corpus of source code, read as bytes.
"""
# an accuracy from which on a kind of example has been learnt; below `LEARNT` it has not been
FOUND = 0.25
HEADINGS = {PARAMETERS: "Equal parameters", "state": "Equal parameters and equal state"}
SMOKE = (
    "**Smoke run.** These numbers show that everything runs. The models are too small, and were trained for too short "
    "a time, to say anything about a mixer."
)
Row = dict[str, Any]


def plan(comparison: Comparison) -> str:
    """The models of a comparison, and how much of it is done."""
    return "\n\n".join([*(models(comparison, division) for division in comparison.divisions), done(comparison)])


def done(comparison: Comparison) -> str:
    """How many runs and measurements of a comparison are there."""
    runs, costs = comparison.runs(), comparison.costs()
    tuning = {piece for run in runs for piece in comparison.tuning(*run)}
    wanted = len(tuning) + len(runs) * len(comparison.size.seeds)
    pieces = {*tuning, *(piece for run in runs for piece in comparison.counted(*run))}
    there, measured = (sum(comparison.read(piece) is not None for piece in some) for some in (pieces, costs))
    return f"{there:,} of {wanted:,} runs are done, and {measured} of {len(costs)} measurements of costs."


def at_an_end(comparison: Comparison) -> str | None:
    """How many of the chosen rates are the least or the greatest of the grid; None where there is no choice."""
    rates = comparison.size.rates
    # ablations choose none
    runs = [run for run in comparison.runs() if CONTESTANTS[run[2]].ablates is None]
    chosen = [rate for run in runs if (rate := comparison.rate(*run)) is not None]
    if len(rates) < LEAST_RATES or not chosen:
        return None
    least, most = chosen.count(min(rates)), chosen.count(max(rates))
    return (
        f"- Of {len(chosen)} chosen rates {most} are the greatest of the grid and {least} the least: beyond "
        "them nothing was tried."
    )


def at_some_seeds(comparison: Comparison) -> list[str]:
    """For each task whose examples can be counted, who has learnt a kind of them at one seed and not at another."""
    said = []
    for division in comparison.divisions:
        for task in comparison.tasks:
            lines = Scores(comparison, division, task).lines.items()
            divided = [
                title(line)
                for line, columns in lines
                if MEAN in columns
                and any(max(x.values()) >= FOUND and min(x.values()) < LEARNT for x in columns.values())
            ]
            if divided:
                said.append(
                    f"- {TASKS[task].title}, {HEADINGS[division].lower()}: learnt at one seed and not at another by "
                    f"{', '.join(divided)}. How soon it is learnt is luck there, and more steps may change it."
                )
    return said


def models(comparison: Comparison, division: str) -> str:
    """The table of a division's contestants: parameters, state, layers."""
    rows: list[Row] = []
    for name in comparison.entrants(division):
        model = solve(name, division, comparison.size)
        least, most = model.state_bytes
        rows.append(
            {
                "contestant": CONTESTANTS[name].title,
                "parameters": model.parameters,
                "MLP": model.fields["intermediate_size"],
                "state, least KiB": round(least / 1024, 1),
                "state, most KiB": round(most / 1024, 1),
            }
        )
    context = comparison.size.reach * comparison.size.seq_len
    text = f"State of one sequence of {context:,} tokens in bfloat16; parameters without the embedding."
    if division != PARAMETERS:
        text += f" The state to have is {target_state(comparison.size) / 1024:,.1f} KiB."
    return f"{text}\n\n{format_table(rows)}" if rows else "None of these contestants takes part here."


def write(comparison: Comparison) -> Path:
    """Write the report of what is there, with its pictures, beside the results; return its path."""
    folder = comparison.folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT
    write_atomically(path, "\n\n".join(_parts(comparison, folder)) + "\n")
    return path


def _parts(comparison: Comparison, folder: Path) -> list[str]:
    size = comparison.size
    parts = [f"# The arena, {size.name}"]
    if not size.says_something:
        parts.append(SMOKE)
    parts += [_setting(comparison), done(comparison), "## Which claims held", _claims(comparison)]
    objections = [OBJECTIONS.strip(), at_an_end(comparison), *at_some_seeds(comparison)]
    parts += ["## What a reviewer would object to", "\n".join(x for x in objections if x)]
    for division in comparison.divisions:
        heading = HEADINGS[division]
        parts += [f"## {heading}", models(comparison, division)]
        for picture in pictures(comparison, division):
            if picture["points"]:
                image = folder / f"{division}-{picture['name']}.png"
                scatter(picture, image)
                parts.append(f"![{picture['title']}]({image.name})")
        for task in comparison.tasks:
            parts += [f"### {TASKS[task].title}", scores_table(comparison, division, task)]
            if decided := decisions_table(comparison, division, task):
                parts.append(decided)
        parts += ["### Costs", costs_table(comparison, division)]
    missing = [c.title for c in CONTESTANTS.values() if c not in taking_part(PARAMETERS)]
    if missing:
        parts.append(f"Not there, as their mixers are not registered: {', '.join(missing)}.")
    return parts


def _setting(comparison: Comparison) -> str:
    size = comparison.size
    places, commits = set(), set()
    for run in comparison.runs():
        for piece in comparison.counted(*run):
            if (result := comparison.read(piece)) is not None:
                where = result["environment"]
                places.add(f"{where['device']}, torch {where['torch']}, Triton {where['triton']}")
                commits.add(where["commit"])
    where = (
        f"Run on {'; '.join(sorted(places))}; commit {', '.join(sorted(commits))}." if places else "Nothing was run."
    )
    return (
        f"{size.layers} layers of width {size.width}; {size.steps:,} steps of {size.batch_tokens:,} tokens a run; "
        f"rates {', '.join(f'{rate:g}' for rate in size.rates)}, chosen at seed {size.tuning_seed}; results of "
        f"{len(size.seeds)} further seeds, mean ± interval of 95 %. {where}"
    )


def _claims(comparison: Comparison) -> str:
    # what is not looked at, but belongs to the size, is not measured
    whole = Comparison(comparison.size, comparison.results)
    belong = [
        claim
        for claim in CLAIMS
        if {claim.line[0], claim.other[0]} <= set(comparison.contestants)
        and claim.task in whole.tasks
        and claim.division in whole.divisions
    ]
    scores = {(c.division, c.task): Scores(comparison, c.division, c.task) for c in belong}
    rows: list[Row] = []
    for claim in belong:
        found = judge(claim, scores[claim.division, claim.task], comparison.size)
        shown = "" if found.difference is None else str(found.difference)
        rows.append({"paper": claim.paper, "claim": claim.says, "at this size": found.word, "difference": shown})
    measured = sum(row["at this size"] != NOT_MEASURED for row in rows)
    return f"{measured} of {len(rows)} were measured.\n\n{format_table(rows)}"


def scores_table(comparison: Comparison, division: str, task: str) -> str:
    """The results of a task, a line a contestant and mode."""
    scores = Scores(comparison, division, task)
    names = list(dict.fromkeys(column for line in scores.lines.values() for column in line))
    groups = [[name for name in names if name.startswith(EXCESS) == excess] for excess in (False, True)]
    tables = []
    for group in filter(None, groups):
        rows: list[Row] = []
        for line in scores.lines:
            found = {name: scores.estimate(line, name) for name in group}
            if any(value is not None for value in found.values()):
                row: Row = {"contestant": title(line), "rate": f"{scores.rates[line[0]]:g}"}
                rows.append(row | {name: _cell(value, comparison.size) for name, value in found.items()})
        tables.append(format_table(rows))
    return "\n\n".join(tables) or "Not measured."


def _cell(value: Estimate | None, size: Size) -> str:
    """What is known of a number, and of how many seeds where some are missing or diverged."""
    if value is None:
        return "–"
    return str(value) if value.seeds == len(size.seeds) else f"{value} ({value.seeds} of {len(size.seeds)} seeds)"


def decisions_table(comparison: Comparison, division: str, task: str) -> str | None:
    """What layers decided over training, means over layers and seeds; None where no package logged any such thing."""
    rows: list[Row] = []
    for name in comparison.entrants(division):
        for what, found in decisions(comparison, division, task, name).items():
            cells = {f"step {step:,}": f"{value:.3g}" for step, value in found.items()}
            rows.append({"contestant": CONTESTANTS[name].title, "logged": what, **cells})
    if not rows:
        return None
    text = (
        "By step of training, means over layers and seeds (softmax_share: of chunks; kept: keys of a row; lambda: λ):"
    )
    return f"{text}\n\n{format_table(rows)}"


COSTS = {
    "training tokens/s": "training, tokens/s",
    "prefill ms": "prefill, ms",
    "decode ms/token": "decoding, ms a token",
    "cache bytes": "state, bytes",
}


def costs_table(comparison: Comparison, division: str) -> str:
    """Speed and memory of one sequence by context, a line a contestant and mode."""
    rows: list[Row] = []
    for line, found in measures.costs(comparison, division).items():
        for length, row in found.items():
            numbers = {shown: row[key] for key, shown in COSTS.items()}
            rows.append({"contestant": title(line), "context": length, **numbers})
    return format_table(rows) if rows else "Not measured."


def pictures(comparison: Comparison, division: str) -> list[dict[str, Any]]:
    """Draw each contestant as a point of cost and quality."""
    size, measured = comparison.size, measures.costs(comparison, division)
    recall, text = Scores(comparison, division, MQAR), Scores(comparison, division, TEXT)
    near, far = min(size.cost_lengths), max(size.cost_lengths)
    tokens = size.steps * size.batch_tokens

    def points(scores: Scores, column: str, cost: Callable[[Line], float | None]) -> dict[Line, tuple[float, float]]:
        found = {line: (cost(line), scores.estimate(line, column)) for line in scores.lines}
        return {line: (x, y.mean) for line, (x, y) in found.items() if x is not None and y is not None}

    def state(line: Line) -> float | None:
        contestant = CONTESTANTS[line[0]]
        if line[1] in EVICTIONS:
            # not its own: the table says what it holds
            return None
        fields = solve(line[0], division, size).fields
        least, most = state_bytes(contestant, size, fields, size.seq_len)
        return least if line[1] == BOUNDED else most

    def decoding(line: Line) -> float | None:
        # of a switched line, what its last mode takes
        row = measured.get((line[0], line[1].rpartition(" → ")[2]), {}).get(far)
        return None if row is None else row["decode ms/token"]

    def training(line: Line) -> float | None:
        rows = [
            row[near]["training tokens/s"] for (name, _), row in measured.items() if name == line[0] and near in row
        ]
        return tokens / min(rows) if rows else None

    accuracy = f"accuracy, mean over pairs at {size.seq_len} tokens"
    return [
        {
            "name": "recall-state",
            "title": "Recall by size of state",
            "x": f"state after {size.seq_len:,} tokens, at the most (bytes)",
            "y": accuracy,
            "higher": True,
            "points": points(recall, MEAN, state),
        },
        {
            "name": "recall-decoding",
            "title": "Recall by time of decoding",
            "x": f"decoding after {far:,} tokens (ms a token)",
            "y": accuracy,
            "higher": True,
            "points": points(recall, MEAN, decoding),
        },
        {
            "name": "loss-training",
            "title": "Loss by time of training",
            "x": f"{tokens / 1e6:,.0f} million tokens at the speed of forward and backward passes (s)",
            "y": "loss at the training length (nats a byte)",
            "higher": False,
            "points": points(text, "loss at 1x", training),
        },
    ]


def scatter(picture: Mapping[str, Any], path: Path) -> None:
    """Draw named points, and the front of those that no other beats in both.

    Raises:
        ImportError: matplotlib is not installed.
    """
    require("matplotlib", "plots")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: Mapping[Line, tuple[float, float]] = picture["points"]
    best = front(points, higher=picture["higher"])
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.plot(*zip(*(points[line] for line in best), strict=True), color="0.6", linestyle="--", linewidth=1, zorder=1)
    for line, point in points.items():
        axes.plot(*point, marker="o", color="C0" if line in best else "0.5", markersize=5)
    for line, offset in _apart(points).items():
        axes.annotate(title(line), points[line], xytext=(5, offset), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set(title=picture["title"], xlabel=picture["x"], ylabel=picture["y"])
    # names stand to the right of their points, and must not leave the picture
    least, most = min(x for x, _ in points.values()), max(x for x, _ in points.values())
    span = most / least if most > least else 10.0
    axes.set_xlim(least * span**-0.08, most * span**0.45)
    axes.margins(y=0.15)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def _apart(points: Mapping[Line, tuple[float, float]]) -> dict[Line, float]:
    """How far above its point each name stands, so that names of near points do not cover each other."""
    heights = [y for _, y in points.values()]
    scale = 300 / ((max(heights) - min(heights)) or 1.0)
    logs = {line: math.log(x) for line, (x, _) in points.items()}
    reach = 0.25 * ((max(logs.values()) - min(logs.values())) or 1.0)
    placed: dict[Line, float] = {}
    for line in sorted(points, key=lambda line: points[line][1]):
        wanted = points[line][1] * scale
        for other in placed:
            if abs(logs[other] - logs[line]) < reach:
                wanted = max(wanted, points[other][1] * scale + placed[other] + 10)
        placed[line] = wanted - points[line][1] * scale
    return placed
