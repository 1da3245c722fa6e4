"""Test tables and plots of benchmark results."""

import json
import sys
from pathlib import Path

import pytest

from tokenmix_core.testing.results import save

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from result_tables import beside, by_version, fill, markdown, plot, slower

ROW = {"op": "ssd", "shape": "B1", "impl": "tokenmix", "fwd_ms": 0.25, "fwdbwd_ms": None, "peak_mb": 512.0}


def test_a_table_leaves_out_columns_that_nobody_measured(tmp_path):
    table = markdown(json.loads(save([ROW], tmp_path).read_text()))
    assert "| ssd | B1 | tokenmix | 0.250 | 512 |" in table
    assert "backward" not in table


def test_ours_stands_beside_the_best_peer_of_each_number(tmp_path):
    slow = {**ROW, "impl": "slow but small", "fwd_ms": 1.0, "peak_mb": 64.0}
    rows = [ROW, slow, {**ROW, "impl": "fast", "fwd_ms": 0.5}, {**ROW, "shape": "B2"}]
    rows = json.loads(save(rows, tmp_path).read_text())
    [pair] = beside(rows)
    assert pair["fwd_ms_baseline"] == (0.5, "fast")
    assert pair["peak_mb_baseline"] == (64.0, "slow but small")
    assert pair["fwdbwd_ms_baseline"] is None
    table = markdown(rows)
    assert "| ssd | B1 | 0.250 / 0.500 (fast) | 512 / 64.000 (slow but small) |" in table
    assert "| ssd | B2 | tokenmix | 0.250 | 512 |" in table


def test_a_baseline_that_failed_is_told_and_compared_with_nothing(tmp_path):
    failed = {**ROW, "impl": "broken", "fwd_ms": None, "failed": "TypeError: a | b"}
    rows = [ROW, {**ROW, "impl": "fast", "fwd_ms": 0.5}, {**ROW, "impl": "tokenmix, other", "fwd_ms": 0.1}, failed]
    rows = json.loads(save(rows, tmp_path).read_text())
    assert beside(rows)[0]["fwd_ms_baseline"] == (0.5, "fast")
    assert r"| ssd | B1 | broken | TypeError: a \| b |" in markdown(rows)


def test_a_plot_of_shares_is_written(tmp_path):
    rows = json.loads(save([ROW, {**ROW, "impl": "baseline"}], tmp_path).read_text())
    plot(rows, tmp_path / "plots" / "speed.png")
    assert (tmp_path / "plots" / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_slower_names_the_times_beyond_the_bound(tmp_path):
    ours = [{**ROW, "fwd_ms": 1.05, "fwdbwd_ms": 3.0}, {**ROW, "shape": "B2", "fwd_ms": 1.0, "fwdbwd_ms": None}]
    baselines = [{**row, "impl": "baseline", "fwd_ms": 1.0, "fwdbwd_ms": 2.0} for row in ours]
    rows = json.loads(save(ours + baselines, tmp_path).read_text())
    assert [(row["shape"], key) for row, key in slower(rows, 1.1)] == [("B1", "fwdbwd_ms")]
    assert [(row["shape"], key) for row, key in slower(rows, 1.01)] == [
        ("B1", "fwd_ms"),
        ("B1", "fwdbwd_ms"),
    ]


def test_an_eager_call_takes_what_the_slower_of_host_and_device_takes(tmp_path):
    ours = {**ROW, "fwdbwd_ms": 0.2, "host_us": 150.0}
    baseline = {**ours, "impl": "baseline", "fwdbwd_ms": 0.1, "host_us": 800.0}
    [pair] = beside(json.loads(save([ours, baseline], tmp_path).read_text()))
    assert pair["eager_ms"] == 0.2
    assert pair["eager_ms_baseline"] == (0.8, "baseline")
    assert beside([{**ours, "host_us": None}, baseline])[0]["eager_ms"] is None


def test_a_bound_adds_a_panel_to_the_plot_and_counts_the_shapes_within_it(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    rows = [{**ROW, "host_us": 10.0}, {**ROW, "shape": "B2", "fwd_ms": 3.0}]
    rows += [{**row, "impl": "baseline", "fwd_ms": 1.0} for row in rows]
    rows = json.loads(save(rows, tmp_path).read_text())
    plot(rows, tmp_path / "sweep.png", bound=1.1)
    assert len(figures[0].axes) == 2
    assert "1 of 2 shapes" in figures[0].get_suptitle()
    assert list(figures[0].axes[0].lines[2].get_xdata()) == [0.25, 3.0]


def test_a_readme_is_filled_between_its_marks_only(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    assert fill(readme, "new")
    assert readme.read_text() == "before\n<!-- speed -->\nnew\n<!-- /speed -->\nafter\n"
    assert not fill(readme, "new")
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        fill(readme, "new")
    readme.write_text("<!-- speed -->\nkept\n<!-- /speed -->\n<!-- recall, 4 -->\n<!-- /recall, 4 -->\n")
    assert fill(readme, "new", "recall, 4")
    assert "<!-- speed -->\nkept\n<!-- /speed -->\n<!-- recall, 4 -->\nnew\n<!-- /recall, 4 -->" in readme.read_text()


def test_forms_of_several_versions_stand_side_by_side():
    where = {"device": "GPU", "torch": "2", "commit": "abc"}
    rows = [
        {
            **ROW,
            "impl": f"{form}, Triton {version}",
            "fwd_ms": ms,
            "fwdbwd_ms": 4.0,
            "environment": {**where, "triton": version},
        }
        for form, version, ms in (("portable", "3.10.0", 2.0), ("Gluon", "3.9.0", 1.0), ("portable", "3.9.0", 3.0))
    ]
    lines = by_version(rows).splitlines()
    assert lines[2].split(" | ")[2:] == ["Gluon, Triton 3.9.0", "portable, Triton 3.9.0", "portable, Triton 3.10.0 |"]
    assert [cell.split(" / ")[0] for cell in lines[4].split(" | ")[2:]] == ["1.000", "3.000", "2.000"]
