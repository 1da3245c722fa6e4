"""The arena's rules: the page quotes the code, runs follow the page, and verdicts follow from the results alone."""

import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arena import report, rules, store
from arena.claims import CLAIMS, HOLDS, NOT_COUNTED, NOT_HOLDS, NOT_RUN, UNDECIDED, judge
from arena.comparison import Comparison, CostRun, fingerprint, recipe_of
from arena.contestants import PARAMETERS
from arena.intervals import Estimate, difference, estimate, holm, student_p, student_quantile, wilson
from arena.models import TOLERANCE
from arena.scores import EACH, Scores, has_learned, steps_to_learn
from arena.sizes import SIZES
from arena.tasks import MQAR, TEXT

ROOT = Path(__file__).parent.parent
PAGE = " ".join(rules.PAGE.read_text(encoding="utf-8").split())
COMPACT = SIZES["compact"]


def test_the_page_quotes_the_constants_of_the_code():
    quoted = (
        f"{rules.ACCURACY_EFFECT} of accuracy and {rules.LOSS_EFFECT} nats matter",
        f"Parameters within {100 * rules.PARAMETER_TOLERANCE:g} %",
        f"state within {100 * rules.STATE_TOLERANCE:g} %",
        f"One grid, factor {rules.RATE_FACTOR:g}",
        f"tuning seeds {rules.TUNING_SEEDS[0]} and {rules.TUNING_SEEDS[1]}",
        f"with {rules.TEXT_TUNING} of the tokens",
        f"from {rules.LOWEST_RATE} to {rules.HIGHEST_RATE}",
        f"{rules.RECALL_SEEDS[0]} to {rules.RECALL_SEEDS[-1]} for recall and copying",
        f"{rules.TEXT_SEEDS[0]} to {rules.TEXT_SEEDS[-1]} for text",
        f"{rules.REPLICATES:,} replicates, generator seed {rules.GENERATOR_SEED}",
        f"level of {rules.LEVEL}",
        f"at least {rules.LEARNED} of the way from a guess",
        f"names {rules.NAMES_LEARNED} of the way",
        f"at most {rules.TEXT_LEARNED} · ln(vocabulary)",
        f"at least {rules.LEARNED_RUNS} of the baseline's final runs learned",
    )
    for sentence in quoted:
        assert sentence in PAGE, sentence
    assert TOLERANCE == {"parameters": rules.PARAMETER_TOLERANCE, "state": rules.STATE_TOLERANCE}


def test_the_named_commit_is_that_of_the_page():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    shallow = git("rev-parse", "--is-shallow-repository").stdout.strip() != "false"
    if shallow or git("cat-file", "-e", f"{rules.COMMIT}^{{commit}}").returncode:
        pytest.skip("the history does not hold the commit")
    assert git("log", "-1", "--format=%H", "--", "arena/RULES.md").stdout.startswith(rules.COMMIT)


def test_final_seeds_are_enough_and_none_of_them_tunes():
    assert len(set(rules.TUNING_SEEDS)) >= 2
    assert len(set(rules.RECALL_SEEDS)) >= 5
    assert len(set(rules.TEXT_SEEDS)) >= 3
    assert not {*rules.RECALL_SEEDS, *rules.TEXT_SEEDS} & set(rules.TUNING_SEEDS)


def keep(comparison, run, last_loss=0.1, rows=None, **more):
    """Store a result with a chosen loss and rows."""
    about = {"last loss": last_loss, "rows": rows or {}, "rule": fingerprint(run, comparison.size)}
    where = {"device": "none", "torch": "0", "triton": "0", "commit": "test"}
    about |= {"rules": rules.digest(), "environment": where, "loss": [[1, 6.0], [50, 1.0]], "tokens per second": 1e5}
    store.add(comparison.folder, {**run._asdict(), **about, **more})


def tune(comparison, name, task=MQAR, best=2e-3):
    """Store tuning runs, as they are asked for, whose loss is least at a rate."""
    asked = set()
    while runs := [run for run in comparison.tuning_runs(PARAMETERS, task, name) if comparison.result(run) is None]:
        asked |= {(run.rate, run.seed) for run in runs}
        for run in runs:
            keep(comparison, run, abs(math.log(run.rate / best)) + 0.1)
    return asked


def recall(accuracies):
    """Return rows of associative recall whose examples have these accuracies, equal for both sizes."""
    return {"mqar": [{"pairs": n, "chance": 1 / n, EACH: list(accuracies)} for n in (4, 8)]}


def results(tmp_path, **accuracies):
    """Store recall results of contestants, one mean accuracy per final seed; return the comparison."""
    names = tuple(name.replace("_", "-") for name in accuracies)
    comparison = Comparison(COMPACT, tmp_path, (PARAMETERS,), names, (MQAR,))
    examples = np.random.default_rng(0).uniform(-0.05, 0.05, 32)
    for name, values in zip(names, accuracies.values(), strict=True):
        tune(comparison, name)
        for run, value in zip(comparison.scored_runs(PARAMETERS, MQAR, name), values, strict=True):
            keep(comparison, run, rows=recall(np.clip(value + examples, 0, 1).tolist()))
    return comparison


def outcome(comparison, name="NHA-7"):
    scores = Scores(comparison, PARAMETERS, MQAR)
    (verdict,) = judge([CLAIMS[name]], lambda claim: scores)
    return verdict


def test_rates_are_extended_until_the_best_is_inside_the_grid_then_the_seeds_are_run(tmp_path):
    comparison = Comparison(COMPACT, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    first = {(rate, seed) for rate in COMPACT.rates for seed in rules.TUNING_SEEDS}
    assert {(run.rate, run.seed) for run in comparison.ready_runs()} == first
    # the best rate is beyond the upper end of the grid
    asked = tune(comparison, "gdn", best=1.6e-2)
    assert asked - first == {(rate, seed) for rate in (8e-3, 1.6e-2, 3.2e-2) for seed in rules.TUNING_SEEDS}
    assert [(run.rate, run.seed) for run in comparison.ready_runs()] == [(1.6e-2, s) for s in rules.RECALL_SEEDS]


def test_a_rate_is_selected_by_the_mean_of_the_tuning_seeds_and_divergence_counts(tmp_path):
    comparison = Comparison(COMPACT, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    losses = {1e-3: (0.5, 0.5), 2e-3: (0.3, 0.5), 4e-3: (0.1, None)}
    for run in comparison.tuning_runs(PARAMETERS, MQAR, "gdn"):
        assert comparison.selected_rate(PARAMETERS, MQAR, "gdn") is None
        keep(comparison, run, losses[run.rate][rules.TUNING_SEEDS.index(run.seed)])
    assert comparison.selected_rate(PARAMETERS, MQAR, "gdn") == 2e-3


def test_a_rate_that_stays_at_an_end_is_not_used(tmp_path):
    comparison = Comparison(COMPACT, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    tune(comparison, "gdn", best=1.0)
    assert comparison.ready_runs() == comparison.scored_runs(PARAMETERS, MQAR, "gdn") == []
    assert comparison.selected_rate(PARAMETERS, MQAR, "gdn") is None
    assert max(run.rate for run in comparison.tuning_runs(PARAMETERS, MQAR, "gdn")) <= rules.HIGHEST_RATE


def test_tuning_runs_on_text_are_shorter():
    comparison = Comparison(COMPACT, Path("none"), (PARAMETERS,), ("gdn",), (TEXT,))
    run = comparison.tuning_runs(PARAMETERS, TEXT, "gdn")[0]
    final = run._replace(seed=rules.TEXT_SEEDS[0])
    assert recipe_of(run, COMPACT).optimizer.steps == rules.TEXT_TUNING * recipe_of(final, COMPACT).optimizer.steps


def test_results_of_other_rules_are_exploratory_and_run_again(tmp_path):
    comparison = Comparison(COMPACT, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    run = comparison.ready_runs()[0]
    for more in ({"rules": "other"}, {"rules": None}):
        keep(comparison, run, **more)
        assert comparison.result(run) is None
        assert comparison.exploratory() == 1
        assert "1 older results in `runs.jsonl` are exploratory" in report._rules(comparison)
    assert comparison.ready_runs()[0] == run


def test_a_known_effect_holds_and_its_opposite_does_not(tmp_path):
    comparison = results(tmp_path, nha_h=(0.9, 0.91, 0.9, 0.89, 0.9), gdn_h=(0.7, 0.71, 0.7, 0.69, 0.7))
    assert outcome(comparison).outcome == HOLDS
    comparison = results(tmp_path / "b", nha_h=(0.7, 0.71, 0.7, 0.69, 0.7), gdn_h=(0.9, 0.91, 0.9, 0.89, 0.9))
    assert outcome(comparison).outcome == NOT_HOLDS


def test_a_null_effect_with_noise_is_undecided(tmp_path):
    comparison = results(tmp_path, nha_h=(0.9, 0.7, 0.8, 0.95, 0.75), gdn_h=(0.85, 0.7, 0.9, 0.7, 0.9))
    verdict = outcome(comparison)
    assert verdict.outcome == UNDECIDED
    low, high = verdict.difference.interval()
    assert low < 0 < high


def test_a_baseline_that_did_not_learn_is_not_counted(tmp_path):
    comparison = results(tmp_path, nha_h=(0.9,) * 5, gdn_h=(0.9, 0.3, 0.9, 0.3, 0.9))
    assert outcome(comparison) == (NOT_COUNTED, outcome(comparison).difference, rules.LEVEL, (3, 5))
    assert outcome(results(tmp_path / "b", nha_h=(0.99,) * 5, gdn_h=(0.9, 0.3, 0.9, 0.9, 0.9))).learned == (4, 5)


@pytest.mark.parametrize("values", [(0.9,) * 4, (0.9, 0.9, 0.9, 0.9, math.nan)], ids=["missing", "nan"])
def test_a_missing_seed_means_not_run(tmp_path, values):
    comparison = results(tmp_path, nha_h=(0.9,) * 5, gdn_h=(0.7,) * 5)
    run = comparison.scored_runs(PARAMETERS, MQAR, "gdn-h")[-1]
    keep(comparison, run, None if len(values) == 4 else 0.1, rows=recall([math.nan]) if len(values) == 5 else {})
    assert outcome(comparison).outcome == NOT_RUN
    assert judge([CLAIMS["NHA-7"]], lambda claim: None)[0].outcome == NOT_RUN


def test_a_guess_among_the_shown_values_has_not_learned():
    def result(accuracy, **more):
        rows = [{"pairs": n, "chance": 1 / n, EACH: [accuracy(n)]} for n in (4, 8, 128)]
        return {"task": MQAR, "last loss": 1.0, "rows": {"mqar": rows}, **more}

    assert not has_learned(result(lambda n: 1 / n + 0.1), "", "mean", COMPACT)
    assert has_learned(result(lambda n: 0.7 if n == 4 else 0.1), "", "mean", COMPACT)
    assert not has_learned(result(lambda n: 1.0, **{"last loss": None}), "", "mean", COMPACT)
    rows = {"perplexity-by-position": [], "niah": [{"task": "s-niah-1", "length": 1024, EACH: [1.0, 0.0]}]}
    text = {"task": TEXT, "last loss": 2.0, "rows": rows}
    assert has_learned(text, "", "needles", COMPACT)
    assert not has_learned(text | {"last loss": 4.0}, "", "needles", COMPACT)
    # half of ln(128) is 2.43
    assert steps_to_learn(result(lambda n: 1.0, loss=[[1, 6.0], [2, 2.0], [3, 3.0], [4, 2.0], [5, 0.1]])) == 4
    assert steps_to_learn(result(lambda n: 1.0, loss=[[1, 6.0], [2, 2.0], [3, 3.0]])) is None


def test_intervals_cover_seeds_and_examples():
    by_seed = [{"": [0.1 * i] * 40} for i in range(5)]
    examples = np.random.default_rng(1).normal(0, 1, 400)
    by_example = [{"": examples.tolist()}] * 5
    assert estimate(by_seed).error == pytest.approx(np.std([0, 0.1, 0.2, 0.3, 0.4], ddof=1) / 5**0.5, rel=0.05)
    assert estimate(by_example).error == pytest.approx(examples.std(ddof=1) / 20, rel=0.05)
    both = [{"": (examples + 0.1 * i).tolist()} for i in range(5)]
    assert estimate(both).error == pytest.approx((estimate(by_seed).error ** 2 + examples.var() / 400) ** 0.5, rel=0.05)
    # shared examples cancel, and the seeds of each side differ
    assert difference(both, by_example).error == pytest.approx(estimate(by_seed).error, rel=0.05)
    assert difference(both, by_example).mean == pytest.approx(0.2)
    assert difference(both, by_example).freedom == 4
    assert difference(both, both).freedom == 8
    assert difference(both, both).error == pytest.approx(2**0.5 * estimate(by_seed).error, rel=0.05)
    same = [{"": [0.1, 0.5, 0.9]}] * 3
    assert difference(same, same) == Estimate(0.0, 0.0, 4)
    with pytest.raises(ValueError, match="the same test examples"):
        difference(same, by_seed[:3])
    assert estimate(same[:1]).interval() == (-math.inf, math.inf)


def test_student_wilson_and_holm_are_those_of_the_tables():
    for freedom, quantile in ((1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (8, 2.306)):
        assert student_quantile(0.05, freedom) == pytest.approx(quantile, abs=1e-3)
        assert student_p(quantile, freedom) == pytest.approx(0.05, abs=1e-4)
    assert wilson(5, 5) == pytest.approx((0.5655, 1.0), abs=1e-3)
    assert wilson(2, 5) == pytest.approx((0.1176, 0.7693), abs=1e-3)
    # the third is kept, so the fourth is not tested
    assert holm([0.001, 0.04, 0.03, 0.01]) == pytest.approx([0.05 / 4, 0.0, 0.05 / 2, 0.05 / 3])
    assert holm([]) == []


def recomputed(page, comparison):
    """Return each claim's verdict from the lines of the JSONL file alone."""
    lines = [json.loads(line) for line in (comparison.folder / store.RUNS).read_text().splitlines()]
    lines = [x for x in lines if x.get("task") == MQAR and x["seed"] in rules.RECALL_SEEDS]
    found = {}
    for claim in (claim for claim in CLAIMS.values() if claim.paper == page and claim.task == MQAR):
        sides = [[x for x in lines if x["contestant"] == side[0]] for side in (claim.subject, claim.baseline)]
        if any(len(side) < 5 for side in sides) or claim.division != PARAMETERS:
            continue
        means = [[np.mean([np.mean(row[EACH]) for row in x["rows"]["mqar"]]) for x in side] for side in sides]
        learned = [np.mean(x["rows"]["mqar"][0][EACH]) >= 0.625 for x in sides[1]]
        distance = np.mean(means[0]) - np.mean(means[1]) - claim.bound
        # seeds differ more than examples here, so that Welch's test is near
        error = math.sqrt(sum(np.var(side, ddof=1) / 5 for side in means))
        found[claim.name] = NOT_COUNTED if np.mean(learned) < 0.8 else distance / error
    return found


def test_the_report_follows_from_the_results_byte_for_byte(tmp_path):
    comparison = results(
        tmp_path,
        nha_h=(0.9, 0.93, 0.9, 0.87, 0.9),
        gdn_h=(0.7, 0.73, 0.7, 0.67, 0.7),
        gdn=(0.7, 0.73, 0.7, 0.67, 0.7),
        nats_l=(0.7, 0.74, 0.71, 0.67, 0.7),
        lalte=(0.9,) * 5,
        gdn_swa=(0.2,) * 5,
    )
    run = CostRun(PARAMETERS, "gdn", max(COMPACT.cost_lengths))
    row = {"mode": "", "training tokens/s": 1.0, "prefill ms": 1.0, "decode ms/token": 2.0, "cache bytes, decoded": 3}
    keep(comparison, run, rows=[row])
    text = report.write(comparison).read_text(encoding="utf-8")
    pages = {path.name: path.read_bytes() for path in comparison.folder.glob("*.md")}
    assert set(pages) == {"report.md", "gdn.md", "nha.md", "oryx.md", "lte.md", "nats_l.md"}
    assert report.write(comparison).read_text(encoding="utf-8") == text
    assert {path.name: path.read_bytes() for path in comparison.folder.glob("*.md")} == pages
    table = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    verdicts = {cells[1].partition(":")[0].strip(): cells[2].strip() for cells in table}
    assert verdicts["NHA-7"] == HOLDS
    assert verdicts["NAtS-L-9"] == UNDECIDED
    assert verdicts["LTE-8"] == NOT_COUNTED
    assert verdicts["NHA-1"] == NOT_RUN
    nha = pages["nha.md"].decode()
    assert rules.COMMIT in nha
    assert "Verdict: **holds**" in nha
    assert "learned by 5 of 5 (0.57 to 1.00)" in nha
    for page in report.PAPERS:
        for name, value in recomputed(page, comparison).items():
            expected = value if value == NOT_COUNTED else HOLDS if value > 4 else UNDECIDED
            assert verdicts[name] == expected, name
    assert {path.name for path in tmp_path.rglob("*.png")} == {
        "parameters-recall-state.png",
        "parameters-recall-decoding.png",
    }


def test_committed_reports_follow_from_the_committed_results(tmp_path):
    for name in sorted(path.name for path in (ROOT / "arena" / "results").iterdir() if (path / "report.md").is_file()):
        committed = ROOT / "arena" / "results" / name
        shutil.copytree(committed, tmp_path / name)
        report.write(Comparison(SIZES[name], tmp_path))
        for page in committed.glob("*.md"):
            assert (tmp_path / name / page.name).read_bytes() == page.read_bytes(), page


def test_a_smoke_run_gives_no_verdict(tmp_path):
    comparison = replace(Comparison(SIZES["smoke"], tmp_path), contestants=("gdn",), tasks=(MQAR,))
    report.write(comparison)
    text = (comparison.folder / "gdn.md").read_text()
    assert report.SMOKE in text
    assert text.count(f"Verdict: **{NOT_RUN}**") == sum(claim.paper == "GDN" for claim in CLAIMS.values())
