"""Test that the benchmark of prompts runs on a CPU, with a baseline."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "prompts.py"))


def test_a_prompt_is_read_by_ours_and_by_baselines(tmp_path, capsys):
    arguments = ["tiny-transformer", "--length", "16", "--length", "24", "--device", "cpu", "--out", str(tmp_path)]
    rows = SCRIPT["main"](arguments)
    assert [(row["shape"], row["impl"]) for row in rows] == [
        (f"B1 T{length}", impl) for length in (16, 24) for impl in ("tokenmix", "transformers Llama")
    ]
    assert all(row["thousand_tokens_s"] * row["ms"] > 0 for row in rows)
    kept = [row for path in tmp_path.glob("*.json") for row in json.loads(path.read_text())]
    assert len(kept) == 4
    assert "prompt, tiny-transformer" in capsys.readouterr().out


def test_who_reads_is_chosen_by_name():
    assert list(SCRIPT["readers"]("tiny-gdn", ["tokenmix"])) == ["tokenmix"]
