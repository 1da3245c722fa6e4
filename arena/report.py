"""The report of one comparison, made from stored results: a page per paper, and an overview with tables and plots."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from arena import rules
from arena.claims import CLAIMS, NOT_RUN, Claim, Verdict, judge
from arena.comparison import Comparison, final_seeds
from arena.contestants import CONTESTANTS, PARAMETERS
from arena.intervals import Estimate, wilson
from arena.models import solve, target_state
from arena.plots import make_plots, scatter
from arena.scores import BEYOND, EXCESS, MEAN, NAMES, NEEDLES, Scores, label, logged_means, measured_costs
from arena.tasks import TASKS
from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.evaluation.report import format_table

REPORT = "report.md"
HEADINGS = {PARAMETERS: "Equal parameters", "state": "Equal parameters and equal state"}
SMOKE = (
    "**Smoke run.** This run only shows that everything works. The models are too small, and were trained too "
    "briefly, to compare mixers."
)
OBJECTIONS = (
    "The models are small and read few tokens. Abilities that appear late in training, or in large models only, are "
    "not observed.",
    "Only the learning rate is tuned; batch, schedule, weight decay and initial weights are equal and may suit some "
    "mixers better. On text, rates are selected in shorter runs.",
    "The width of the MLPs equalises the parameters, so a model with large mixers has narrow MLPs.",
    "Few seeds give wide intervals: an undecided claim is no evidence for equality.",
)
Row = dict[str, Any]
_METRICS = {
    "mean": "mean accuracy",
    NAMES: "accuracy on names in cloze form",
    NEEDLES: "accuracy on needles up to the training length",
    BEYOND: "accuracy on needles at 2x and 4x the training length",
    EXCESS: "excess loss after a switch",
}
# bfloat16 FLOP/s of an H100 at 40 % utilisation, used to estimate the cost of the papers' own runs
_SPEED = 4e14


class Paper(NamedTuple):
    """A paper: its title, parameters and tokens of its own runs, and objections to our test of its claims."""

    title: str
    parameters: float
    tokens: float
    objections: tuple[str, ...]


PAPERS = {
    "GDN": Paper("Gated DeltaNet", 1.3e9, 100e9, ("The paper's hybrids also contain Mamba-2 layers.",)),
    "NHA": Paper(
        "Native Hybrid Attention",
        0.34e9,
        15e9,
        ("The paper has full attention in one layer of eight; hybrids have it in one of four here.",),
    ),
    "Oryx": Paper(
        "Oryx",
        1.4e9,
        100e9,
        ("A model with modes includes weights that a single mode does not use, so its MLPs are narrower.",),
    ),
    "LTE": Paper(
        "Learnable token eviction",
        0.4e9,
        10e9,
        ("The weight of the sparsity loss grows per step, so that short runs end before it settles.",),
    ),
    "NAtS-L": Paper(
        "NAtS-L",
        0.8e9,
        50e9,
        ("The paper's Hybrid has no RoPE and its GDN-H has; RULES.md compares equal positions.",),
    ),
}


def page_name(paper: str) -> str:
    """Return the file name of the page on a paper."""
    return f"{paper.lower().replace('-', '_')}.md"


def plan(comparison: Comparison) -> str:
    """Return, as Markdown, tables of the models and the number of finished runs."""
    tables = [models_table(comparison, division) for division in comparison.divisions]
    return "\n\n".join([*tables, progress(comparison)])


def progress(comparison: Comparison) -> str:
    """Return a sentence with the number of finished runs and of finished cost measurements."""
    experiments, costs = comparison.experiments(), comparison.cost_runs()
    tuning = {run for experiment in experiments for run in comparison.tuning_runs(*experiment)}
    total = len(tuning) + sum(len(final_seeds(experiment.task, comparison.size)) for experiment in experiments)
    known = {*tuning, *(run for experiment in experiments for run in comparison.scored_runs(*experiment))}
    done, measured = (sum(comparison.result(run) is not None for run in runs) for runs in (known, costs))
    return f"{done:,} of {total:,} runs are done, and {measured} of {len(costs)} measurements of costs."


def models_table(comparison: Comparison, division: str) -> str:
    """Return a table of the models in a division, with parameters, MLP width and state."""
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
    """Write overview, papers' pages and plots next to the results; return the path of the overview."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    table = _Judged(comparison)
    for paper in PAPERS:
        write_atomically(comparison.folder / page_name(paper), "\n\n".join(_page(table, paper)) + "\n")
    path = comparison.folder / REPORT
    write_atomically(path, "\n\n".join(_overview(table)) + "\n")
    return path


class _Judged:
    """The verdicts on all claims by the results of one comparison, and the scores on which they are based."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self._scores = comparison, {}
        self.verdicts: dict[str, Verdict] = {}
        for paper in PAPERS:
            claims = [claim for claim in CLAIMS.values() if claim.paper == paper]
            judged = judge(claims, self.scores)
            self.verdicts |= {claim.name: verdict for claim, verdict in zip(claims, judged, strict=True)}

    def scores(self, claim: Claim) -> Scores | None:
        """Return the scores for the task of a claim; None if the comparison's `Size` supports no claims."""
        return self.of(claim.division, claim.task) if self.comparison.size.supports_claims else None

    def of(self, division: str, task: str) -> Scores:
        """Return the scores for a task in a division."""
        if (division, task) not in self._scores:
            self._scores[division, task] = Scores(self.comparison, division, task)
        return self._scores[division, task]


def _rules(comparison: Comparison) -> str:
    text = f"The [rules](../../RULES.md) were fixed in commit {rules.COMMIT}, before the runs."
    if count := comparison.exploratory():
        text += f" {count} older results in `runs.jsonl` are exploratory: they break these rules and are not used."
    return text


def _page(table: _Judged, paper: str) -> list[str]:
    about, size = PAPERS[paper], table.comparison.size
    claims = [claim for claim in CLAIMS.values() if claim.paper == paper]
    parts = [f"# {about.title}: claims at the size {size.name}", _rules(table.comparison), _claims_table(table, claims)]
    if not size.supports_claims:
        parts.insert(1, SMOKE)
    for claim in claims:
        parts += [f"## {claim.name}: {claim.text}", "\n".join(f"- {item}" for item in _items(table, claim))]
    parts += ["## Objections of a reviewer", "\n".join(f"- {text}" for text in (*about.objections, *OBJECTIONS))]
    hours = 6 * about.parameters * about.tokens / _SPEED / 3600
    final = len(rules.TEXT_SEEDS)
    models = len({side[0] for claim in claims for side in (claim.subject, claim.baseline)})
    parts += [
        "## A larger run",
        f"One run of the paper's size ({about.parameters / 1e9:g}B parameters, {about.tokens / 1e9:g}B tokens) takes "
        f"about {hours:,.0f} H100 hours at 40 % utilisation. The {models} models of this page with {final} seeds, and "
        f"{3 * len(rules.TUNING_SEEDS)} tuning runs of a tenth each, take about "
        f"{models * hours * (final + 0.3 * len(rules.TUNING_SEEDS)):,.0f}.",
    ]
    return parts


def _items(table: _Judged, claim: Claim) -> Iterable[str]:
    subject, baseline = label(claim.subject), label(claim.baseline)
    kind = "better by more than" if (claim.bound > 0) == claim.higher else "no worse than by"
    where = "" if claim.division == PARAMETERS else ", at equal state"
    yield f"Paper: {claim.shown}."
    yield (
        f"Test: {_METRICS.get(claim.metric, claim.metric)} of {subject} and {baseline}, models trained on "
        f"{TASKS[claim.task].title.lower()}{where}; holds if {kind} {abs(claim.bound):g}."
    )
    verdict, scores = table.verdicts[claim.name], table.scores(claim)
    if scores is not None:
        for variant in (claim.subject, claim.baseline):
            if (value := scores.estimate(variant, claim.metric)) is not None:
                yield (
                    f"{label(variant)}: {interval(value, claim.higher)}; learned by "
                    f"{fraction(*scores.learned(variant, claim.metric))}; rate {scores.rates[variant[0]]:g}."
                )
    if verdict.difference is not None:
        text = f"Difference: {interval(verdict.difference)} at 95 %"
        if verdict.level:
            low, high = verdict.difference.interval(verdict.level)
            text += f", {_number(low)} to {_number(high)} at Holm's level of {verdict.level:.2g}"
        yield f"{text}; bound {claim.bound:+g}."
    yield f"Verdict: **{verdict.outcome}**."


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "∞" if value > 0 else "−∞"


def interval(value: Estimate, share: bool = False) -> str:
    """Return an estimate as text, with its 95 % interval unless its degrees of freedom are 0.

    With `share`, the interval is cut at 0 and 1.
    """
    low, high = value.interval()
    if share:
        low, high = max(0.0, low), min(1.0, high)
    return f"{value.mean:.3f} ({_number(low)} to {_number(high)})" if value.freedom else f"{value.mean:.3f}"


def fraction(learned: int, runs: int) -> str:
    """Return as text the fraction of runs that have learned, with Wilson's 95 % interval."""
    low, high = wilson(learned, runs)
    return f"{learned} of {runs} ({low:.2f} to {high:.2f})"


def _claims_table(table: _Judged, claims: Iterable[Claim]) -> str:
    rows: list[Row] = []
    for claim in claims:
        verdict = table.verdicts[claim.name]
        rows.append(
            {
                "claim": f"{claim.name}: {claim.text}",
                "verdict": verdict.outcome,
                "difference, 95 % interval": "" if verdict.difference is None else interval(verdict.difference),
                "bound": f"{claim.bound:+g}",
                "baseline learned": fraction(*verdict.learned) if verdict.difference is not None else "",
            }
        )
    return format_table(rows)


def _overview(table: _Judged) -> list[str]:
    comparison, size = table.comparison, table.comparison.size
    parts = [f"# The arena, {size.name}"]
    if not size.supports_claims:
        parts.append(SMOKE)
    run = sum(verdict.outcome != NOT_RUN for verdict in table.verdicts.values())
    pages = ", ".join(f"[{about.title}]({page_name(paper)})" for paper, about in PAPERS.items())
    parts += [
        _settings(comparison),
        _rules(comparison),
        progress(comparison),
        "## Claims",
        f"{run} of {len(CLAIMS)} claims were run. Pages: {pages}.",
        _claims_table(table, CLAIMS.values()),
        "## Limitations",
        "\n".join(f"- {text}" for text in OBJECTIONS),
    ]
    for division in comparison.divisions:
        parts += [f"## {HEADINGS[division]}", models_table(comparison, division)]
        for plot in make_plots(comparison, division):
            image = comparison.folder / f"{division}-{plot.name}.png"
            image.unlink(missing_ok=True)
            if plot.points:
                scatter(plot, image)
                parts.append(f"![{plot.title}]({image.name})")
        for task in comparison.tasks:
            parts += [f"### {TASKS[task].title}", scores_table(table.of(division, task))]
            if logged := logged_table(comparison, division, task):
                parts.append(logged)
        parts += ["### Costs", costs_table(comparison, division)]
    return parts


def _settings(comparison: Comparison) -> str:
    size, environments, commits, hours = comparison.size, set(), set(), 0.0
    every = {
        run: None
        for x in comparison.experiments()
        for run in (*comparison.tuning_runs(*x), *comparison.scored_runs(*x))
    }
    for run in every:
        if (result := comparison.result(run)) is not None:
            made = result["environment"]
            environments.add(f"{made['device']}, torch {made['torch']}, Triton {made['triton']}")
            commits.add(made["commit"])
            if (speed := result.get("tokens per second")) and result.get("loss"):
                hours += result["loss"][-1][0] * size.batch_tokens / speed / 3600
    text = (
        f"Run on {'; '.join(sorted(environments))}; commit {', '.join(sorted(commits))}; {hours:.1f} hours of "
        "training, summed over runs that may have shared a GPU."
        if environments
        else "Nothing was run."
    )
    return (
        f"{size.layers} layers of width {size.width}; {size.steps:,} steps of {size.batch_tokens:,} tokens per run; "
        f"first learning rates {', '.join(f'{rate:g}' for rate in size.rates)}. {text}"
    )


def scores_table(scores: Scores) -> str:
    """Return a task's table, a row per contestant and mode; a second one has excess losses after switches of modes."""
    metrics = list(dict.fromkeys(metric for by_metric in scores.variants.values() for metric in by_metric))
    tables = []
    for excess in (False, True):
        columns = sorted((x for x in metrics if x.startswith(EXCESS) == excess), key=lambda x: x != MEAN)
        rows: list[Row] = []
        for variant in scores.variants:
            estimates = {metric: scores.estimate(variant, metric) for metric in columns}
            if any(estimate is not None for estimate in estimates.values()):
                row: Row = {"contestant": label(variant), "rate": f"{scores.rates[variant[0]]:g}"}
                row |= {metric: _cell(scores, variant, metric, value) for metric, value in estimates.items()}
                if not excess:
                    row["learned"] = fraction(*scores.learned(variant, columns[0]))
                    if steps := scores.steps(variant[0]):
                        row["steps to learn, median"] = median(steps)
                rows.append(row)
        if rows:
            tables.append(format_table(rows))
    return "\n\n".join(tables) or "Not run."


def _cell(scores: Scores, variant: tuple[str, str], metric: str, value: Estimate | None) -> str:
    """Return an estimate as text, with the number of seeds if some are missing or have diverged."""
    if value is None:
        return "–"
    text = interval(value, not metric.startswith(("loss", EXCESS)))
    seeds, all_seeds = len(scores.variants[variant][metric]), len(scores.seeds)
    return text if seeds == all_seeds else f"{text}, {seeds} of {all_seeds} seeds"


def logged_table(comparison: Comparison, division: str, task: str) -> str | None:
    """Return a table of the metrics that layers have logged in training; None if there are none."""
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
    "cache bytes, decoded": "state after decoding, bytes allocated",
}


def costs_table(comparison: Comparison, division: str) -> str:
    """Return a table of speed and memory for one sequence: a row per contestant, mode of Oryx and context length."""
    rows: list[Row] = []
    for variant, by_length in measured_costs(comparison, division).items():
        for length, row in by_length.items():
            values = {column: row[key] for key, column in COST_COLUMNS.items() if key in row}
            rows.append({"contestant": label(variant), "context": length, **values})
    return format_table(rows) if rows else "Not run."
