"""The report of a comparison: tables, plots and verdicts from the stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arena.claims import CLAIMS, LEARNT_MARGIN, NOT_MEASURED, QUESTIONS, corrected, judge
from arena.comparison import Comparison
from arena.contestants import CONTESTANTS, PARAMETERS
from arena.models import solve, target_state
from arena.plots import make_plots, scatter
from arena.scores import EXCESS, MEAN, Estimate, Scores, chances, label, logged_means, measured_costs
from arena.sizes import MIN_RATES, Size
from arena.tasks import TASKS
from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.evaluation.report import format_table

REPORT = "report.md"
LIMITATIONS = """\
- The models are small and read few tokens. Abilities that appear late in training, or in large models only, are not
  observed.
- Only the learning rate is tuned. Batch size, schedule, weight decay and initial weights are equal for all contestants
  and may suit some mixers better. Papers that use other initial weights or a larger batch are not reproduced.
- The learning rate is selected from a grid by the training loss at one seed. Three seeds give wide intervals.
- The width of the MLPs equalises the parameters, so a model with large mixers has narrow MLPs, and a model with modes
  includes weights that a single mode does not use. Equal state changes the configuration that the authors proposed.
- State is the memory that inference must keep per sequence. If the data decide how many tokens are retained, plots show
  the maximum.
- Texts beyond the training length are read without any change to the positional encoding, which harms attention.
- Training time is the time of forward and backward passes on one sequence at the shortest context of the cost table,
  with the kernels of this workspace on one GPU.
- Narrow models are bound by CPU launch overhead: their training and prefill times measure the host more than kernels.
- Recall and copying are synthetic. The text is one corpus of source code, read as bytes.
"""
# accuracy above the chance from which on a kind of example counts as learnt; below `LEARNT_MARGIN` it is not learnt
CLEARLY_LEARNT_MARGIN = 0.25
HEADINGS = {PARAMETERS: "Equal parameters", "state": "Equal parameters and equal state"}
SMOKE = (
    "**Smoke run.** This run only shows that everything works. The models are too small, and were trained too "
    "briefly, to compare mixers."
)
WITHDRAWN = (
    "Withdrawn: earlier results, whose needles were not spread evenly, or whose held-out text stood in part in the "
    "training text. They remain in `runs.jsonl`, and runs with the corrected evaluation will replace them."
)
Row = dict[str, Any]


def plan(comparison: Comparison) -> str:
    """Return the tables of the models and the number of finished runs."""
    tables = [models_table(comparison, division) for division in comparison.divisions]
    return "\n\n".join([*tables, progress(comparison)])


def progress(comparison: Comparison) -> str:
    """Return the number of finished runs and cost measurements, as a sentence."""
    experiments, costs = comparison.experiments(), comparison.cost_runs()
    tuning = {run for experiment in experiments for run in comparison.tuning_runs(*experiment)}
    total = len(tuning) + len(experiments) * len(comparison.size.seeds)
    known = {*tuning, *(run for experiment in experiments for run in comparison.scored_runs(*experiment))}
    done, measured = (sum(comparison.result(run) is not None for run in runs) for runs in (known, costs))
    return f"{done:,} of {total:,} runs are done, and {measured} of {len(costs)} measurements of costs."


def rates_at_the_ends(comparison: Comparison) -> str | None:
    """Count the selected rates at the ends of the grid; None if the grid is too small or no rate is selected."""
    rates = comparison.size.rates
    # ablations take over a rate
    experiments = [x for x in comparison.experiments() if CONTESTANTS[x.contestant].ablates is None]
    selected = [rate for x in experiments if (rate := comparison.selected_rate(*x)) is not None]
    if len(rates) < MIN_RATES or not selected:
        return None
    lowest, highest = selected.count(min(rates)), selected.count(max(rates))
    return (
        f"- The highest learning rate of the grid was selected in {highest} of {len(selected)} experiments, the lowest "
        f"in {lowest}. Rates beyond the grid were not tried."
    )


def learnt_at_some_seeds(comparison: Comparison) -> list[str]:
    """List, per task with accuracies, the variants that learnt some kind of example at one seed but not at another."""
    items = []
    for division in comparison.divisions:
        for task in comparison.tasks:
            chance = chances(task, comparison.size)

            def divided_seeds(metric: str, values: dict[int, float], chance: dict[str, float] = chance) -> bool:
                above = [value - chance.get(metric, 0.0) for value in values.values()]
                return max(above) >= CLEARLY_LEARNT_MARGIN and min(above) < LEARNT_MARGIN

            divided = [
                label(variant)
                for variant, metrics in Scores(comparison, division, task).variants.items()
                if MEAN in metrics and any(divided_seeds(*item) for item in metrics.items())
            ]
            if divided:
                items.append(
                    f"- {TASKS[task].title}, {HEADINGS[division].lower()}: learnt at one seed but not at another by "
                    f"{'; '.join(divided)}. The outcome depends on the seed; more steps may change it."
                )
    return items


def models_table(comparison: Comparison, division: str) -> str:
    """Return the table of a division's models: parameters, MLP width and state."""
    rows: list[Row] = []
    for name in comparison.contestants_in(division):
        model = solve(name, division, comparison.size)
        least, most = model.state_bytes
        rows.append(
            {
                "contestant": CONTESTANTS[name].title,
                "parameters": model.parameters,
                "MLP width": model.fields["intermediate_size"],
                "minimum state, KiB": round(least / 1024, 1),
                "maximum state, KiB": round(most / 1024, 1),
            }
        )
    context = comparison.size.eval_length_factor * comparison.size.seq_len
    text = f"State of one sequence of {context:,} tokens in bfloat16; parameters without the embedding."
    if division != PARAMETERS:
        text += f" The target state is {target_state(comparison.size) / 1024:,.1f} KiB."
    return f"{text}\n\n{format_table(rows)}" if rows else "None of these contestants takes part here."


def write(comparison: Comparison) -> Path:
    """Write the report and its plots beside the results; return the report's path."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    path = comparison.folder / REPORT
    write_atomically(path, "\n\n".join(_parts(comparison)) + "\n")
    return path


def _parts(comparison: Comparison) -> list[str]:
    size = comparison.size
    parts = [f"# The arena, {size.name}"]
    if not size.supports_claims:
        parts.append(SMOKE)
    parts += [_settings(comparison), progress(comparison), "## Which claims held", _claims_table(comparison)]
    limitations = [LIMITATIONS.strip(), rates_at_the_ends(comparison), *learnt_at_some_seeds(comparison)]
    parts += ["## Limitations", "\n".join(item for item in limitations if item)]
    for division in comparison.divisions:
        parts += [f"## {HEADINGS[division]}", models_table(comparison, division)]
        for plot in make_plots(comparison, division):
            if plot.points:
                image = comparison.folder / f"{division}-{plot.name}.png"
                scatter(plot, image)
                parts.append(f"![{plot.title}]({image.name})")
        for task in comparison.tasks:
            parts += [f"### {TASKS[task].title}", scores_table(comparison, division, task)]
            if logged := logged_table(comparison, division, task):
                parts.append(logged)
        parts += ["### Costs", costs_table(comparison, division)]
    return parts


def _settings(comparison: Comparison) -> str:
    size = comparison.size
    environments, commits = set(), set()
    for experiment in comparison.experiments():
        for run in comparison.scored_runs(*experiment):
            if (result := comparison.result(run)) is not None:
                made = result["environment"]
                environments.add(f"{made['device']}, torch {made['torch']}, Triton {made['triton']}")
                commits.add(made["commit"])
    text = (
        f"Run on {'; '.join(sorted(environments))}; commit {', '.join(sorted(commits))}."
        if environments
        else "Nothing was run."
    )
    return (
        f"{size.layers} layers of width {size.width}; {size.steps:,} steps of {size.batch_tokens:,} tokens per run; "
        f"learning rates {', '.join(f'{rate:g}' for rate in size.rates)}, selected at seed {size.tuning_seed}; results "
        f"of {len(size.seeds)} further seeds, mean ± 95 % confidence interval. {text}"
    )


def _claims_table(comparison: Comparison) -> str:
    # a claim of the size counts as not measured if only its task or division is not selected
    whole = Comparison(comparison.size, comparison.results)
    claims = [
        claim
        for claim in CLAIMS
        if {claim.variant[0], claim.baseline[0]} <= set(comparison.contestants)
        and claim.task in whole.tasks
        and claim.division in whole.divisions
    ]
    scores = {(c.division, c.task): Scores(comparison, c.division, c.task) for c in claims}
    verdicts = [judge(claim, scores[claim.division, claim.task], comparison.size) for claim in claims]
    rows: list[Row] = []
    for claim, verdict in zip(claims, corrected(claims, verdicts), strict=True):
        difference = "" if verdict.difference is None else str(verdict.difference)
        rows.append(
            {"paper": claim.paper, "claim": claim.text, "at this size": verdict.outcome, "difference": difference}
        )
    measured = sum(row["at this size"] != NOT_MEASURED for row in rows)
    text = (
        f"{measured} of {len(rows)} were measured. The verdicts account for the {QUESTIONS} questions of all sizes "
        "(Holm's correction); the intervals of 95 % do not."
    )
    return f"{text}\n\n{format_table(rows)}"


def scores_table(comparison: Comparison, division: str, task: str) -> str:
    """Return the table of a task, one row per variant; excess losses of mode switches form a second table."""
    scores = Scores(comparison, division, task)
    metrics = list(dict.fromkeys(metric for by_metric in scores.variants.values() for metric in by_metric))
    tables = []
    for excess in (False, True):
        columns = [metric for metric in metrics if metric.startswith(EXCESS) == excess]
        rows: list[Row] = []
        for variant in scores.variants:
            estimates = {metric: scores.estimate(variant, metric) for metric in columns}
            if any(estimate is not None for estimate in estimates.values()):
                row: Row = {"contestant": label(variant), "rate": f"{scores.rates[variant[0]]:g}"}
                rows.append(row | {metric: _cell(value, comparison.size) for metric, value in estimates.items()})
        if rows:
            tables.append(format_table(rows))
    if scores.withdrawn:
        tables.append(WITHDRAWN)
    return "\n\n".join(tables) or "Not measured."


def _cell(value: Estimate | None, size: Size) -> str:
    """Format an estimate, with the number of seeds if some are missing or diverged."""
    if value is None:
        return "–"
    return str(value) if value.seeds == len(size.seeds) else f"{value} ({value.seeds} of {len(size.seeds)} seeds)"


def logged_table(comparison: Comparison, division: str, task: str) -> str | None:
    """Return the table of metrics that layers logged during training, or None without any."""
    rows: list[Row] = []
    for name in comparison.contestants_in(division):
        for metric, series in logged_means(comparison, division, task, name).items():
            cells = {f"step {step:,}": f"{value:.3g}" for step, value in series.items()}
            rows.append({"contestant": CONTESTANTS[name].title, "logged": metric, **cells})
    if not rows:
        return None
    text = (
        "Logged during training, means over layers and seeds (`softmax_share`: fraction of softmax chunks; `kept`: "
        "retained keys per row; `lambda`: weight λ of the sparsity loss):"
    )
    return f"{text}\n\n{format_table(rows)}"


COST_COLUMNS = {
    "training tokens/s": "training, tokens/s",
    "prefill ms": "prefill, ms",
    "decode ms/token": "decoding, ms/token",
    # older results have no such value, and their "cache bytes" omit spare capacity
    "cache bytes, decoded": "state after decoding, bytes allocated",
}


def costs_table(comparison: Comparison, division: str) -> str:
    """Return the table of speed and memory for one sequence, one row per variant and context length."""
    rows: list[Row] = []
    for variant, by_length in measured_costs(comparison, division).items():
        for length, row in by_length.items():
            values = {column: row[key] for key, column in COST_COLUMNS.items() if key in row}
            rows.append({"contestant": label(variant), "context": length, **values})
    return format_table(rows) if rows else "Not measured."
