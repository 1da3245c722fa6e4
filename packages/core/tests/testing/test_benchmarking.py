import pytest
import torch

from tokenmix_core.testing.benchmarking import installed, measure, measure_step, mixed_lengths, table


def test_mixed_lengths_fill_the_tokens_and_differ():
    lengths = mixed_lengths(65536)
    assert lengths.sum() == 65536
    assert len(lengths) == 32
    assert lengths.min() >= 128
    assert lengths.max() > 16 * lengths.min()


def test_a_baseline_that_fails_at_a_shape_has_a_row_with_the_reason():
    x = torch.randn(4, requires_grad=True)

    def broken():
        raise KeyError("no kernel for this size")

    forwards = {"ours": x.exp, "works": x.sin, "breaks": broken, "has no gradient": lambda: x.detach().cos()}
    rows = measure("op", "B1", "cpu", forwards, (x,), repeats=2)
    assert [row["impl"] for row in rows] == list(forwards)
    assert [row.get("failed") for row in rows[:3]] == [None, None, "KeyError: 'no kernel for this size'"]
    assert "does not require grad" in rows[3]["failed"]
    assert [row["fwd_ms"] is None for row in rows] == [False, False, True, True]
    assert "no kernel for this size" in table(rows)
    with pytest.raises(KeyError):
        measure("op", "B1", "cpu", {"ours": broken}, (x,), repeats=2)


def test_a_baseline_that_computes_something_else_is_left_out_where_all_should_be_alike():
    x = torch.randn(4, requires_grad=True)
    forwards = {"ours": x.exp, "close": lambda: 1.01 * x.exp(), "wrong": x.sin}
    rows = measure("op", "B1", "cpu", forwards, (x,), repeats=2, alike=True)
    assert ["failed" in row for row in rows] == [False, False, True]
    assert "its output differs from ours by" in rows[2]["failed"]
    assert len(measure("op", "B1", "cpu", forwards, (x,), repeats=2)) == 3


def test_a_step_is_compared_with_baselines_that_see_the_state_before_it_is_updated():
    x, state = torch.randn(4), torch.randn(4)

    def ours():
        state.mul_(0.9)
        return state + x

    # the last function confuses two arguments, as calls by position may
    forwards = {"ours": ours, "baseline": lambda: 0.9 * state + x, "wrong": lambda: 0.9 * state * x}
    rows = measure_step("op", "B1", "cpu", forwards)
    assert [(row["impl"], "failed" in row) for row in rows] == [("ours", False), ("baseline", False), ("wrong", True)]


def test_an_installed_package_that_cannot_be_imported_is_a_baseline_that_fails(tmp_path, monkeypatch):
    (tmp_path / "broken_baseline.py").write_text("raise OSError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("no_such_baseline.ops:f") is None
    baseline = installed("broken_baseline:f")
    assert baseline is not None
    rows = measure_step("op", "B1", "cpu", {"ours": lambda: torch.ones(1), "baseline": baseline})
    assert rows[1]["failed"] == "OSError: built for another torch"
