import json

import pytest

from tokenmix_core.testing import results

ROW = {"op": "ssd", "shape": "B1", "impl": "tokenmix", "fwd_ms": 0.25, "fwdbwd_ms": None, "peak_mb": 512.0}


def test_a_newer_row_replaces_the_older_one_and_others_stay(tmp_path):
    results.save([ROW, {**ROW, "impl": "peer"}], tmp_path)
    path = results.save([{**ROW, "fwd_ms": 0.2}], tmp_path)
    rows = {row["impl"]: row for row in json.loads(path.read_text())}
    assert rows["tokenmix"]["fwd_ms"] == 0.2
    assert rows["peer"]["fwd_ms"] == 0.25
    assert rows["peer"]["environment"]["torch"]


def test_a_table_leaves_out_columns_that_nobody_measured(tmp_path):
    table = results.markdown(json.loads(results.save([ROW], tmp_path).read_text()))
    assert "| ssd | B1 | tokenmix | 0.250 | 512 |" in table
    assert "backward" not in table


def test_ours_stands_beside_the_best_peer_of_each_number(tmp_path):
    slow = {**ROW, "impl": "slow but small", "fwd_ms": 1.0, "peak_mb": 64.0}
    rows = [ROW, slow, {**ROW, "impl": "fast", "fwd_ms": 0.5}, {**ROW, "shape": "B2"}]
    rows = json.loads(results.save(rows, tmp_path).read_text())
    [pair] = results.beside(rows)
    assert pair["fwd_ms_peer"] == (0.5, "fast")
    assert pair["peak_mb_peer"] == (64.0, "slow but small")
    assert pair["fwdbwd_ms_peer"] is None
    table = results.markdown(rows)
    assert "| ssd | B1 | 0.250 | 0.500 (fast) | 512 | 64.000 (slow but small) |" in table
    assert "| ssd | B2 | tokenmix | 0.250 | 512 |" in table


def test_headlines_are_the_first_shapes_of_operations_with_a_peer(tmp_path):
    peer = {**ROW, "impl": "peer"}
    rows = [ROW, peer, {**ROW, "shape": "B2"}, {**peer, "shape": "B2"}, {**ROW, "op": "alone"}]
    assert results.headlines(rows) == rows[:2]


def test_a_plot_of_shares_is_written(tmp_path):
    rows = json.loads(results.save([ROW, {**ROW, "impl": "peer"}], tmp_path).read_text())
    results.plot(rows, tmp_path / "plots" / "speed.png")
    assert (tmp_path / "plots" / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_readme_is_filled_between_its_marks_only(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    assert results.fill(readme, "new")
    assert readme.read_text() == "before\n<!-- speed -->\nnew\n<!-- /speed -->\nafter\n"
    assert not results.fill(readme, "new")
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        results.fill(readme, "new")
