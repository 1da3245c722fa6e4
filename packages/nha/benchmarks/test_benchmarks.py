"""Run every `bench_*.py` beside this file; rows are kept in `results/`, those of other functions in folders there."""

from pathlib import Path

import pytest

from tokenmix_core.testing.results import run_benchmark

VERSIONED = sorted(Path(__file__).parent.glob("bench_*.py"))


@pytest.mark.parametrize("path", VERSIONED, ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_measure(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys)


@pytest.mark.parametrize("path", VERSIONED, ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_versions(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="versions")
