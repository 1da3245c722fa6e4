"""Test that all forms of modes are equivalent, and that training draws modes by seed and row only."""

import pytest
import torch

from tokenmix_core.modeling import Span
from tokenmix_core.training.data import MQARRows
from tokenmix_oryx.modes import Modes, draw_modes, resolve

SCHEDULE = [(0, "linear"), (3, "attention"), (7, "linear")]
CPU = torch.device("cpu")


def expected(positions):
    return (positions >= 3) & (positions < 7)


def test_a_single_mode_needs_no_tensor():
    assert resolve("linear", Span(2, 5, CPU)) == Modes("linear")
    assert resolve([(0, "attention")], Span(2, 5, CPU)) == Modes("attention")


@pytest.mark.parametrize(("past", "tokens", "mode"), [(0, 3, "linear"), (3, 4, "attention"), (9, 2, "linear")])
def test_call_within_one_part_of_a_schedule_has_one_mode(past, tokens, mode):
    assert resolve(SCHEDULE, Span(2, tokens, CPU, past=past)) == Modes(mode)


def test_a_schedule_counts_the_tokens_of_the_cache():
    modes = resolve(SCHEDULE, Span(2, 5, CPU, past=4))
    assert modes.uniform is None
    assert torch.equal(modes.attention, expected(torch.arange(4, 9)).expand(2, -1))


def test_a_schedule_does_not_count_padding():
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    modes = resolve(SCHEDULE, Span(2, 9, CPU, mask=mask))
    assert torch.equal(modes.attention, expected(torch.tensor([[*range(9), *range(5)]])))


def test_schedule_restarts_in_each_packed_sequence():
    cu_seqlens = torch.tensor([0, 5, 5, 13])
    modes = resolve(SCHEDULE, Span(1, 13, CPU), cu_seqlens)
    assert torch.equal(modes.attention, expected(torch.tensor([[*range(5), *range(8)]])))


@pytest.mark.parametrize("packed", [False, True])
def test_shares_refer_to_sequences_without_padding(packed):
    schedule = [(0.0, "linear"), (0.75, "attention")]
    if packed:
        modes = resolve(schedule, Span(1, 12, CPU), torch.tensor([0, 8, 12]))
    else:
        modes = resolve(schedule, Span(2, 8, CPU, mask=torch.arange(8) >= torch.tensor([[0], [4]])))
    assert torch.equal(modes.attention, torch.tensor([[*([False] * 6), True, True, False, False, False, True]]))
    whole = resolve(schedule, Span(2, 8, CPU)).attention
    assert torch.equal(whole, (torch.arange(8) >= 6).expand(2, -1))


def test_a_tensor_is_packed_with_the_tokens():
    mode = torch.rand(2, 6) < 0.5
    mask = torch.arange(6) >= torch.tensor([[0], [2]])
    assert resolve(mode, Span(2, 6, CPU)).attention is mode
    assert torch.equal(resolve(mode, Span(2, 6, CPU, mask=mask)).attention, mode[mask][None])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("softmax", "'linear' or 'attention', got 'softmax'"),
        (3, "got int"),
        ([], "list of"),
        ([(0, "linear", 1)], "pairs"),
        ([(1, "linear")], "increase from 0"),
        ([(0, "linear"), (4, "attention"), (4, "linear")], "increase from 0"),
        ([(0, "linear"), (4, "sparse")], "got 'sparse'"),
        ([(0, "linear"), (0.5, "attention"), (7, "linear")], "all be positions"),
        ([(0.0, "linear"), (1.5, "attention")], "from 0 to"),
        (torch.zeros(2, 5), "of bool"),
        (torch.zeros(2, 4, dtype=torch.bool), r"\[2, 5\], got \[2, 4\]"),
    ],
)
def test_invalid_modes_raise(mode, message):
    with pytest.raises(ValueError, match=message):
        resolve(mode, Span(2, 5, CPU))


def test_shares_need_the_whole_sequence():
    with pytest.raises(ValueError, match="continues 4 tokens"):
        resolve([(0.0, "linear"), (0.5, "attention")], Span(2, 5, CPU, past=4))


def test_draws_depend_only_on_seed_and_row():
    draws = {(s, i): draw_modes(4096, seed=s, index=i).tolist() for s in (0, 1) for i in range(3)}
    for (seed, index), modes in draws.items():
        assert draw_modes(4096, seed=seed, index=index).tolist() == modes
    assert len(set(map(tuple, draws.values()))) == 6


def test_a_quarter_of_chunks_attend():
    modes = torch.stack([draw_modes(2000, seed=0, index=i) for i in range(800)])
    chunks = torch.nn.functional.pad(modes, (0, 48)).unflatten(1, (16, 128))
    whole = chunks[:, :15]
    assert torch.equal(whole.all(-1), whole.any(-1))
    # the last chunk has only 80 tokens
    assert set(chunks[:, 15].sum(-1).tolist()) == {0, 80}
    share = whole.any(-1).double().mean(0)
    # five standard errors
    assert ((share - 0.25).abs() < 5 * (0.25 * 0.75 / 800) ** 0.5).all()
    # neighbouring chunks are drawn independently
    both = (whole[:, :-1].any(-1) & whole[:, 1:].any(-1)).double().mean()
    assert abs(both - 1 / 16) < 0.01


def test_a_sequence_has_one_mode_under_sequence_assignment():
    modes = torch.stack([draw_modes(300, seed=0, index=i, assignment="sequence") for i in range(2000)])
    assert torch.equal(modes.all(1), modes.any(1))
    assert abs(modes[:, 0].double().mean() - 0.25) < 0.05


def test_invalid_draw_arguments_raise():
    for wrong in ({"assignment": "token"}, {"chunk_size": 0}, {"attention_probability": 1.5}):
        with pytest.raises(ValueError, match=r"assignment|chunk_size"):
            draw_modes(8, seed=0, index=0, **wrong)


def test_modes_are_independent_of_recall_rows():
    rows = MQARRows(256, 8, 64, seed=0)
    first: dict[int, list[float]] = {}
    for index in range(1500):
        # all examples in a row have one length, which the number of boundaries tells
        first.setdefault(len(rows[index]["boundaries"]), []).append(float(draw_modes(256, seed=0, index=index)[0]))
    for drawn in (values for values in first.values() if len(values) > 50):
        share = sum(drawn) / len(drawn)
        assert abs(share - 0.25) < 5 * (0.25 * 0.75 / len(drawn)) ** 0.5, {n: len(v) for n, v in first.items()}
    assert sum(len(values) > 50 for values in first.values()) >= 3
