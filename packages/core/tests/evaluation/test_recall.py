"""Test recall scores: a model that recalls gets one, a model that does not gets the score of guessing."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tokenmix_core.data.synthetic import NIAH_TASKS, mqar, niah
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.perplexity import token_losses
from tokenmix_core.evaluation.recall import (
    answer_loss,
    copying_suite,
    generate_text,
    mqar_suite,
    niah_examples,
    niah_suite,
    score_niah,
    score_recall,
)


class Fake:
    """A model that has only the attributes that the measurements need."""

    device = torch.device("cpu")
    training = False

    def __init__(self, vocab_size=264):
        self.vocab_size = vocab_size

    def get_output_embeddings(self):
        return SimpleNamespace(weight=torch.zeros(self.vocab_size, 1))


class Fixed(Fake):
    """Predicts token 5 always."""

    def __call__(self, input_ids, use_cache=None):
        five = torch.full_like(input_ids, 5)
        return SimpleNamespace(logits=10.0 * torch.nn.functional.one_hot(five, self.vocab_size))


class Induction(Fake):
    """Predicts the token that followed the first occurrence of the current token."""

    def __call__(self, input_ids, use_cache=None):
        first = (input_ids[:, :, None] == input_ids[:, None, :]).int().argmax(-1)
        following = input_ids.gather(1, (first + 1).clamp(max=input_ids.shape[1] - 1))
        return SimpleNamespace(logits=10.0 * torch.nn.functional.one_hot(following, self.vocab_size))


class Reader(Fake):
    """Answers with the number or uuid of the needle, changed by `garble`."""

    def __init__(self, tokenizer, garble=lambda answer: answer):
        super().__init__()
        self.tokenizer, self.garble = tokenizer, garble

    def __call__(self, input_ids, use_cache=None, logits_to_keep=0):
        return SimpleNamespace(logits=torch.zeros(*input_ids[:, -logits_to_keep:].shape, self.vocab_size))

    def generate(self, input_ids, attention_mask, max_new_tokens, **_):
        rows = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            prompt = self.tokenizer.decode(row[mask.bool()])
            answer = self.garble(re.search(r"is: (\S+)\.", prompt).group(1))
            said = self.tokenizer(" " + answer + ".")["input_ids"][:max_new_tokens]
            rows.append(row.tolist() + said + [self.tokenizer.pad_token_id] * (max_new_tokens - len(said)))
        return torch.tensor(rows)


@pytest.mark.parametrize("pairs", [1, 8])
def test_induction_solves_mqar(pairs):
    accuracy, loss = score_recall(Induction(), mqar(10, seq_len=64, num_pairs=pairs, vocab_size=200), batch_size=3)
    assert accuracy == 1
    assert loss < 0.05


def test_a_uniform_model_has_the_loss_of_its_vocabulary(llama):
    examples = mqar(20, seq_len=64, num_pairs=8, vocab_size=200)
    accuracy, loss = score_recall(llama, examples, batch_size=7)
    assert accuracy < 0.1
    assert abs(loss - torch.tensor(264.0).log()) < 0.2


def test_scores_do_not_depend_on_the_batch_size(model):
    examples = mqar(7, seq_len=48, num_pairs=4, vocab_size=264)
    assert score_recall(model, examples, batch_size=2) == pytest.approx(score_recall(model, examples, batch_size=7))


def test_tokens_outside_the_vocabulary_are_refused(llama):
    with pytest.raises(ValueError, match="vocabulary of 264"):
        score_recall(llama, mqar(1, vocab_size=8192))


def test_mqar_suite_measures_every_size_that_fits():
    result = mqar_suite(Induction(), None, EvalOptions(lengths=(64, 32), limit=3, progress=False))
    assert [row["task"] for row in result["rows"]] == [
        *("mqar-64-4", "mqar-64-8", "mqar-64-16"),
        *("mqar-32-4", "mqar-32-8"),
    ]
    assert all(row["accuracy"] == 1 for row in result["rows"])
    assert result["plots"][0]["series"] == {
        "64 tokens": ([4, 8, 16], [1, 1, 1]),
        "32 tokens": ([4, 8], [1, 1]),
        "chance": ([4, 8, 16], [1 / 4, 1 / 8, 1 / 16]),
    }
    assert result["samples"] == [[1, 1, 1]] * 5
    chosen = mqar_suite(Induction(), None, EvalOptions(lengths=(64,), limit=3, tasks=("mqar-64-8",), progress=False))
    assert chosen["rows"] == [row for row in result["rows"] if row["task"] == "mqar-64-8"]


def test_copying_suite_measures_both_kinds_at_every_size_that_fits():
    result = copying_suite(Fixed(), None, EvalOptions(lengths=(64, 32), limit=3, progress=False))
    assert [row["task"] + f"-{row['length']}-{row['tokens']}" for row in result["rows"]] == [
        f"{kind}-{length}-{n}"
        for kind in ("copying", "selective-copying")
        for length, most in ((64, 16), (32, 8))
        for n in (4, 8, 16)
        if n <= most
    ]
    assert [row["accuracy"] for row in result["rows"]] == [np.mean(values) for values in result["samples"]]
    # the model always predicts one token, which is right in about one of 62 cases
    assert all(row["accuracy"] < 0.3 for row in result["rows"])


def test_mqar_suite_takes_the_vocabulary_it_is_given():
    result = mqar_suite(Induction(), None, EvalOptions(lengths=(64,), limit=1, vocab_size=20, progress=False))
    # there are at most 10 keys, so 16 pairs do not fit
    assert [row["pairs"] for row in result["rows"]] == [4, 8]


@pytest.mark.parametrize(
    ("suite", "options", "told"),
    [
        (mqar_suite, {"vocab_size": 1}, "vocabulary of at least 10 tokens, got lengths 64, 128, 256, 512 and 1 tokens"),
        (mqar_suite, {"lengths": (8, 12)}, "length of at least 16 .* got lengths 8, 12"),
        (copying_suite, {"lengths": (8, 12)}, "length of at least 16 tokens, got 12"),
        (copying_suite, {"vocab_size": 1}, "vocab_size must be at least 4"),
    ],
)
def test_sizes_that_allow_no_example_are_refused(suite, options, told):
    with pytest.raises(ValueError, match=told):
        suite(Induction(), None, EvalOptions(limit=1, progress=False, **options))


class Guess(Fake):
    """Predicts a randomly drawn value (or token) from the start of the sequence, another one at every position."""

    def __init__(self, shown, vocab_size):
        super().__init__(vocab_size)
        self.shown, self.generator = shown, torch.Generator().manual_seed(0)

    def __call__(self, input_ids, use_cache=None):
        drawn = torch.randint(len(self.shown), input_ids.shape, generator=self.generator)
        predicted = input_ids.gather(1, torch.tensor(self.shown)[drawn])
        return SimpleNamespace(logits=torch.nn.functional.one_hot(predicted, self.vocab_size))


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize(
    ("suite", "task", "shown"),
    [(mqar_suite, "mqar-64-{}", lambda n: range(1, 2 * n, 2)), (copying_suite, "copying-64-{}", range)],
)
def test_the_chance_is_that_of_a_guess_among_the_shown_values(suite, task, shown, size):
    options = EvalOptions(lengths=(64,), limit=500, tasks=(task.format(size),), vocab_size=40, progress=False)
    row = suite(Guess(list(shown(size)), 40), None, options)["rows"][0]
    error = (row["chance"] * (1 - row["chance"]) / (500 * size)) ** 0.5
    assert abs(row["accuracy"] - row["chance"]) < 4 * error


def test_niah_finds_what_a_reader_says(tokenizer, text_file):
    options = EvalOptions(lengths=(700, 500), limit=4, batch_size=3, text=text_file, progress=False)
    result = niah_suite(Reader(tokenizer), tokenizer, options)
    assert [(row["task"], row["length"]) for row in result["rows"]] == [
        (f"s-niah-{i}", length) for i in (1, 2, 3) for length in (500, 700)
    ]
    assert all(row["accuracy"] == 1 for row in result["rows"])
    # the logits are uniform
    assert result["rows"][0]["answer loss"] == pytest.approx(torch.tensor(264.0).log().item(), rel=1e-5)
    by_length, by_depth = result["plots"]
    assert by_length["series"]["s-niah-2"] == ([500, 700], [1, 1])
    depths, accuracies = by_depth["series"]["s-niah-2"]
    assert 0 < depths[0] < 0.3
    assert depths[-1] > 0.8
    assert set(accuracies) == {1}
    for row in result["rows"]:
        assert 0 <= row["least depth"] < 0.25
        assert 0.4 < row["mean depth"] < 0.6
        assert 0.75 < row["greatest depth"] <= 1


@pytest.mark.parametrize("task", NIAH_TASKS)
@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_the_end_of_a_prompt_holds_its_even_share_of_needles(task, length):
    # few words end a sentence, as in source code
    rng = random.Random(0)
    words = ["x" * rng.randint(1, 12) + "." * (rng.random() < 0.05) for _ in range(4000)]
    shown = 320

    class Characters:
        def __call__(self, text, **_):
            return {"input_ids": text}

    examples = niah_examples(task, Characters(), length, 100, haystack=words)
    prompts = [example.context + example.question for example in examples]
    visible = np.mean([example.answer in prompt[-shown:] for example, prompt in zip(examples, prompts, strict=True)])
    expected = []
    for example, prompt in zip(examples, prompts, strict=True):
        needle = re.search(r"One of the special .*? is: \S+", example.context).group()
        after = shown - len(example.question) - len(example.answer) - 1
        expected.append(np.clip(after / (len(prompt) - len(example.question) - prompt.index("\n") - len(needle)), 0, 1))
    assert visible == pytest.approx(np.mean(expected), abs=0.04)
    depths = np.sort([example.depth for example in examples])
    assert np.abs(depths - (np.arange(100) + 0.5) / 100).max() < 0.06
    # each length and task has its own keys and values, and each example its own span of text
    other = niah_examples(task, Characters(), length + 1, 100, haystack=words)
    assert len({example.answer for example in (*examples, *other)}) == 200
    if task != "s-niah-1":
        assert len({prompt.split("\n")[1][:25] for prompt in prompts}) > 80
        another = "s-niah-2" if task == "s-niah-3" else "s-niah-3"
        same = niah_examples(another, Characters(), length, 100, haystack=words)
        assert sum(a.question.split()[7] == b.question.split()[7] for a, b in zip(examples, same, strict=True)) < 5


def test_niah_counts_only_right_answers(tokenizer):
    def wrong_for_even(answer):
        return answer if int(answer) % 2 else answer[::-1]

    examples = [niah("s-niah-1", max_tokens=500, count_tokens=len, depth=0.5, index=i) for i in range(12)]
    scores = score_niah(Reader(tokenizer, wrong_for_even), tokenizer, examples, batch_size=5)
    assert [score.found for score in scores] == [int(e.answer) % 2 == 1 for e in examples]
    assert 0 < sum(score.found for score in scores) < 12


def test_generation_does_not_depend_on_the_batch(model, tokenizer):
    prompts = ["a", "a much longer prompt than the first", "middling"]
    together = generate_text(model, tokenizer, prompts, max_new_tokens=8)
    assert together == [generate_text(model, tokenizer, [p], max_new_tokens=8)[0] for p in prompts]


def test_answer_loss_is_the_mean_loss_of_the_answers_tokens(model, tokenizer):
    example = niah("s-niah-1", max_tokens=450, count_tokens=len, depth=0.5)
    ids = tokenizer(f"{example.context}{example.question} {example.answer}", return_tensors="pt")["input_ids"]
    expected = token_losses(model, ids)[0, -len(example.answer) - 1 :].mean()
    assert answer_loss(model, tokenizer, example) == pytest.approx(float(expected), rel=1e-4)
