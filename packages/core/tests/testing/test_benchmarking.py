import pytest
import torch

from tokenmix_core.testing.benchmarking import measure, measure_step, mixed_lengths


def test_mixed_lengths_fill_the_tokens_and_differ():
    lengths = mixed_lengths(65536)
    assert lengths.sum() == 65536
    assert len(lengths) == 32
    assert lengths.min() >= 128
    assert lengths.max() > 16 * lengths.min()


def test_a_peer_that_fails_at_a_shape_is_left_out_and_named():
    x = torch.randn(4, requires_grad=True)

    def broken():
        raise KeyError("no kernel for this size")

    forwards = {"ours": x.exp, "works": x.sin, "breaks": broken, "has no gradient": lambda: x.detach().cos()}
    with pytest.warns(UserWarning, match="does not run here") as warned:
        rows = measure("op", "B1", "cpu", forwards, (x,), repeats=2)
    assert [row["impl"] for row in rows] == ["ours", "works"]
    assert [str(w.message).split(" does not")[0] for w in warned] == ["breaks", "has no gradient"]
    with pytest.raises(KeyError):
        measure("op", "B1", "cpu", {"ours": broken}, (x,), repeats=2)


def test_a_peer_that_computes_something_else_is_left_out_where_all_should_be_alike():
    x = torch.randn(4, requires_grad=True)
    forwards = {"ours": x.exp, "close": lambda: 1.01 * x.exp(), "wrong": x.sin}
    with pytest.warns(UserWarning, match="wrong does not run here: .*differs"):
        rows = measure("op", "B1", "cpu", forwards, (x,), repeats=2, alike=True)
    assert [row["impl"] for row in rows] == ["ours", "close"]
    assert len(measure("op", "B1", "cpu", forwards, (x,), repeats=2)) == 3


def test_a_step_is_compared_with_peers_that_see_the_state_before_it_is_updated():
    x, state = torch.randn(4), torch.randn(4)

    def ours():
        state.mul_(0.9)
        return state + x

    # the last one takes an argument for another, as calls by position may
    forwards = {"ours": ours, "peer": lambda: 0.9 * state + x, "wrong": lambda: 0.9 * state * x}
    with pytest.warns(UserWarning, match="wrong does not run here: .*differs"):
        rows = measure_step("op", "B1", "cpu", forwards)
    assert [(row["impl"], row["fwd_ms"] > 0) for row in rows] == [("ours", True), ("peer", True)]
