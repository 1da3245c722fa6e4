"""Rules of the arena: equal parameters and state, one grid of rates, equal rows, separate seeds; runs resume."""

import math
import re
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arena import execution, report, runner, store, workers
from arena.__main__ import main
from arena.claims import CLAIMS, HELD, NOT_HELD, NOT_LEARNT, NOT_MEASURED, UNDECIDED, Claim, Verdict, corrected, judge
from arena.comparison import Comparison, CostRun, Run, eviction_budgets, fingerprint, recipe_of
from arena.contestants import (
    CONTESTANTS,
    DEFAULT_CONTESTANTS,
    DIVISIONS,
    EVICTION_METHODS,
    PARAMETERS,
    STATE,
    eligible,
    training_division,
)
from arena.execution import execute
from arena.models import TOLERANCE, solve, target_parameters, target_state
from arena.scores import Estimate, Scores, chances, label, logged_means, metrics_by_mode, pareto_front
from arena.sizes import MIN_RATES, MIN_SEEDS, SIZES
from arena.tasks import ARENA_SUITES, MQAR, TASKS, recipe, suites
from arena.workers import Terminated
from tokenmix_core.data.tokenizer import load_tokenizer
from tokenmix_core.nn.registry import known_mixers
from tokenmix_core.training.trainer import training_rows

ROOT = Path(__file__).parent.parent
SMOKE, SMALL = SIZES["smoke"], SIZES["small"]
# registered only as parts of baselines or for conversions
EXCLUDED = {"gated_slot_attention", "gla", "normed_attention", "tova"}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("division", DIVISIONS)
def test_models_of_a_division_have_equal_parameters_and_in_the_state_division_equal_state(size, division):
    models = {contestant.name: solve(contestant.name, division, size) for contestant in eligible(division)}
    for name, model in models.items():
        assert abs(model.parameters / target_parameters(size) - 1) <= TOLERANCE[PARAMETERS], name
        if division == STATE:
            assert abs(model.state_bytes[0] / target_state(size) - 1) <= TOLERANCE[STATE], name
    assert {"attention", "nats-l", "gdn-h"}.isdisjoint(models) == (division == STATE)


def test_every_mixer_of_the_workspace_takes_part():
    used = set()
    for contestant in eligible(PARAMETERS):
        fields = recipe(contestant.name, PARAMETERS, MQAR, SMOKE, 1e-3, 1).model_config()
        used |= {fields.mixer_type(i) for i in range(fields.num_hidden_layers)}
    assert used == set(known_mixers()) - EXCLUDED


@pytest.mark.parametrize("task", TASKS)
def test_contestants_read_the_same_rows_in_the_same_order_with_the_same_schedule(task):
    recipes = {
        (c.name, seed): recipe(c.name, PARAMETERS, task, SMOKE, 1e-3, seed)
        for c in eligible(PARAMETERS)
        for seed in (1, 2)
    }
    for (name, seed), made in recipes.items():
        reference = recipes["attention", seed]
        for part in ("data", "optimizer", "run"):
            assert asdict(getattr(made, part)) == asdict(getattr(reference, part)), name
        shared = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range")
        assert {key: made.model[key] for key in shared} == {key: reference.model[key] for key in shared}, name
    if task == MQAR:
        tokenizer = load_tokenizer("bytes")
        rows = {
            key: training_rows(recipes[key], tokenizer)[0] for key in (("attention", 1), ("oryx-tg", 1), ("gdn", 2))
        }
        first = [rows[key][3]["input_ids"] for key in rows]
        assert torch.equal(first[0], first[1])
        assert not torch.equal(first[0], first[2])


def test_sizes_that_support_claims_have_enough_rates_and_seeds():
    assert [size.name for size in SIZES.values() if not size.supports_claims] == ["smoke"]
    for size in SIZES.values():
        assert size.tuning_seed not in size.seeds
        assert size.supports_claims == (len(set(size.rates)) >= MIN_RATES and len(set(size.seeds)) >= MIN_SEEDS)
        assert size.batch_tokens % size.seq_len == size.batch_tokens % size.needle_len == 0


def test_every_suite_of_a_contestant_exists():
    for contestant in CONTESTANTS.values():
        for task in TASKS:
            assert set(suites(contestant, task, SMALL)) <= set(ARENA_SUITES)


def store_result(comparison, run, last_loss=1.0, rows=None, **more):
    """Store a result with chosen loss and rows."""
    about = {"last loss": last_loss, "rows": rows or {}, "rule": fingerprint(run, comparison.size), **more}
    where = {"device": "none", "torch": "0", "triton": "0", "commit": "test"}
    store.add(comparison.folder, {**run._asdict(), **about, "environment": where})


def recalled(accuracy):
    return {"mqar": [{"pairs": pairs, "accuracy": accuracy} for pairs in (4, 8)]}


def test_rates_are_chosen_by_the_end_of_training_and_only_then_seeds_are_run(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "attention"), (MQAR,))
    ready = comparison.ready_runs()
    assert {(p.contestant, p.rate, p.seed) for p in ready} == {
        (name, rate, SMALL.tuning_seed) for name in ("gdn", "attention") for rate in SMALL.rates
    }
    losses = dict(zip(SMALL.rates, (0.5, None, 0.2, 0.3), strict=True))
    for run in comparison.tuning_runs(PARAMETERS, MQAR, "gdn")[:-1]:
        store_result(comparison, run, losses[run.rate])
    assert comparison.selected_rate(PARAMETERS, MQAR, "gdn") is None
    store_result(comparison, comparison.tuning_runs(PARAMETERS, MQAR, "gdn")[-1], losses[SMALL.rates[-1]])
    assert comparison.selected_rate(PARAMETERS, MQAR, "gdn") == SMALL.rates[2]
    waiting = [p for p in comparison.ready_runs() if p.contestant == "gdn"]
    assert [(p.rate, p.seed) for p in waiting] == [(SMALL.rates[2], seed) for seed in SMALL.seeds]
    for run in comparison.tuning_runs(PARAMETERS, MQAR, "attention"):
        store_result(comparison, run, None)
    # all runs diverged: the smallest rate is selected
    assert comparison.selected_rate(PARAMETERS, MQAR, "attention") == SMALL.rates[0]


def test_an_ablation_takes_over_the_rate_of_its_base_contestant(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("lalte-mlp",), (MQAR,))
    assert comparison.ready_runs() == comparison.tuning_runs(PARAMETERS, MQAR, "lalte-mlp")
    assert {p.contestant for p in comparison.ready_runs()} == {"lalte"}
    with_its_base = replace(comparison, contestants=("lalte", "lalte-mlp"))
    assert with_its_base.ready_runs() == comparison.ready_runs()
    assert f"0 of {len(SMALL.rates) + 6} runs are done" in report.progress(with_its_base)
    for run in comparison.tuning_runs(PARAMETERS, MQAR, "lalte"):
        # losses fall with the rate
        store_result(comparison, run, 1 - run.rate)
    assert {(p.contestant, p.rate, p.seed) for p in comparison.ready_runs()} == {
        ("lalte-mlp", SMALL.rates[-1], seed) for seed in SMALL.seeds
    }
    # the ablation does not count as a second selection
    assert "was selected in 1 of 1 experiments, the lowest in 0." in (report.rates_at_the_ends(with_its_base) or "")


def test_contestants_of_sizes_and_claims_exist(tmp_path):
    for size in SIZES.values():
        comparison = Comparison(size, tmp_path)
        names = size.contestants or DEFAULT_CONTESTANTS
        assert set(comparison.contestants) == set(names)
        # an ablation needs the rate of its base contestant
        assert {CONTESTANTS[name].ablates for name in names} <= {None, *names}
    assert not any(CONTESTANTS[name].on_request for name in DEFAULT_CONTESTANTS)
    medium = Comparison(SIZES["medium"], tmp_path)
    for claim in CLAIMS:
        sides = {claim.variant[0], claim.baseline[0]}
        assert sides <= set(DEFAULT_CONTESTANTS) or sides <= set(medium.contestants), claim.text


def test_trained_attention_is_evaluated_again_under_each_eviction_method(tmp_path, monkeypatch):
    run = Run(PARAMETERS, "gdn-attention", MQAR, SMOKE.rates[0], SMOKE.seeds[0])
    held, asked = SMOKE.seq_len // 4, []

    def evict(model, method, *, held):
        asked.append((method, held))
        return method

    monkeypatch.setattr(execution, "in_constant_memory", evict)
    monkeypatch.setattr(execution, "load_model", lambda _: "")
    monkeypatch.setattr(execution, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(execution, "evaluate", lambda model, *_, **__: {"mqar": {"rows": [{"pairs": 4, "of": model}]}})
    rows = execution._evaluate(run, SMOKE, tmp_path)["mqar"]
    assert asked == [(method, held) for method in EVICTION_METHODS]
    assert [row["of"] for row in rows] == ["", *EVICTION_METHODS] == [row.get("modes", "") for row in rows]
    assert len(execution._evaluate(run._replace(task="text"), SMOKE, tmp_path)["mqar"]) == 1
    scores = {"accuracy": 0.5}
    found = metrics_by_mode({"task": MQAR, "rows": {"mqar": [row | scores for row in rows]}}, SMOKE)
    assert list(found) == ["", *EVICTION_METHODS]
    assert eviction_budgets(run._replace(seed=SMOKE.tuning_seed), SMOKE) == {}
    assert [label(("gdn-attention", mode)) for mode in EVICTION_METHODS] == [
        "GDN, attention, by TOVA",
        "GDN, attention, by Unif.+SWA",
    ]


def test_metrics_that_layers_log_are_shown_over_training(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("nats-l", "gdn"), (MQAR,))
    for name in comparison.contestants:
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            logged = {f"share/{i}": [(1, 0.5), (100, 0.1 * run.seed + i)] for i in range(2)}
            store_result(comparison, run, logged=logged if name == "nats-l" else {})
    found = logged_means(comparison, PARAMETERS, MQAR, "nats-l")
    # means over both layers, then over seeds 1, 2 and 3
    assert found["share"] == pytest.approx({1: 0.5, 100: 0.7})
    assert logged_means(comparison, PARAMETERS, MQAR, "gdn") == {}
    text = report.logged_table(comparison, PARAMETERS, MQAR)
    assert [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]] == ["NAtS-L", "share", "0.5", "0.7"]


def test_a_result_made_with_other_settings_is_refused_with_its_line(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    run = comparison.ready_runs()[0]
    store_result(comparison, run)
    path = comparison.folder / store.RUNS
    path.write_text(path.read_text().replace(fingerprint(run, SMALL), "other"))
    with pytest.raises(ValueError, match=re.escape(f"{path}:1 was made under another rule")):
        comparison.ready_runs()
    with pytest.raises(ValueError, match="no contestant 'gnd'"):
        Comparison(SMALL, tmp_path, contestants=("gnd",))


def test_a_run_stops_at_the_deadline_resumes_and_is_skipped_once_done(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    comparison = Comparison(SMOKE, tmp_path / "results", (PARAMETERS,), ("nats-l",), (MQAR,))
    work = tmp_path / "work"
    tuned = Run(PARAMETERS, "nats-l", MQAR, SMOKE.rates[0], SMOKE.tuning_seed)
    store_result(comparison, tuned)
    (run,) = comparison.ready_runs()
    assert run.seed in SMOKE.seeds
    assert not execute(run, comparison, work, deadline=time.time(), commit="test")
    checkpoints = list(work.rglob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-1"]
    logged = []
    assert runner.run(comparison, work, commit="test", deadline=math.inf, log=logged.append).done
    assert logged == [f"parameters nats-l mqar {SMOKE.rates[0]:g} 1: done"]
    result = comparison.result(run)
    assert result["environment"]["commit"] == "test"
    assert [step for step, _ in result["loss"]] == list(range(1, SMOKE.steps + 1))
    assert {name.partition("/")[0] for name in result["logged"]} == {"softmax_share"}
    assert all([step for step, _ in points] == list(range(1, SMOKE.steps + 1)) for points in result["logged"].values())
    assert {row["pairs"] for row in result["rows"]["mqar"]} == {4, 8, 16, 32}
    assert not list(work.rglob("config.json"))
    assert runner.run(comparison, work, commit="test", deadline=math.inf, log=logged.append).done
    assert len(logged) == 1
    assert report.SMOKE in report.write(comparison).read_text()


def test_a_damaged_result_is_refused_with_its_line(tmp_path, capsys):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    run = comparison.ready_runs()[0]
    store_result(comparison, run)
    path = comparison.folder / store.RUNS
    whole = path.read_text()
    for content in (whole[:40], "[]", "{}", "<<<<<<< main"):
        path.write_text(f"{whole}{content}\n")
        assert main(["report", "--size", "small", "--results", str(tmp_path)]) == 2
        printed = capsys.readouterr().err
        assert f"{path}:2 " in printed
        assert "damaged" in printed


def test_a_model_trained_with_other_settings_is_not_evaluated(tmp_path, monkeypatch):
    trained, run = [], Run(PARAMETERS, "attention", MQAR, SMOKE.rates[0], SMOKE.seeds[0])

    def train(about, folder, **_):
        trained.append(about.optimizer.steps)
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(execution.trainer, "train", train)
    monkeypatch.setattr(execution, "_evaluate", lambda *_: {})
    monkeypatch.setattr(execution, "_training_log", lambda *_: {"last loss": 1.0})
    longer = replace(SMOKE, steps=SMOKE.steps + 1)
    for size in (SMOKE, longer):
        # the deadline passes during training
        monkeypatch.setattr(execution.time, "time", lambda: 1.0)
        assert not execute(run, Comparison(size, tmp_path), tmp_path / "work", deadline=0.0, commit="test")
    assert trained == [SMOKE.steps, longer.steps]
    assert execute(run, Comparison(longer, tmp_path), tmp_path / "work", deadline=math.inf, commit="test")
    assert trained == [SMOKE.steps, longer.steps]


def test_an_error_in_one_run_sets_the_exit_code_and_the_others_continue(tmp_path, monkeypatch, capsys):
    def run_one(run, comparison, *_, **__):
        if run.contestant == "gdn":
            raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
        store_result(comparison, run)
        return True

    monkeypatch.setattr(runner, "execute", run_one)
    options = ["--results", str(tmp_path), "--tasks", MQAR, "--contestants", "gdn,gsa", "--divisions", PARAMETERS]
    assert main(["run", *options, "--commit", "test"]) == 1
    printed = capsys.readouterr()
    assert "parameters gdn mqar 0.003 0: failed, RuntimeError: CUDA error: an illegal memory access was" in printed.out
    assert "parameters gsa mqar 0.003 1: done" in printed.out
    assert "arena: 1 failed" in printed.err


def test_a_model_that_is_the_same_in_both_divisions_is_run_once(tmp_path):
    both = Comparison(SMALL, tmp_path, DIVISIONS, ("oryx-tm", "mamba2"), (MQAR,))
    assert both.experiments() == [
        (PARAMETERS, MQAR, "mamba2"),
        (PARAMETERS, MQAR, "oryx-tm"),
        (STATE, MQAR, "mamba2"),
    ]
    assert both.scored_runs(STATE, MQAR, "oryx-tm") == both.scored_runs(PARAMETERS, MQAR, "oryx-tm")
    assert both.cost_runs(STATE)[-2:] == [
        CostRun(STATE, "mamba2", SMALL.cost_lengths[-1]),
        CostRun(PARAMETERS, "oryx-tm", SMALL.cost_lengths[-1]),
    ]
    for contestant in eligible(STATE):
        same = solve(contestant.name, STATE, SMALL).fields == solve(contestant.name, PARAMETERS, SMALL).fields
        assert (training_division(contestant.name, STATE, SMALL) == PARAMETERS) == same


def test_runs_whose_results_were_copied_from_elsewhere_are_skipped(tmp_path):
    here = Comparison(SMALL, tmp_path / "here", (PARAMETERS,), ("gdn", "attention"), (MQAR,))
    for run in here.tuning_runs(PARAMETERS, MQAR, "gdn"):
        store_result(here, run, run.rate)
    shutil.copytree(here.results, tmp_path / "there")
    there = replace(here, results=tmp_path / "there")
    store_result(there, there.scored_runs(PARAMETERS, MQAR, "gdn")[0])
    left = [(p.contestant, p.rate, p.seed) for p in there.ready_runs()]
    assert [name for name, _, _ in left] == ["attention"] * len(SMALL.rates) + ["gdn"] * (len(SMALL.seeds) - 1)
    assert {(rate, seed) for name, rate, seed in left if name == "gdn"} == {
        (SMALL.rates[0], seed) for seed in SMALL.seeds[1:]
    }
    assert len(here.ready_runs()) == len(left) + 1


def test_the_exit_code_reports_the_time_limit_and_invalid_requests(tmp_path, capsys):
    options = ["--results", str(tmp_path), "--work", str(tmp_path / "work"), "--tasks", MQAR, "--contestants", "gdn"]
    assert main(["run", *options, "--minutes", "-1", "--commit", "test"]) == 75
    assert main(["run", *options, "--minutes", "0", "--commit", "test"]) == 75
    assert main(["plan", *options]) == 0
    assert "0 of 4 runs are done" in capsys.readouterr().out
    assert main(["plan", "--size", "huge"]) == 2
    assert "there is no size 'huge'" in capsys.readouterr().err
    assert main(["plan", *options, "--contestants", "attention", "--divisions", "state"]) == 2
    assert "none of attention takes part in the division state" in capsys.readouterr().err
    assert main(["plan", *options, "--contestants", "attention,attention", "--tasks", "mqar,mqar"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 2 runs are done" in printed
    assert "None of these contestants takes part here." in printed
    (tmp_path / "file").touch()
    assert main(["report", *options, "--results", str(tmp_path / "file")]) == 2
    assert "arena: " in capsys.readouterr().err


def test_the_command_ends_within_its_minutes_and_after_a_signal(tmp_path, monkeypatch, capsys):
    deadlines = []

    def run_jobs(ready, call, crew, deadline, log):
        deadlines.append(deadline)
        raise Terminated

    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    start = time.time()
    options = ["--results", str(tmp_path), "--tasks", MQAR, "--contestants", "gdn", "--commit", "test"]
    assert main(["run", *options, "--minutes", "2"]) == 128 + signal.SIGTERM
    assert "arena: stopped; the next call resumes" in capsys.readouterr().err
    # jobs that still run are killed `GRACE` seconds after the deadline
    assert deadlines[0] + workers.GRACE == pytest.approx(start + 120, abs=20)
    assert deadlines[0] + workers.GRACE <= time.time() + 120


def test_a_signal_during_training_ends_the_command(tmp_path, monkeypatch):
    run = Run(PARAMETERS, "attention", MQAR, SMOKE.rates[0], SMOKE.seeds[0])
    monkeypatch.setattr(execution.trainer, "train", lambda *_, **__: SimpleNamespace(interrupted=True))
    comparison = Comparison(SMOKE, tmp_path)
    with pytest.raises(Terminated):
        execute(run, comparison, tmp_path / "work", deadline=math.inf, commit="test")
    assert not execute(run, comparison, tmp_path / "work", deadline=time.time(), commit="test")


def test_the_help_lists_all_sizes(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"{', '.join(SIZES)} (default: smoke)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("task", [MQAR, "copying"])
def test_a_guess_among_the_values_in_the_context_has_not_learnt(task):
    for size in SIZES.values():
        chance = chances(task, size)
        rows = [
            {"pairs": int(metric.split()[0]), "accuracy": value}
            for metric, value in chance.items()
            if "pairs" in metric
        ]
        if task != MQAR:
            rows = [
                {"task": metric.split(",")[0], "tokens": int(metric.split()[1]), "accuracy": value}
                for metric, value in chance.items()
                if "," in metric
            ]
        # the same metrics as those of a result
        assert metrics_by_mode({"task": task, "rows": {task: rows}}, size)[""] == pytest.approx(chance)
    assert chances(MQAR, SIZES["compact"])["mean"] == pytest.approx(0.082, abs=5e-4)
    assert chances(MQAR, SMALL)["mean"] == pytest.approx(0.071, abs=5e-4)
    assert chances("niah", SMALL) == chances("text", SMALL) == {}


def test_claims_without_results_are_not_measured(tmp_path):
    comparison = Comparison(SMALL, tmp_path)
    text = report.write(comparison).read_text()
    assert "Nothing was run." in text
    assert "0 of " in text
    assert not list(tmp_path.rglob("*.png"))
    assert all(word not in text for word in ("| held ", "| did not hold ", "| not decided "))


def test_the_report_lists_tasks_that_were_learnt_at_some_seeds_only(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "attention"), (MQAR,))
    for name in ("gdn", "attention"):
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run, run.rate)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            learnt = name == "gdn" or run.seed == SMALL.seeds[0]
            store_result(comparison, run, rows=recalled(0.9 if learnt else 0.0))
    lines = report.write(comparison).read_text().splitlines()
    (item,) = (line for line in lines if "learnt at one seed" in line)
    assert "learnt at one seed but not at another by Attention. " in item


def test_the_report_gives_a_verdict_on_each_claim(tmp_path):
    names = ("gdn", "gdn-h", "nha-h", "gsa-h", "attention")
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), names, (MQAR,))
    accuracy = {"gdn": 0.2, "gdn-h": 0.9, "nha-h": 0.5, "gsa-h": 0.1, "attention": 0.55}
    for name in names:
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run, run.rate)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            noise = 0.2 * (run.seed - 2) if name == "attention" else 0.01 * run.seed
            store_result(comparison, run, rows=recalled(accuracy[name] + noise))
    for name in names:
        run = CostRun(PARAMETERS, name, max(SMALL.cost_lengths))
        row = {
            "mode": "",
            "training tokens/s": 1.0,
            "prefill ms": 1.0,
            "decode ms/token": 2.0,
            "cache bytes, decoded": 3,
        }
        store_result(comparison, run, rows=[row])
    text = report.write(comparison).read_text()
    # losses rise with the rate
    assert f"was selected in 0 of {len(names)} experiments, the lowest in {len(names)}." in text
    verdicts = {
        line.split("|")[2].strip(): line.split("|")[3].strip() for line in text.splitlines() if line.count("|") == 5
    }
    assert verdicts["GDN with attention in one layer of four recalls more than GDN (pairs)"] == HELD
    assert verdicts["NHA-H recalls more than GDN-H (pairs)"] == NOT_HELD
    assert verdicts["NHA-H recalls more than attention (pairs)"] == UNDECIDED
    assert verdicts["NHA-H recalls more than GDN-H (needles)"] == NOT_MEASURED
    assert {path.name for path in tmp_path.rglob("*.png")} == {
        "parameters-recall-state.png",
        "parameters-recall-decoding.png",
    }


def test_the_state_division_includes_only_the_linear_mode_of_oryx(tmp_path):
    comparison = Comparison(SMALL, tmp_path, DIVISIONS, ("oryx-tg",), (MQAR,))
    modes = ("linear → linear", "linear → attention", "attention → attention")
    for division in DIVISIONS:
        for run in comparison.tuning_runs(division, MQAR, "oryx-tg"):
            store_result(comparison, run)
        for run in comparison.scored_runs(division, MQAR, "oryx-tg"):
            rows = [{"modes": mode, "pairs": 4, "accuracy": 0.5} for mode in modes]
            store_result(comparison, run, rows={"cross-mode-mqar": rows})
    lines = {division: [mode for _, mode in Scores(comparison, division, MQAR).variants] for division in DIVISIONS}
    assert lines == {PARAMETERS: ["linear", "linear → attention", "attention"], STATE: ["linear"]}


def test_a_margin_tolerates_a_deficit_and_a_smoke_run_decides_nothing(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, accuracy in (("gdn", 0.9), ("gdn-h", 0.89)):
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run, rows=recalled(accuracy))
    scores = Scores(comparison, PARAMETERS, MQAR)
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""))
    assert judge(claim, scores, SMALL).outcome == NOT_HELD
    assert judge(claim._replace(margin=0.02), scores, SMALL).outcome == HELD
    assert judge(claim._replace(higher=False), scores, SMALL).outcome == HELD
    assert judge(claim, scores, SMOKE).outcome == NOT_MEASURED


@pytest.mark.parametrize("last", [{}, {"accuracy": math.nan}, {"accuracy": math.inf}], ids=["diverged", "nan", "inf"])
def test_missing_seeds_are_counted_and_decide_nothing(tmp_path, last):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, accuracy in (("gdn", 0.1), ("gdn-h", 0.9)):
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            rows = recalled(accuracy)
            if name == "gdn-h" and run.seed == SMALL.seeds[-1]:
                rows = {"mqar": [row | last for row in rows["mqar"]]} if last else {}
            store_result(comparison, run, rows=rows)
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""))
    assert judge(claim, Scores(comparison, PARAMETERS, MQAR), SMALL).outcome == NOT_MEASURED
    table = report.scores_table(comparison, PARAMETERS, MQAR)
    assert "0.900 ± 0.000 (2 of 3 seeds)" in table
    assert table.count("seeds)") == 3


def test_a_difference_equal_to_the_margin_is_not_decided(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, accuracy in (("gdn", 0.9), ("gdn-h", 0.88)):
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run, rows=recalled(accuracy))
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""), 0.02)
    assert judge(claim, Scores(comparison, PARAMETERS, MQAR), SMALL).outcome == UNDECIDED


@pytest.mark.parametrize(("accuracy", "word"), [(0.0, NOT_LEARNT), (0.08, NOT_LEARNT), (0.2, NOT_HELD)])
def test_a_task_that_neither_side_has_learnt_decides_nothing(tmp_path, accuracy, word):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, recall in (("gdn", accuracy), ("gdn-h", 0.0)):
        for run in comparison.tuning_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            store_result(comparison, run, rows=recalled(recall))
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""))
    assert judge(claim, Scores(comparison, PARAMETERS, MQAR), SMALL).outcome == word
    unlearnt = word == NOT_LEARNT
    assert (judge(claim._replace(margin=0.3), Scores(comparison, PARAMETERS, MQAR), SMALL).outcome != HELD) == unlearnt


def test_verdicts_survive_only_with_holms_correction_for_all_questions():
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""), 0.1)
    # t = 40, 35, 31 and 4.4 beyond the margin; with two degrees of freedom .05 / 53 needs 32.5, .05 / 52 32.2
    margins = [4.303 / t for t in (40, 35, 31, 4.4)]
    verdicts = [Verdict(HELD, Estimate(0.9, half_width, 3)) for half_width in margins]
    verdicts.append(Verdict(NOT_MEASURED, None))
    claims = [claim] * len(verdicts)
    assert [v.outcome for v in corrected(claims, verdicts)] == [HELD, HELD, UNDECIDED, UNDECIDED, NOT_MEASURED]
    assert Estimate(3.0, 3.182, 4).p_value(3.0) == 1
    for seeds in (2, 3, 4, 5, 6, 7):
        # an interval of 95 % that ends at 0
        assert Estimate(1.0, 1.0, seeds).p_value(0.0) == pytest.approx(0.05, abs=1e-4)


def test_text_and_needles_from_before_the_corrected_evaluation_are_withdrawn(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn",), ("niah",))
    for run in comparison.tuning_runs(PARAMETERS, "niah", "gdn"):
        store_result(comparison, run)
    for run in comparison.scored_runs(PARAMETERS, "niah", "gdn"):
        new = {"corpus": {}} if run.seed == SMALL.seeds[0] else {}
        store_result(comparison, run, rows={"niah": [{"task": "s-niah-1", "accuracy": 0.5}]}, **new)
    scores = Scores(comparison, PARAMETERS, "niah")
    assert scores.withdrawn == len(SMALL.seeds) - 1
    assert scores.variants["gdn", ""]["mean"] == {SMALL.seeds[0]: 0.5}
    assert report.WITHDRAWN in report.scores_table(comparison, PARAMETERS, "niah")


def test_intervals_use_students_t():
    assert Estimate.of([1.0, 2.0, 3.0]) == Estimate(2.0, pytest.approx(4.303 / 3**0.5), 3)
    assert str(Estimate.of([0.25])) == "0.250"
    with pytest.raises(ValueError, match="at least one"):
        Estimate.of([])


def test_the_pareto_front_contains_the_undominated_variants():
    points = {("a", ""): (1.0, 0.2), ("b", ""): (2.0, 0.1), ("c", ""): (3.0, 0.5), ("d", ""): (3.0, 0.4)}
    assert pareto_front(points) == [("a", ""), ("c", "")]
    assert pareto_front(points, higher=False) == [("a", ""), ("b", "")]


def test_the_fingerprint_depends_on_the_recipe():
    one = Run(PARAMETERS, "gdn", MQAR, 1e-3, 1)
    assert fingerprint(one, SMALL) == fingerprint(one, SMALL)
    assert len({fingerprint(p, SMALL) for p in (one, one._replace(seed=2), one._replace(rate=2e-3))}) == 3
    assert recipe_of(one, SMALL).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize("name", ["compact", "medium", "needles"])
def test_committed_reports_follow_from_the_committed_results(name, tmp_path):
    committed = ROOT / "arena" / "results" / name
    shutil.copytree(committed, tmp_path / name)
    written = report.write(Comparison(SIZES[name], tmp_path)).read_text(encoding="utf-8")
    assert written == (committed / "report.md").read_text(encoding="utf-8")
