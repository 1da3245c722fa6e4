"""Run every `bench_*.py` beside this file; rows are kept in `results/`, those of other functions in folders there."""

from pathlib import Path

import pytest

from tokenmix_core.testing.results import run_benchmark

BENCHMARKS = sorted(Path(__file__).parent.glob("bench_*.py"))


def having(function: str) -> list[Path]:
    """Return the benchmarks that have a function of this name."""
    return [path for path in BENCHMARKS if f"def {function}(" in path.read_text()]


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_measure(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys)


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
@pytest.mark.timeout(7200)
def test_sweep(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="sweep")


@pytest.mark.parametrize("path", having("baselines"), ids=lambda path: path.stem)
@pytest.mark.timeout(3600)
def test_baselines(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="baselines")


@pytest.mark.parametrize("path", having("own"), ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_own(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="own")


@pytest.mark.parametrize("path", having("passes"), ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_passes(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="passes")


@pytest.mark.parametrize("path", having("versions"), ids=lambda path: path.stem)
@pytest.mark.timeout(1800)
def test_versions(path, benchmark, capsys):
    run_benchmark(path, benchmark, capsys, function="versions")
