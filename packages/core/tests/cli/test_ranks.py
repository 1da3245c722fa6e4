"""Test evaluations under torchrun."""

from pathlib import Path

import pytest

from tokenmix_core.cli.ranks import evaluating_ranks
from tokenmix_core.evaluation.options import EvalOptions


def test_one_process_runs_any_suite():
    with evaluating_ranks(["niah"], EvalOptions(), Path("out")) as found:
        assert found == (EvalOptions(), Path("out"))


def test_several_processes_run_only_suites_whose_rows_are_split(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = evaluating_ranks(["perplexity-by-position", "niah"], EvalOptions(), Path("out"))
    with (
        pytest.raises(ValueError, match="niah runs in one process; start several only for perp"),
        ranks,
    ):
        pass
