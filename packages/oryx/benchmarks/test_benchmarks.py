"""Run every `bench_*.py` beside this file and keep its rows in `results/`."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tokenmix_core.testing import benchmarking, results

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("bench_*.py")), ids=lambda path: path.stem.removeprefix("bench_"))
@pytest.mark.timeout(1800)
def test_measure(path, benchmark, capsys):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = benchmark.pedantic(module.rows, args=("cuda" if torch.cuda.is_available() else "cpu",), rounds=1)
    assert rows
    benchmark.extra_info["rows"] = rows
    # a CPU's times are for the one who runs it; a GPU's are kept
    if torch.cuda.is_available():
        results.save(rows, HERE / "results")
    with capsys.disabled():
        print("\n" + benchmarking.table(rows))
