"""Test that suites are found by name, run with their options, and restore the model's mode after writing results."""

import json
import platform
import subprocess

import pytest
import torch

from tokenmix_core._utils.versions import commit_of, software
from tokenmix_core.evaluation.efficiency import BENCH_SUITES
from tokenmix_core.evaluation.options import OPTIONAL, EvalOptions, Suite
from tokenmix_core.evaluation.report import write_result
from tokenmix_core.evaluation.suites import (
    LONGBENCH,
    RULER,
    SUITES,
    _longbench_ranges,
    check_read,
    evaluate,
    samples_suite,
)
from tokenmix_core.evaluation.text import corpus_of

PROVENANCE = {
    *("checkpoint", "dtype", "device", "seed", "limit", "lengths", "corpus", "python", "versions", "commit"),
}


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
    origins = [json.loads((tmp_path / f"{name}.json").read_text())["provenance"] for name in results]
    for origin, asked in zip(origins, options.values(), strict=True):
        assert origin.keys() >= PROVENANCE
        assert (origin["dtype"], origin["seed"], origin["limit"]) == ("float32", 0, asked.limit)
        assert origin["device"].startswith("cpu, ")
        assert origin["python"] == platform.python_version()
        assert origin["versions"]["torch"] == torch.__version__
    assert origins[0]["lengths"] == [32]
    assert origins[0]["corpus"] is None
    assert origins[1]["corpus"] == corpus_of(text_file, tokenizer)
    printed = capsys.readouterr().out
    assert "mqar-32-4" in printed
    assert "continuation" in printed


def test_a_result_that_is_written_alone_names_its_software(tmp_path):
    write_result({"suite": "own", "settings": {}, "rows": [{"a": 1}], "plots": []}, tmp_path)
    assert json.loads((tmp_path / "own.json").read_text())["provenance"] == software()


def test_the_commit_is_that_of_our_checkout_and_of_no_other(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    installed = tmp_path / "site-packages" / "module.py"
    installed.parent.mkdir()
    installed.touch()
    assert commit_of(installed) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "c"], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit_of(installed) == head.strip()
    installed.write_text("x = 1")
    assert commit_of(installed) == f"{head.strip()}, changed"


def test_options_that_no_suite_reads_are_refused():
    options = EvalOptions(text="a.txt", vocab_size=8)
    check_read(["niah", "mqar"], options, SUITES)
    with pytest.raises(ValueError, match="niah does not read vocab_size"):
        check_read(["niah"], options, SUITES)
    # another package's suite may read any option
    check_read(["own"], options, {"own": Suite("", lambda *_: None)})
    assert all(set(suite.reads) <= set(OPTIONAL) for suite in (*SUITES.values(), *BENCH_SUITES.values()))


def test_a_suite_without_a_row_is_an_error(llama, tokenizer, tmp_path):
    empty = Suite("", lambda *_: {"suite": "empty", "settings": {}, "rows": [], "plots": []})
    with pytest.raises(ValueError, match="empty has no row"):
        evaluate(llama, tokenizer, ["empty"], out=tmp_path / "out", suites={"empty": empty})
    assert not (tmp_path / "out" / "empty.json").exists()


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
