"""Test the benchmark that trains with two versions of the sources: equal ones give equal curves, others do not."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmix_core

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "curves.py"))


@pytest.fixture
def in_this_process(monkeypatch):
    """Run in this process, because a new one takes ten seconds to start."""
    begin = subprocess.run

    def run(command, **options):
        if command[0] != sys.executable:
            return begin(command, **options)
        assert options["check"]
        assert options["env"]["PYTHONPATH"].startswith(str(SCRIPT["ROOT"]))
        monkeypatch.setattr(sys, "argv", command[2:])
        return SCRIPT["child"]()

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.skipif(
    not Path(tokenmix_core.__file__).is_relative_to(SCRIPT["ROOT"]),
    reason="the installed package is not the checkout's",
)
def test_the_same_sources_train_the_same_model(in_this_process, tmp_path, capsys):
    short = ["--steps", "3", "--rows", "2", "--length", "32", "--device", "cpu", "--out", str(tmp_path / "kept.json")]
    same, rotated = SCRIPT["main"](["tiny", "--before", str(SCRIPT["ROOT"]), *short])
    assert float(same["greatest distance"]) == 0
    assert float(rotated["greatest distance"]) < 1e-4
    assert same["last loss"] < same["first loss"]
    assert "greatest distance" in capsys.readouterr().out
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert {len(curve) for curve in kept["curves"].values()} == {3}


def test_curves_that_part_are_told():
    level = [1.0] * 100
    (before, _) = SCRIPT["distances"](
        {"before": level, "after": level[:50] + [0.5] * 50, "after, rows reversed": level[:50] + [0.5] * 50}
    )
    assert float(before["greatest distance"]) == float(before["distance at the end"]) == 0.5


def test_a_folder_without_sources_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        SCRIPT["main"](["tiny", "--before", str(tmp_path)])
    assert "is no checkout of this workspace" in capsys.readouterr().err
