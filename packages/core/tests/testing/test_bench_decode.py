"""Test that the decoding benchmark measures what is asked for, and compares the tokens of both ways to decode."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "bench_decode.py"))


def test_some_models_are_measured_and_kept_as_they_come(tmp_path, capsys):
    sizes = ["--device", "cpu", "--batch", "2", "--prompt", "4", "--tokens", "5", "--repeats", "1"]
    SCRIPT["main"](["gated_delta_net", "--only", "tokenmix", *sizes, "--out", str(tmp_path)])
    recorded, alone = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert (recorded["impl"], alone["impl"]) == ("tokenmix", "tokenmix, kernel by kernel")
    assert recorded["op"] == alone["op"] == "decoding, gated_delta_net tiny"
    assert alone["same_tokens"] == 1
    assert recorded["floor_ms"] > 0
    assert "kernel by kernel" in capsys.readouterr().out


def test_an_unknown_model_is_named(capsys):
    with pytest.raises(SystemExit):
        SCRIPT["main"](["mixtral"])
    assert "there is no model 'mixtral', but gated_delta_net" in capsys.readouterr().err
