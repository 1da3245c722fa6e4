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
    table = results.markdown(results.save([ROW], tmp_path))
    assert "| ssd | B1 | tokenmix | 0.250 | 512 |" in table
    assert "backward" not in table


def test_a_readme_is_filled_between_its_marks_only(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter\n")
    assert results.fill(readme, "new")
    assert readme.read_text() == "before\n<!-- speed -->\nnew\n<!-- /speed -->\nafter\n"
    assert not results.fill(readme, "new")
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        results.fill(readme, "new")
