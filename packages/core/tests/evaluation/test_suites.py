"""Suites are found by name, run with their options, and leave results and the model's mode behind."""

import json

import pytest

from tokenmix_core.evaluation.options import EvalOptions, Suite
from tokenmix_core.evaluation.suites import LONGBENCH, RULER, SUITES, _longbench_ranges, evaluate, samples_suite


def test_the_suites_of_the_papers_are_there():
    assert set(SUITES) == {
        *("commonsense", "recall", "ruler", "longbench", "lm-eval"),
        *("mqar", "copying", "niah", "copy", "perplexity-by-position", "efficiency", "samples"),
    }
    assert len(RULER) == 13
    assert len(LONGBENCH) == 11


def test_every_result_is_written_and_the_mode_restored(llama, tokenizer, text_file, tmp_path, capsys):
    options = {
        "mqar": EvalOptions(lengths=(32,), limit=2, progress=False),
        "samples": EvalOptions(max_length=8, text=text_file, progress=False),
    }
    llama.train()
    try:
        results = evaluate(llama, tokenizer, ["mqar", "samples"], options, out=tmp_path)
        assert llama.training
    finally:
        llama.eval()
    assert list(results) == ["mqar", "samples"]
    for name, result in results.items():
        assert json.loads((tmp_path / f"{name}.json").read_text())["rows"] == result["rows"]
    printed = capsys.readouterr().out
    assert "mqar-32-4" in printed
    assert "continuation" in printed


def test_what_ran_before_an_error_is_kept(llama, tokenizer, tmp_path):
    def fail(model, tokenizer, options):
        raise ValueError("no data")

    suites = {"mqar": SUITES["mqar"], "broken": Suite("always fails", fail)}
    options = EvalOptions(lengths=(32,), limit=2, progress=False)
    with pytest.raises(ValueError, match="no data"):
        evaluate(llama, tokenizer, ["mqar", "broken"], options, out=tmp_path, suites=suites)
    assert (tmp_path / "mqar.json").is_file()
    assert not (tmp_path / "broken.json").exists()


def test_unknown_suites_are_refused_before_anything_runs(llama, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"no suite 'foo'; choose from .*mqar"):
        evaluate(llama, tokenizer, ["mqar", "foo"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mqar", "niah", "copy", "perplexity-by-position", "efficiency", "samples"])
def test_unknown_tasks_are_refused_with_the_known_ones(llama, tokenizer, text_file, name):
    options = EvalOptions(tasks=("bogus",), text=text_file, progress=False)
    with pytest.raises(ValueError, match=rf"suite {name} has no task 'bogus'; it has \S+"):
        SUITES[name].run(llama, tokenizer, options)


def test_samples_repeat_with_their_seed_and_begin_with_the_prompt(llama, tokenizer):
    def rows(seed):
        return samples_suite(llama, tokenizer, EvalOptions(prompt="ab", max_length=8, seed=seed))["rows"]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    assert [row["prompt"] for row in rows(1)] == ["ab"]


def test_longbench_is_split_by_the_length_of_its_inputs():
    samples = [{"doc": {"length": n}, "score": float(n > 5000)} for n in (10, 3999, 4000, 6000, 9000)]
    rows = _longbench_ranges("longbench_lcc_e", samples, "score")
    assert [(row["metric"], row["value"], row["examples"]) for row in rows] == [
        ("score, 0k-4k words", 0.0, 2),
        ("score, 4k-8k words", 0.5, 2),
        ("score, from 8k words", 1.0, 1),
    ]
