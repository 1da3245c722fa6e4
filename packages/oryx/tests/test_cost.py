"""Test that the table and the plot of the layer's cost show the values of the measured rows."""

import importlib
import json
import sys
from pathlib import Path

import pytest

# the benchmarks are scripts in one folder, not a package
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
bench_mixer, cost = (importlib.import_module(name) for name in ("bench_mixer", "cost"))


@pytest.fixture
def folder(tmp_path):
    rows = []
    for family in bench_mixer.FAMILIES:
        for tokens, shares in (
            (1024, (1.0, 3.0, 3.5, 4.0)),
            (2048, (1.0, 5.0, 6.0, 4.0)),
            (4096, (1.0, 6.0, 7.0, 8.0)),
        ):
            times = dict(zip(bench_mixer.SHARES, shares, strict=True))
            rows += bench_mixer.rows_at(family, tokens, projections=True, times=times)
    (tmp_path / "gpu.json").write_text(json.dumps([*rows, {"op": "another", "shape": "", "impl": ""}]))
    return tmp_path


def test_the_crossover_is_where_mixing_stays_ahead(folder):
    found = cost.measured(folder)
    assert set(found) == {("mixer", family) for family in bench_mixer.FAMILIES}
    # mixed modes are faster than attention at 1,024 tokens, slower at 2,048, and faster again at 4,096
    assert all(bench_mixer.crossover_of(times, 0.25) == 4096 for times in found.values())
    assert "ORYX-TM, the layer: 4096" in cost.table(found)


def test_the_table_has_a_line_for_each_length(folder):
    table = cost.table(cost.measured(folder))
    assert "| ORYX-TG, the layer | 2048 | 4.00 | 6.00 | 5.00 | 1.00 | 1.25 | 0.45 |" in table


def test_the_readme_is_filled_between_its_marks(folder):
    readme = f"a\n{cost.BEGIN}old\n{cost.END}\nb\n"
    found = cost.measured(folder)
    assert cost.filled(readme, found) == f"a\n{cost.BEGIN}{cost.table(found)}{cost.END}\nb\n"
    assert cost.filled(cost.filled(readme, found), found) == cost.filled(readme, found)


def test_the_plot_is_drawn(folder, tmp_path):
    pytest.importorskip("matplotlib")
    cost.plot(cost.measured(folder), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
