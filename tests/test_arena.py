"""The arena's rule: equal parameters, equal state, one grid, the same rows, seeds of their own; pieces resume."""

import math
import re
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arena import pieces, report, runner, store
from arena.__main__ import main
from arena.claims import CLAIMS, HELD, NOT_HELD, NOT_LEARNT, NOT_MEASURED, OPEN, Claim, judge
from arena.contestants import (
    CONTESTANTS,
    DIVISIONS,
    EVERYBODY,
    EVICTIONS,
    PARAMETERS,
    STATE,
    TOLERANCE,
    _target_parameters,
    run_in,
    solve,
    taking_part,
    target_state,
)
from arena.measures import Estimate, Scores, columns, decisions, front, title
from arena.pieces import Comparison, CostPiece, Piece, fingerprint, recipe_of, run_piece
from arena.sizes import LEAST_RATES, LEAST_SEEDS, SIZES
from arena.tasks import ARENA_SUITES, MQAR, TASKS, recipe, suites
from tokenmix_core.corpora.tokenizer import load_tokenizer
from tokenmix_core.nn.registry import known_mixers
from tokenmix_core.training.trainer import training_rows

ROOT = Path(__file__).parent.parent
SMOKE, SMALL = SIZES["smoke"], SIZES["small"]
# registered, but of another's baselines or for conversions
LEFT_OUT = {"gated_slot_attention", "gla", "normed_attention", "tova"}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("division", DIVISIONS)
def test_all_of_a_division_have_equal_parameters_and_where_asked_equal_state(size, division):
    models = {contestant.name: solve(contestant.name, division, size) for contestant in taking_part(division)}
    for name, model in models.items():
        assert abs(model.parameters / _target_parameters(size) - 1) <= TOLERANCE[PARAMETERS], name
        if division == STATE:
            assert abs(model.state_bytes[0] / target_state(size) - 1) <= TOLERANCE[STATE], name
    assert {"attention", "nats-l", "gdn-h"}.isdisjoint(models) == (division == STATE)


def test_every_mixer_of_the_workspace_takes_part():
    used = set()
    for contestant in taking_part(PARAMETERS):
        fields = recipe(contestant.name, PARAMETERS, MQAR, SMOKE, 1e-3, 1).model_config()
        used |= {fields.mixer_type(i) for i in range(fields.num_hidden_layers)}
    assert used == set(known_mixers()) - LEFT_OUT


@pytest.mark.parametrize("task", TASKS)
def test_everybody_reads_the_same_rows_in_the_same_order_with_the_same_schedule(task):
    recipes = {
        (c.name, seed): recipe(c.name, PARAMETERS, task, SMOKE, 1e-3, seed)
        for c in taking_part(PARAMETERS)
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


def test_sizes_that_say_something_have_rates_to_choose_from_and_seeds_for_an_interval():
    assert [size.name for size in SIZES.values() if not size.says_something] == ["smoke"]
    for size in SIZES.values():
        assert size.tuning_seed not in size.seeds
        assert size.says_something == (len(set(size.rates)) >= LEAST_RATES and len(set(size.seeds)) >= LEAST_SEEDS)
        assert size.batch_tokens % size.seq_len == size.batch_tokens % size.needle_len == 0


def test_every_suite_that_measures_somebody_exists():
    for contestant in CONTESTANTS.values():
        for task in TASKS:
            assert set(suites(contestant, task, SMALL)) <= set(ARENA_SUITES)


def record(comparison, piece, last_loss=1.0, rows=None, **more):
    """Write a result that says what a test wants it to say."""
    about = {"last loss": last_loss, "rows": rows or {}, "rule": fingerprint(piece, comparison.size), **more}
    where = {"device": "none", "torch": "0", "triton": "0", "commit": "test"}
    store.add(comparison.folder, {**piece._asdict(), **about, "environment": where})


def recalled(accuracy):
    return {"mqar": [{"pairs": pairs, "accuracy": accuracy} for pairs in (4, 8)]}


def test_rates_are_chosen_by_the_end_of_training_and_only_then_seeds_are_run(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "attention"), (MQAR,))
    ready = comparison.ready()
    assert {(p.contestant, p.rate, p.seed) for p in ready} == {
        (name, rate, SMALL.tuning_seed) for name in ("gdn", "attention") for rate in SMALL.rates
    }
    losses = dict(zip(SMALL.rates, (0.5, None, 0.2, 0.3), strict=True))
    for piece in comparison.tuning(PARAMETERS, MQAR, "gdn")[:-1]:
        record(comparison, piece, losses[piece.rate])
    assert comparison.rate(PARAMETERS, MQAR, "gdn") is None
    record(comparison, comparison.tuning(PARAMETERS, MQAR, "gdn")[-1], losses[SMALL.rates[-1]])
    assert comparison.rate(PARAMETERS, MQAR, "gdn") == SMALL.rates[2]
    waiting = [p for p in comparison.ready() if p.contestant == "gdn"]
    assert [(p.rate, p.seed) for p in waiting] == [(SMALL.rates[2], seed) for seed in SMALL.seeds]
    for piece in comparison.tuning(PARAMETERS, MQAR, "attention"):
        record(comparison, piece, None)
    # where all diverged the smallest stands
    assert comparison.rate(PARAMETERS, MQAR, "attention") == SMALL.rates[0]


def test_an_ablation_takes_the_rate_of_what_it_ablates(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("lalte-mlp",), (MQAR,))
    assert comparison.ready() == comparison.tuning(PARAMETERS, MQAR, "lalte-mlp")
    assert {p.contestant for p in comparison.ready()} == {"lalte"}
    with_its_base = replace(comparison, contestants=("lalte", "lalte-mlp"))
    assert with_its_base.ready() == comparison.ready()
    assert f"0 of {len(SMALL.rates) + 6} runs are done" in report.done(with_its_base)
    for piece in comparison.tuning(PARAMETERS, MQAR, "lalte"):
        # losses fall with the rate
        record(comparison, piece, 1 - piece.rate)
    assert {(p.contestant, p.rate, p.seed) for p in comparison.ready()} == {
        ("lalte-mlp", SMALL.rates[-1], seed) for seed in SMALL.seeds
    }
    # one rate was chosen, not two
    assert "Of 1 chosen rates 1 are the greatest" in (report.at_an_end(with_its_base) or "")


def test_what_belongs_to_a_size_and_to_a_claim_is_there(tmp_path):
    for size in SIZES.values():
        comparison = Comparison(size, tmp_path)
        names = size.contestants or EVERYBODY
        assert set(comparison.contestants) == set(names)
        # the seeds of an ablation wait for the rate of another
        assert {CONTESTANTS[name].ablates for name in names} <= {None, *names}
    assert not any(CONTESTANTS[name].extra for name in EVERYBODY)
    medium = Comparison(SIZES["medium"], tmp_path)
    for claim in CLAIMS:
        sides = {claim.line[0], claim.other[0]}
        assert sides <= set(EVERYBODY) or sides <= set(medium.contestants), claim.says


def test_trained_attention_is_measured_once_more_where_it_evicts(tmp_path, monkeypatch):
    piece = Piece(PARAMETERS, "gdn-attention", MQAR, SMOKE.rates[0], SMOKE.seeds[0])
    held, asked = SMOKE.seq_len // 4, []

    def evict(model, method, *, held):
        asked.append((method, held))
        return method

    monkeypatch.setattr(pieces, "in_constant_memory", evict)
    monkeypatch.setattr(pieces, "load_model", lambda _: "")
    monkeypatch.setattr(pieces, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(pieces, "evaluate", lambda model, *_, **__: {"mqar": {"rows": [{"pairs": 4, "of": model}]}})
    rows = pieces._measured(piece, SMOKE, tmp_path)["mqar"]
    assert asked == [(method, held) for method in EVICTIONS]
    assert [row["of"] for row in rows] == ["", *EVICTIONS] == [row.get("modes", "") for row in rows]
    assert len(pieces._measured(piece._replace(task="text"), SMOKE, tmp_path)["mqar"]) == 1
    numbers = {"accuracy": 0.5}
    found = columns({"task": MQAR, "rows": {"mqar": [row | numbers for row in rows]}}, SMOKE)
    assert list(found) == ["", *EVICTIONS]
    assert pieces.evictions(piece._replace(seed=SMOKE.tuning_seed), SMOKE) == {}
    assert [title(("gdn-attention", mode)) for mode in EVICTIONS] == [
        "GDN, attention, by TOVA",
        "GDN, attention, by Unif.+SWA",
    ]


def test_what_layers_decided_is_shown_over_training(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("nats-l", "gdn"), (MQAR,))
    for name in comparison.contestants:
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            logged = {f"share/{i}": [(1, 0.5), (100, 0.1 * piece.seed + i)] for i in range(2)}
            record(comparison, piece, logged=logged if name == "nats-l" else {})
    found = decisions(comparison, PARAMETERS, MQAR, "nats-l")
    # means over both layers, then over seeds 1, 2 and 3
    assert found["share"] == pytest.approx({1: 0.5, 100: 0.7})
    assert decisions(comparison, PARAMETERS, MQAR, "gdn") == {}
    text = report.decisions_table(comparison, PARAMETERS, MQAR)
    assert [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]] == ["NAtS-L", "share", "0.5", "0.7"]


def test_a_result_of_another_rule_is_refused_by_name(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    piece = comparison.ready()[0]
    record(comparison, piece)
    path = comparison.folder / store.RUNS
    path.write_text(path.read_text().replace(fingerprint(piece, SMALL), "other"))
    with pytest.raises(ValueError, match=re.escape(f"{path}:1 was made under another rule")):
        comparison.ready()
    with pytest.raises(ValueError, match="no contestant 'gnd'"):
        Comparison(SMALL, tmp_path, contestants=("gnd",))


def test_a_piece_stops_in_time_goes_on_and_is_skipped_when_done(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    comparison = Comparison(SMOKE, tmp_path / "results", (PARAMETERS,), ("nats-l",), (MQAR,))
    work = tmp_path / "work"
    tuned = Piece(PARAMETERS, "nats-l", MQAR, SMOKE.rates[0], SMOKE.tuning_seed)
    record(comparison, tuned)
    (piece,) = comparison.ready()
    assert piece.seed in SMOKE.seeds
    assert not run_piece(piece, comparison, work, deadline=time.time(), commit="test")
    checkpoints = list(work.rglob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-1"]
    said = []
    assert runner.run(comparison, work, commit="test", deadline=math.inf, say=said.append).done
    assert said == [f"parameters nats-l mqar {SMOKE.rates[0]:g} 1: done"]
    result = comparison.read(piece)
    assert result["environment"]["commit"] == "test"
    assert [step for step, _ in result["loss"]] == list(range(1, SMOKE.steps + 1))
    assert {name.partition("/")[0] for name in result["logged"]} == {"softmax_share"}
    assert all([step for step, _ in points] == list(range(1, SMOKE.steps + 1)) for points in result["logged"].values())
    assert {row["pairs"] for row in result["rows"]["mqar"]} == {4, 8, 16, 32}
    assert not list(work.rglob("config.json"))
    assert runner.run(comparison, work, commit="test", deadline=math.inf, say=said.append).done
    assert len(said) == 1
    assert "says nothing" not in report.write(comparison).read_text()
    assert report.SMOKE in report.write(comparison).read_text()


def test_a_damaged_result_is_refused_by_name(tmp_path, capsys):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn",), (MQAR,))
    piece = comparison.ready()[0]
    record(comparison, piece)
    path = comparison.folder / store.RUNS
    whole = path.read_text()
    for content in (whole[:40], "[]", "{}", "<<<<<<< main"):
        path.write_text(f"{whole}{content}\n")
        assert main(["report", "--size", "small", "--results", str(tmp_path)]) == 2
        told = capsys.readouterr().err
        assert f"{path}:2 " in told
        assert "damaged" in told


def test_what_was_trained_under_another_rule_is_not_measured(tmp_path, monkeypatch):
    trained, piece = [], Piece(PARAMETERS, "attention", MQAR, SMOKE.rates[0], SMOKE.seeds[0])

    def train(about, folder, **_):
        trained.append(about.optimizer.steps)
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(pieces.trainer, "train", train)
    monkeypatch.setattr(pieces, "_measured", lambda *_: {})
    monkeypatch.setattr(pieces, "_training", lambda *_: {"last loss": 1.0})
    longer = replace(SMOKE, steps=SMOKE.steps + 1)
    for size in (SMOKE, longer):
        # time is up after training
        monkeypatch.setattr(pieces.time, "time", lambda: 1.0)
        assert not run_piece(piece, Comparison(size, tmp_path), tmp_path / "work", deadline=0.0, commit="test")
    assert trained == [SMOKE.steps, longer.steps]
    assert run_piece(piece, Comparison(longer, tmp_path), tmp_path / "work", deadline=math.inf, commit="test")
    assert trained == [SMOKE.steps, longer.steps]


def test_an_error_in_one_piece_is_told_by_the_exit_code_and_the_others_are_run(tmp_path, monkeypatch, capsys):
    def run_one(piece, comparison, *_, **__):
        if piece.contestant == "gdn":
            raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")
        record(comparison, piece)
        return True

    monkeypatch.setattr(runner, "run_piece", run_one)
    options = ["--results", str(tmp_path), "--tasks", MQAR, "--contestants", "gdn,gsa", "--divisions", PARAMETERS]
    assert main(["run", *options, "--commit", "test"]) == 1
    told = capsys.readouterr()
    assert "parameters gdn mqar 0.003 0: failed, RuntimeError: CUDA error: an illegal memory access was" in told.out
    assert "parameters gsa mqar 0.003 1: done" in told.out
    assert "arena: 1 failed" in told.err


def test_a_model_that_is_the_same_in_both_divisions_is_run_once(tmp_path):
    both = Comparison(SMALL, tmp_path, DIVISIONS, ("oryx-tm", "mamba2"), (MQAR,))
    assert both.runs() == [
        (PARAMETERS, MQAR, "mamba2"),
        (PARAMETERS, MQAR, "oryx-tm"),
        (STATE, MQAR, "mamba2"),
    ]
    assert both.counted(STATE, MQAR, "oryx-tm") == both.counted(PARAMETERS, MQAR, "oryx-tm")
    assert both.costs(STATE)[-2:] == [
        CostPiece(STATE, "mamba2", SMALL.cost_lengths[-1]),
        CostPiece(PARAMETERS, "oryx-tm", SMALL.cost_lengths[-1]),
    ]
    for contestant in taking_part(STATE):
        same = solve(contestant.name, STATE, SMALL).fields == solve(contestant.name, PARAMETERS, SMALL).fields
        assert (run_in(contestant.name, STATE, SMALL) == PARAMETERS) == same


def test_results_that_were_carried_elsewhere_are_not_made_again(tmp_path):
    here = Comparison(SMALL, tmp_path / "here", (PARAMETERS,), ("gdn", "attention"), (MQAR,))
    for piece in here.tuning(PARAMETERS, MQAR, "gdn"):
        record(here, piece, piece.rate)
    shutil.copytree(here.results, tmp_path / "there")
    there = replace(here, results=tmp_path / "there")
    record(there, there.counted(PARAMETERS, MQAR, "gdn")[0])
    left = [(p.contestant, p.rate, p.seed) for p in there.ready()]
    assert [name for name, _, _ in left] == ["attention"] * len(SMALL.rates) + ["gdn"] * (len(SMALL.seeds) - 1)
    assert {(rate, seed) for name, rate, seed in left if name == "gdn"} == {
        (SMALL.rates[0], seed) for seed in SMALL.seeds[1:]
    }
    assert len(here.ready()) == len(left) + 1


def test_time_that_is_up_is_told_by_the_exit_code(tmp_path, capsys):
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
    told = capsys.readouterr().out
    assert "0 of 2 runs are done" in told
    assert "None of these contestants takes part here." in told
    (tmp_path / "file").touch()
    assert main(["report", *options, "--results", str(tmp_path / "file")]) == 2
    assert "arena: " in capsys.readouterr().err


def test_what_was_not_run_is_not_measured(tmp_path):
    comparison = Comparison(SMALL, tmp_path)
    text = report.write(comparison).read_text()
    assert "Nothing was run." in text
    assert "0 of " in text
    assert not list(tmp_path.rglob("*.png"))
    assert all(word not in text for word in ("| held ", "| did not hold ", "| not decided "))


def test_the_report_says_what_was_learnt_by_luck(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "attention"), (MQAR,))
    for name in ("gdn", "attention"):
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece, piece.rate)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            learnt = name == "gdn" or piece.seed == SMALL.seeds[0]
            record(comparison, piece, rows=recalled(0.9 if learnt else 0.0))
    (said,) = (line for line in report.write(comparison).read_text().splitlines() if "luck" in line)
    assert "learnt at one seed and not at another by Attention. " in said


def test_the_report_says_of_each_claim_what_the_differences_say(tmp_path):
    names = ("gdn", "gdn-h", "nha-h", "gsa-h", "attention")
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), names, (MQAR,))
    accuracy = {"gdn": 0.2, "gdn-h": 0.9, "nha-h": 0.5, "gsa-h": 0.1, "attention": 0.55}
    for name in names:
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece, piece.rate)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            noise = 0.2 * (piece.seed - 2) if name == "attention" else 0.01 * piece.seed
            record(comparison, piece, rows=recalled(accuracy[name] + noise))
    for name in names:
        piece = CostPiece(PARAMETERS, name, max(SMALL.cost_lengths))
        row = {"mode": "", "training tokens/s": 1.0, "prefill ms": 1.0, "decode ms/token": 2.0, "cache bytes": 3}
        record(comparison, piece, rows=[row])
    text = report.write(comparison).read_text()
    # losses rise with the rate
    assert f"Of {len(names)} chosen rates 0 are the greatest of the grid and {len(names)} the least" in text
    said = {
        line.split("|")[2].strip(): line.split("|")[3].strip() for line in text.splitlines() if line.count("|") == 5
    }
    assert said["GDN with attention in one layer of four recalls more than GDN (pairs)"] == HELD
    assert said["NHA-H recalls more than GDN-H (pairs)"] == NOT_HELD
    assert said["NHA-H recalls more than attention (pairs)"] == OPEN
    assert said["NHA-H recalls more than GDN-H (needles)"] == NOT_MEASURED
    assert {path.name for path in tmp_path.rglob("*.png")} == {
        "parameters-recall-state.png",
        "parameters-recall-decoding.png",
    }


def test_where_states_are_equal_oryx_is_measured_in_linear_mode_alone(tmp_path):
    comparison = Comparison(SMALL, tmp_path, DIVISIONS, ("oryx-tg",), (MQAR,))
    modes = ("linear → linear", "linear → attention", "attention → attention")
    for division in DIVISIONS:
        for piece in comparison.tuning(division, MQAR, "oryx-tg"):
            record(comparison, piece)
        for piece in comparison.counted(division, MQAR, "oryx-tg"):
            rows = [{"modes": mode, "pairs": 4, "accuracy": 0.5} for mode in modes]
            record(comparison, piece, rows={"cross-mode-mqar": rows})
    lines = {division: [mode for _, mode in Scores(comparison, division, MQAR).lines] for division in DIVISIONS}
    assert lines == {PARAMETERS: ["linear", "linear → attention", "attention"], STATE: ["linear"]}


def test_a_margin_forgives_and_a_smoke_run_decides_nothing(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, accuracy in (("gdn", 0.9), ("gdn-h", 0.89)):
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            record(comparison, piece, rows=recalled(accuracy))
    scores = Scores(comparison, PARAMETERS, MQAR)
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""))
    assert judge(claim, scores, SMALL).word == NOT_HELD
    assert judge(claim._replace(margin=0.02), scores, SMALL).word == HELD
    assert judge(claim._replace(higher=False), scores, SMALL).word == HELD
    assert judge(claim, scores, SMOKE).word == NOT_MEASURED


@pytest.mark.parametrize("last", [{}, {"accuracy": math.nan}, {"accuracy": math.inf}], ids=["diverged", "nan", "inf"])
def test_seeds_that_are_missing_are_counted_and_decide_nothing(tmp_path, last):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, accuracy in (("gdn", 0.1), ("gdn-h", 0.9)):
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            rows = recalled(accuracy)
            if name == "gdn-h" and piece.seed == SMALL.seeds[-1]:
                rows = {"mqar": [row | last for row in rows["mqar"]]} if last else {}
            record(comparison, piece, rows=rows)
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""))
    assert judge(claim, Scores(comparison, PARAMETERS, MQAR), SMALL).word == NOT_MEASURED
    table = report.scores_table(comparison, PARAMETERS, MQAR)
    assert "0.900 ± 0.000 (2 of 3 seeds)" in table
    assert table.count("seeds)") == 3


def test_a_difference_of_just_the_margin_is_not_decided(tmp_path):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, accuracy in (("gdn", 0.9), ("gdn-h", 0.88)):
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            record(comparison, piece, rows=recalled(accuracy))
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""), 0.02)
    assert judge(claim, Scores(comparison, PARAMETERS, MQAR), SMALL).word == OPEN


@pytest.mark.parametrize(("accuracy", "word"), [(0.0, NOT_LEARNT), (0.04, NOT_LEARNT), (0.2, NOT_HELD)])
def test_what_neither_side_has_learnt_decides_nothing(tmp_path, accuracy, word):
    comparison = Comparison(SMALL, tmp_path, (PARAMETERS,), ("gdn", "gdn-h"), (MQAR,))
    for name, recall in (("gdn", accuracy), ("gdn-h", 0.0)):
        for piece in comparison.tuning(PARAMETERS, MQAR, name):
            record(comparison, piece)
        for piece in comparison.counted(PARAMETERS, MQAR, name):
            record(comparison, piece, rows=recalled(recall))
    claim = Claim("", "", PARAMETERS, MQAR, "mean", ("gdn-h", ""), ("gdn", ""))
    assert judge(claim, Scores(comparison, PARAMETERS, MQAR), SMALL).word == word
    unlearnt = word == NOT_LEARNT
    assert (judge(claim._replace(margin=0.3), Scores(comparison, PARAMETERS, MQAR), SMALL).word != HELD) == unlearnt


def test_intervals_are_students():
    assert Estimate.of([1.0, 2.0, 3.0]) == Estimate(2.0, pytest.approx(4.303 / 3**0.5), 3)
    assert str(Estimate.of([0.25])) == "0.250"
    with pytest.raises(ValueError, match="at least one"):
        Estimate.of([])


def test_the_front_holds_what_nothing_beats_in_both():
    points = {("a", ""): (1.0, 0.2), ("b", ""): (2.0, 0.1), ("c", ""): (3.0, 0.5), ("d", ""): (3.0, 0.4)}
    assert front(points) == [("a", ""), ("c", "")]
    assert front(points, higher=False) == [("a", ""), ("b", "")]


def test_a_piece_depends_on_its_recipe():
    one = Piece(PARAMETERS, "gdn", MQAR, 1e-3, 1)
    assert fingerprint(one, SMALL) == fingerprint(one, SMALL)
    assert len({fingerprint(p, SMALL) for p in (one, one._replace(seed=2), one._replace(rate=2e-3))}) == 3
    assert recipe_of(one, SMALL).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize("name", ["compact", "medium", "needles"])
def test_committed_reports_say_what_the_committed_results_say(name, tmp_path):
    committed = ROOT / "arena" / "results" / name
    shutil.copytree(committed, tmp_path / name)
    written = report.write(Comparison(SIZES[name], tmp_path)).read_text(encoding="utf-8")
    assert written == (committed / "report.md").read_text(encoding="utf-8")
