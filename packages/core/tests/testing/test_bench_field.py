"""Test that the benchmark of transformers' models measures the named families, each independently of the others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_field.py"


def test_named_families_are_measured(tmp_path, capsys):
    rows = runpy.run_path(str(SCRIPT))["main"](["mamba2", "--sweep", "--device", "cpu", "--out", str(tmp_path)])
    assert [row["op"] for row in rows] == ["layer of mamba2"] * len(rows)
    assert [row["impl"] for row in rows][:1] == ["tokenmix"]
    assert "layer of mamba2" in capsys.readouterr().out


def test_an_unknown_family_is_named(capsys):
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"](["mamba3"])
    assert "there is no family mamba3, but qwen3_next" in capsys.readouterr().err


def test_what_fails_is_told_at_the_end_and_loses_nothing_else(monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPT))
    scope, measure = script["rows"].__globals__, script["measure"]

    def without_layers(op, *args, **kwargs):
        if op == "layer of mamba2":
            raise ValueError("no such layer")
        return measure(op, *args, **kwargs)

    monkeypatch.setitem(scope, "measure", without_layers)
    found = []
    with pytest.raises(RuntimeError, match=r"not measured: mamba2 \(ValueError\)"):
        found.extend(script["rows"]("cpu", ["mamba2", "bamba"]))
    kinds = ["model of mamba2", "one token of mamba2", "layer of bamba", "model of bamba", "one token of bamba"]
    assert list(dict.fromkeys(row["op"] for row in found)) == kinds
    assert "no such layer" in capsys.readouterr().err


def test_a_package_that_cannot_be_imported_is_not_named(tmp_path, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    for name in ("mamba_ssm", "causal_conv1d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('of another version')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match="mamba_ssm.ops.triton.ssd_combined cannot be imported: OSError"):
        forms = script["_forms"]("mamba2", script["field_model"]("mamba2"))
    assert list(forms) == ["tokenmix", "transformers, torch"]
