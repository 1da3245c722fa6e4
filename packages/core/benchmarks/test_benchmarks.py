"""Run every `bench_*.py` beside this file and keep its rows in `results/`, those of its sweep in `results/sweep/`."""

from pathlib import Path

import pytest

from tokenmix_core.testing.results import run_benchmark

BENCHMARKS = sorted(Path(__file__).parent.glob("bench_*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_measure(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys)


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
@pytest.mark.timeout(7200)
def test_sweep(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="sweep")
