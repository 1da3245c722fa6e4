"""Test that losses by position are those of the definition, however the sequence is split."""

import math

import numpy as np
import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation import text
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.perplexity import (
    bigram_loss,
    cut_sequences,
    loss_by_position,
    perplexity_suite,
    smooth,
    token_losses,
)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 259, (3, 40), generator=torch.Generator().manual_seed(1))


def test_losses_are_negative_log_probabilities_of_the_next_tokens(model, ids):
    with torch.no_grad():
        log_p = model(input_ids=ids).logits.double().log_softmax(-1)
    expected = -log_p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(token_losses(model, ids).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("piece", [1, 7, 39])
def test_losses_of_pieces_equal_those_of_the_whole(model, ids, piece):
    torch.testing.assert_close(token_losses(model, ids, piece=piece), token_losses(model, ids), rtol=1e-4, atol=1e-4)


def test_batch_size_changes_nothing(model, ids):
    losses = [loss_by_position(model, ids, batch_size=size, progress=False) for size in (1, 2, 3)]
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-5)
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
    np.testing.assert_allclose(losses[0], token_losses(model, ids).double().mean(0).numpy(), rtol=1e-5)


def test_bigram_probabilities_sum_to_one():
    train = np.random.default_rng(0).integers(0, 6, 200)
    p = [[math.exp(-bigram_loss(train, np.array([a, b]), 6)) for b in range(6)] for a in range(6)]
    np.testing.assert_allclose(np.sum(p, 1), 1)


def test_bigram_learns_what_follows_from_the_last_token():
    cycle = np.tile(np.arange(8), 1000)
    assert bigram_loss(cycle, cycle[:80], 8) < 0.01
    noise = np.random.default_rng(0).integers(0, 8, 100_000)
    assert abs(bigram_loss(noise, noise[:20_000].reshape(10, 2000), 8) - math.log(8)) < 0.01


def test_smoothing_is_a_moving_average():
    x = np.random.default_rng(0).normal(size=30)
    np.testing.assert_allclose(smooth(x, 1), x)
    np.testing.assert_allclose(smooth(np.ones(9), 4), 1)
    np.testing.assert_allclose(smooth(x, 5)[10], x[8:13].mean())
    np.testing.assert_allclose(smooth(x, 5)[0], x[:3].mean())


def test_sequences_do_not_overlap_and_reach_both_ends():
    sequences = cut_sequences(np.arange(1000), 64, 10)
    assert sequences.shape == (10, 64)
    assert len(set(sequences.flatten().tolist())) == 640
    assert int(sequences[0, 0]) == 0
    assert int(sequences[-1, -1]) == 999


def test_suite_rows_cover_all_positions(model, tokenizer, text_file):
    options = EvalOptions(lengths=(200,), limit=5, text=text_file, progress=False)
    result = perplexity_suite(model, tokenizer, options)
    *parts, whole = result["rows"]
    assert [row["position"] for row in parts] == ["1-64", "65-128", "129-199"]
    assert whole["tokens"] == 5 * 199 == sum(row["tokens"] for row in parts)
    mean = sum(row["loss"] * row["tokens"] for row in parts) / whole["tokens"]
    assert whole["loss"] == pytest.approx(mean)
    assert whole["perplexity"] == pytest.approx(math.exp(mean))
    # each token is one byte, so bits per byte are bits per token
    assert whole["bits per byte"] == pytest.approx(mean / math.log(2))
    assert list(result["plots"][0]["series"]) == ["model"]
    assert [len(values) for values in result["samples"]] == [5] * 4
    assert [np.mean(values) for values in result["samples"]] == pytest.approx([row["loss"] for row in result["rows"]])


@pytest.mark.parametrize("sentence", ["机器学习的语言模型。", "naïve café Ωμέγα 😀", "plain"])
def test_a_character_that_is_cut_has_the_bytes_of_its_part(tokenizer, sentence):
    tokens = np.array(tokenizer(sentence * 200)["input_ids"])
    for length in (64, 63, 50):
        rows = cut_sequences(tokens, length, 20).numpy()
        assert text.bytes_per_token(rows, tokenizer) == 1
    rows[:, 7] = tokenizer.eos_token_id
    assert text.bytes_per_token(rows, tokenizer) == pytest.approx(49 / 50)


def test_bytes_of_tokens_that_are_not_byte_level_are_those_of_the_decoded_text():
    class Pieces:
        """Decodes token 3 as a word of six bytes; any other token is a byte, which decodes to U+FFFD if it is alone."""

        def batch_decode(self, rows, **_):
            return ["".join("héllo" if i == 3 else "\ufffd" for i in row) for row in rows]

    assert text.bytes_per_token(np.array([[1, 3, 3, 2], [3, 3, 1, 2]]), Pieces()) == (14 + 14) / 8


def test_of_several_lengths_the_measured_one_is_named(llama, tokenizer, text_file, capsys):
    options = EvalOptions(lengths=(64, 128), limit=2, text=text_file, progress=False)
    assert perplexity_suite(llama, tokenizer, options)["settings"]["length"] == 128
    told = "perplexity-by-position measures at one length: 128 tokens, the largest of 64, 128\n"
    assert capsys.readouterr().err == told
    assert EvalOptions(lengths=(64,)).one_length("copy", 32) == 64
    assert EvalOptions(max_length=48).one_length("copy", 32) == 48
    assert EvalOptions().one_length("copy", 32) == 32
    assert capsys.readouterr().err == ""


def test_a_text_without_context_follows_the_token_that_separates_documents(tokenizer):
    from tokenizers.processors import TemplateProcessing

    assert text.document_separator(tokenizer) == tokenizer.eos_token_id
    begun = byte_tokenizer()
    begun.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begun.bos_token_id)]
    )
    assert text.document_separator(begun) == begun.bos_token_id


def test_a_text_with_a_training_part_brings_its_bigram_model(llama, tokenizer, token_file):
    options = EvalOptions(lengths=(64,), limit=4, text=token_file, progress=False)
    result = perplexity_suite(llama, tokenizer, options)
    bigram = result["rows"][-1]
    assert bigram["predictor"] == "bigram"
    held_out = text.text_tokens(token_file, tokenizer, 4 * 4 * 64)
    train = text.training_tokens(token_file, tokenizer)
    expected = bigram_loss(train, cut_sequences(held_out, 64, 4).numpy(), len(tokenizer))
    assert bigram["loss"] == pytest.approx(expected)
    # the words consist of few pairs of letters, which the bigram model learns, while the model is untrained
    assert bigram["loss"] < 1.5 < result["rows"][-2]["loss"]


def test_token_file_and_its_text_give_the_same_tokens(tokenizer, token_file):
    end = tokenizer.eos_token_id
    from_documents = [i for d in text.documents(token_file, tokenizer) for i in [*tokenizer(d)["input_ids"], end]]
    assert text.text_tokens(token_file, tokenizer, 10**9).tolist() == from_documents


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: token_losses(m, torch.zeros(1, 1, dtype=torch.long)), "at least 2"),
        (lambda m: token_losses(m, torch.zeros(1, 5, dtype=torch.long), piece=0), "piece"),
        (lambda m: smooth(np.ones(3), 0), "window"),
        (lambda m: bigram_loss(np.arange(5), np.arange(5), 5000), "4096"),
        (lambda m: bigram_loss(np.arange(5), np.arange(5), 4), "token 4"),
        (lambda m: bigram_loss(np.arange(1), np.arange(5), 5), "at least 2"),
        (lambda m: cut_sequences(np.arange(5), 6, 1), "5 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(llama, call, said):
    with pytest.raises(ValueError, match=said):
        call(llama)
