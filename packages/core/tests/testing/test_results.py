import json
import sys
from types import SimpleNamespace

import pytest

from tokenmix_core.testing import results
from tokenmix_core.testing.benchmarking import table

ROW = {"op": "ssd", "shape": "B1", "impl": "tokenmix", "fwd_ms": 0.25, "fwdbwd_ms": None, "peak_mb": 512.0}


def test_a_newer_row_replaces_the_older_one_and_others_stay(tmp_path):
    results.save([ROW, {**ROW, "impl": "baseline"}], tmp_path)
    path = results.save([{**ROW, "fwd_ms": 0.2}], tmp_path)
    rows = {row["impl"]: row for row in json.loads(path.read_text())}
    assert rows["tokenmix"]["fwd_ms"] == 0.2
    assert rows["baseline"]["fwd_ms"] == 0.25
    assert rows["baseline"]["environment"]["torch"]


def test_a_benchmarks_function_runs_by_its_name(tmp_path, capsys):
    class Pedantic:
        def __init__(self):
            self.extra_info = {}

        def pedantic(self, measure, rounds):
            return measure()

    path = tmp_path / "bench_nothing.py"
    path.write_text(f"def rows(device): return []\ndef sweep(device): return [{ROW!r}]\n")
    benchmark = Pedantic()
    results.run_benchmark(path, benchmark, capsys, function="sweep")
    assert benchmark.extra_info["rows"] == [ROW]
    with pytest.raises(AssertionError, match="measured nothing"):
        results.run_benchmark(path, Pedantic(), capsys)


def test_rows_of_several_kinds_stand_in_one_table_and_below_headers_of_their_own(tmp_path, capsys):
    other = {"op": "step", "shape": "B1", "impl": "tokenmix", "fwd_ms": 0.5, "floor_ms": 0.125}
    assert table([ROW, other, ROW]).splitlines() == [
        "op    shape  impl      fwd_ms  fwdbwd_ms  peak_mb  floor_ms",
        "ssd   B1     tokenmix  0.250   –          512.000  –",
        "step  B1     tokenmix  0.500   –          –        0.125",
        "ssd   B1     tokenmix  0.250   –          512.000  –",
    ]
    list(results.kept([ROW, ROW, other, ROW], tmp_path))
    headers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("op ")]
    assert ["floor_ms" in header for header in headers] == [False, True, False]


def test_a_library_that_logs_keeps_a_standard_error_that_outlives_the_test(tmp_path, capsys, monkeypatch):
    script = tmp_path / "bench_it.py"
    script.write_text(f"import sys\nsys.stderr_of_import = sys.stderr\ndef rows(device):\n    yield {ROW}\n")
    benchmark = SimpleNamespace(pedantic=lambda run, rounds: run(), extra_info={})
    monkeypatch.setattr(sys, "stderr_of_import", None, raising=False)
    results.run_benchmark(script, benchmark, capsys)
    # pytest closes the stderr of this test
    assert sys.stderr_of_import is not sys.stderr
