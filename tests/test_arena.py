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

from arena import execution, report, rules, runner, store, workers
from arena.__main__ import main
from arena.claims import CLAIMS
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
from arena.scores import EACH, Scores, label, logged_means, pareto_front, samples_by_mode
from arena.sizes import SIZES
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


def test_all_sizes_but_smoke_support_claims():
    assert [size.name for size in SIZES.values() if not size.supports_claims] == ["smoke"]
    for size in SIZES.values():
        assert size.batch_tokens % size.seq_len == size.batch_tokens % size.needle_len == 0


def test_every_suite_of_a_contestant_exists():
    for contestant in CONTESTANTS.values():
        for task in TASKS:
            assert set(suites(contestant, task, SMALL)) <= set(ARENA_SUITES)


def store_result(comparison, run, last_loss=1.0, rows=None, **more):
    """Store a result with chosen loss and rows."""
    about = {"last loss": last_loss, "rows": rows or {}, "rule": fingerprint(run, comparison.size)}
    about |= {"rules": rules.digest(), **more}
    where = {"device": "none", "torch": "0", "triton": "0", "commit": "test"}
    store.add(comparison.folder, {**run._asdict(), **about, "environment": where})


def finish_tuning(comparison, division, task, contestant):
    """Store tuning results whose best rate is the second of the grid; return it."""
    best = sorted(comparison.size.rates)[1]
    for run in comparison.tuning_runs(division, task, contestant):
        store_result(comparison, run, abs(run.rate - best))
    return best


def test_an_ablation_takes_over_the_rate_of_its_base_contestant(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("lalte-mlp",), (MQAR,))
    assert comparison.ready_runs() == comparison.tuning_runs(PARAMETERS, MQAR, "lalte-mlp")
    assert {p.contestant for p in comparison.ready_runs()} == {"lalte"}
    with_its_base = replace(comparison, contestants=("lalte", "lalte-mlp"))
    assert with_its_base.ready_runs() == comparison.ready_runs()
    assert f"0 of {2 * len(SMALL.rates) + 10} runs are done" in report.progress(with_its_base)
    best = finish_tuning(comparison, PARAMETERS, MQAR, "lalte")
    assert {(p.contestant, p.rate, p.seed) for p in comparison.ready_runs()} == {
        ("lalte-mlp", best, seed) for seed in rules.RECALL_SEEDS
    }


def test_contestants_of_sizes_and_claims_exist(tmp_path):
    for size in SIZES.values():
        comparison = Comparison(size, tmp_path)
        names = size.contestants or DEFAULT_CONTESTANTS
        assert set(comparison.contestants) == set(names)
        # an ablation needs the rate of its base contestant
        assert {CONTESTANTS[name].ablates for name in names} <= {None, *names}
    assert not any(CONTESTANTS[name].on_request for name in DEFAULT_CONTESTANTS)
    for claim in CLAIMS.values():
        assert {claim.subject[0], claim.baseline[0]} <= set(CONTESTANTS), claim.name
        assert claim.task in TASKS


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
    scores = {"pairs": 4, EACH: [0.5]}
    found = samples_by_mode({"task": MQAR, "rows": {"mqar": [row | scores for row in rows]}}, SMOKE)
    assert list(found) == ["", *EVICTION_METHODS]
    assert eviction_budgets(run._replace(seed=SMOKE.tuning_seed), SMOKE) == {}
    assert [label(("gdn-attention", mode)) for mode in EVICTION_METHODS] == [
        "GDN, attention, by TOVA",
        "GDN, attention, by Unif.+SWA",
    ]


def test_metrics_that_layers_log_are_shown_over_training(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("nats-l", "gdn"), (MQAR,))
    for name in comparison.contestants:
        finish_tuning(comparison, PARAMETERS, MQAR, name)
        for run in comparison.scored_runs(PARAMETERS, MQAR, name):
            logged = {f"share/{i}": [(1, 0.5), (100, 0.1 * run.seed + i)] for i in range(2)}
            store_result(comparison, run, logged=logged if name == "nats-l" else {})
    found = logged_means(comparison, PARAMETERS, MQAR, "nats-l")
    # means over both layers, then over seeds 1 to 5
    assert found["share"] == pytest.approx({1: 0.5, 100: 0.8})
    assert logged_means(comparison, PARAMETERS, MQAR, "gdn") == {}
    text = report.logged_table(comparison, PARAMETERS, MQAR)
    assert [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]] == ["NAtS-L", "share", "0.5", "0.8"]


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
    best = finish_tuning(here, PARAMETERS, MQAR, "gdn")
    shutil.copytree(here.results, tmp_path / "there")
    there = replace(here, results=tmp_path / "there")
    store_result(there, there.scored_runs(PARAMETERS, MQAR, "gdn")[0])
    left = [(p.contestant, p.rate, p.seed) for p in there.ready_runs()]
    assert [name for name, _, _ in left] == ["attention"] * 2 * len(SMALL.rates) + ["gdn"] * 4
    assert {(rate, seed) for name, rate, seed in left if name == "gdn"} == {
        (best, seed) for seed in rules.RECALL_SEEDS[1:]
    }
    assert len(here.ready_runs()) == len(left) + 1


def test_the_exit_code_reports_the_time_limit_and_invalid_requests(tmp_path, capsys):
    options = ["--results", str(tmp_path), "--work", str(tmp_path / "work"), "--tasks", MQAR, "--contestants", "gdn"]
    assert main(["run", *options, "--minutes", "-1", "--commit", "test"]) == 75
    assert main(["run", *options, "--minutes", "0", "--commit", "test"]) == 75
    assert "runs remain; the next call resumes" in capsys.readouterr().err
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


def test_the_state_division_includes_only_the_linear_mode_of_oryx(tmp_path):
    comparison = Comparison(SMALL, tmp_path, DIVISIONS, ("oryx-tg",), (MQAR,))
    modes = ("linear → linear", "linear → attention", "attention → attention")
    for division in DIVISIONS:
        finish_tuning(comparison, division, MQAR, "oryx-tg")
        for run in comparison.scored_runs(division, MQAR, "oryx-tg"):
            rows = [{"modes": mode, "pairs": 4, EACH: [0.5]} for mode in modes]
            store_result(comparison, run, rows={"cross-mode-mqar": rows})
    lines = {division: [mode for _, mode in Scores(comparison, division, MQAR).variants] for division in DIVISIONS}
    assert lines == {PARAMETERS: ["linear", "linear → attention", "attention"], STATE: ["linear"]}


def test_the_pareto_front_contains_the_undominated_variants():
    points = {("a", ""): (1.0, 0.2), ("b", ""): (2.0, 0.1), ("c", ""): (3.0, 0.5), ("d", ""): (3.0, 0.4)}
    assert pareto_front(points) == [("a", ""), ("c", "")]
    assert pareto_front(points, higher=False) == [("a", ""), ("b", "")]


def test_the_fingerprint_depends_on_the_recipe():
    one = Run(PARAMETERS, "gdn", MQAR, 1e-3, 1)
    assert fingerprint(one, SMALL) == fingerprint(one, SMALL)
    assert len({fingerprint(p, SMALL) for p in (one, one._replace(seed=2), one._replace(rate=2e-3))}) == 3
    assert recipe_of(one, SMALL).optimizer.learning_rate == 1e-3
