"""Test that the second copy is where it should be, and that the measured gain is due only to recall."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tokenmix_core.evaluation.copying import copy_distances, copy_losses, copy_suite, with_copy
from tokenmix_core.evaluation.options import EvalOptions

LENGTH, PASSAGE = 64, 8


class Echo(nn.Module):
    """Predicts the token that was `distance` positions before the next one."""

    def __init__(self, distance: int) -> None:
        super().__init__()
        self.distance, self.head = distance, nn.Linear(4, 264)
        self.device = torch.device("cpu")

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 264)
        known = input_ids[:, : input_ids.shape[1] - self.distance + 1]
        logits[:, self.distance - 1 :].scatter_(-1, known[..., None], 20.0)
        return SimpleNamespace(logits=logits)


@pytest.fixture
def windows():
    # no token occurs twice in a window, so that only a copy repeats tokens
    rows = [torch.randperm(250, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return torch.stack(rows)[:, : 2 * (LENGTH - PASSAGE)]


@pytest.mark.parametrize("length", [16, 50, 64, 256, 2048, 100_000])
def test_distances_double_until_the_first_copy_has_its_length_of_text_before_it(length):
    passage, distances = copy_distances(length)
    assert passage == min(32, length // 8)
    assert distances[0] == passage
    assert distances[-1] + 2 * passage == length
    assert all(b == 2 * a for a, b in pairwise(distances[:-1]))
    assert distances == sorted(set(distances))


@pytest.mark.parametrize("distance", copy_distances(LENGTH)[1])
def test_a_sequence_is_running_text_and_then_what_it_held_before(windows, distance):
    sequences = with_copy(windows, LENGTH, PASSAGE, distance)
    assert sequences.shape == (3, LENGTH)
    torch.testing.assert_close(sequences[:, :-PASSAGE], windows[:, distance : distance + LENGTH - PASSAGE])
    end = LENGTH - distance
    torch.testing.assert_close(sequences[:, end - PASSAGE : end], sequences[:, -PASSAGE:])
    # the passages are the same at every distance
    torch.testing.assert_close(sequences[:, -PASSAGE:], with_copy(windows, LENGTH, PASSAGE, None)[:, -PASSAGE:])


def test_without_a_first_copy_another_window_stands_before_the_passage(windows):
    windows = windows + 1000 * torch.arange(3)[:, None]
    sequences = with_copy(windows, LENGTH, PASSAGE, None)
    assert (sequences[:, :-PASSAGE] // 1000 == torch.tensor([[2], [0], [1]])).all()
    assert (sequences[:, -PASSAGE:] // 1000 == torch.tensor([[0], [1], [2]])).all()


@pytest.mark.parametrize("distance", [8, 16, 48])
def test_losses_are_those_of_the_two_copies(model, windows, distance):
    first, second = copy_losses(model, windows, LENGTH, PASSAGE, distance, batch_size=2)
    sequences = with_copy(windows, LENGTH, PASSAGE, distance)
    with torch.no_grad():
        log_p = model(input_ids=sequences).logits.double().log_softmax(-1)
    expected = -log_p[:, :-1].gather(-1, sequences[:, 1:, None]).squeeze(-1)
    for found, end in ((first, LENGTH - distance), (second, LENGTH)):
        torch.testing.assert_close(
            torch.from_numpy(found), expected[:, end - PASSAGE - 1 : end - 1], rtol=1e-4, atol=1e-4
        )


def test_what_is_recalled_at_one_distance_is_saved_there_alone(tokenizer, text_file):
    options = EvalOptions(lengths=(LENGTH,), limit=20, text=text_file, progress=False)
    rows = copy_suite(Echo(16), tokenizer, options)["rows"]
    assert [row["distance"] for row in rows] == [8, 16, 32, 48]
    for row in rows:
        if row["distance"] == 16:
            assert row["second copy"] < 1e-3
            assert row["saved"] == pytest.approx(row["not seen before"], rel=1e-3)
        else:
            # at other distances a token is repeated only by chance
            assert abs(row["saved"]) < 0.3 * row["not seen before"]
        assert row["first copy"] > 1
        assert row["saved"] == pytest.approx(row["not seen before"] - row["second copy"])
        assert row["passages"] == 20


def test_one_distance_can_be_chosen(llama, tokenizer, text_file):
    options = EvalOptions(lengths=(LENGTH,), limit=2, text=text_file, tasks=("copy-64-48",), progress=False)
    result = copy_suite(llama, tokenizer, options)
    assert [row["distance"] for row in result["rows"]] == [48]
    assert [len(plot["series"]) for plot in result["plots"]] == [3, 2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(lengths=(15,)), "at least 16 tokens, got 15"),
        (dict(limit=1), "windows of text, 112 tokens each, got one"),
        (dict(lengths=(100_000,)), "too short"),
    ],
)
def test_what_cannot_be_compared_is_refused(llama, tokenizer, text_file, changes, said):
    options = EvalOptions(**{"lengths": (LENGTH,), "text": text_file, "progress": False, **changes})
    with pytest.raises(ValueError, match=said):
        copy_suite(llama, tokenizer, options)
