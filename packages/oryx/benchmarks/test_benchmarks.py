"""Run every `bench_*.py` of this folder and write its rows to `results/`."""

from pathlib import Path

import pytest

from tokenmix_core.testing.results import run_benchmark


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("bench_*.py")), ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_measure(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys)
