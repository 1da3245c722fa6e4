"""Test synthetic recall data: each question can be answered from the context, and only from there."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmix_core.data.synthetic import IGNORE_INDEX, NIAH_TASKS, NOISE, copying, mqar, niah

WORDS = [f"word{i}." if i % 9 == 8 else f"word{i}" for i in range(400)]


@settings(max_examples=40, deadline=None)
@given(
    num_pairs=st.integers(1, 12),
    slack=st.integers(0, 40),
    extra=st.integers(0, 30),
    seed=st.integers(0, 2**32),
    filler=st.booleans(),
    power=st.sampled_from([0.01, 0.5, 1.0]),
)
def test_mqar_asks_each_key_once_and_labels_it_with_its_value(num_pairs, slack, extra, seed, filler, power):
    seq_len, vocab = 4 * num_pairs + slack, 2 * num_pairs + 2 + extra
    ids, labels = mqar(
        3, seq_len=seq_len, num_pairs=num_pairs, vocab_size=vocab, seed=seed, random_filler=filler, power=power
    )
    assert ids.shape == labels.shape == (3, seq_len)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < vocab
    for row, wanted in zip(ids, labels, strict=True):
        keys, values = row[0 : 2 * num_pairs : 2].tolist(), row[1 : 2 * num_pairs : 2].tolist()
        assert len(set(keys)) == len(set(values)) == num_pairs
        assert max(keys) < vocab // 2 <= min(values)
        scored = (wanted != IGNORE_INDEX).nonzero().flatten()
        # the position before a label holds the key
        asked = row[scored - 1].tolist()
        assert sorted(asked) == sorted(keys)
        assert wanted[scored].tolist() == [dict(zip(keys, values, strict=True))[key] for key in asked]
        assert int(scored.min()) > 2 * num_pairs


def test_mqar_example_depends_on_seed_and_index_alone():
    options = {"seq_len": 64, "num_pairs": 8, "vocab_size": 100, "seed": 5}
    whole, part = mqar(8, **options), mqar(3, first=4, **options)
    assert torch.equal(whole.input_ids[4:7], part.input_ids)
    assert torch.equal(whole.labels[4:7], part.labels)
    other = mqar(8, **{**options, "seed": 6})
    assert not torch.equal(whole.input_ids, other.input_ids)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    slack=st.integers(1, 40),
    vocab=st.integers(4, 70),
    selective=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_copying_asks_for_all_tokens_in_their_order(num_tokens, slack, vocab, selective, seed):
    seq_len = 2 * num_tokens + slack
    options = {"seq_len": seq_len, "num_tokens": num_tokens, "vocab_size": vocab, "selective": selective, "seed": seed}
    ids, labels = copying(3, **options, first=7)
    for row, wanted in zip(ids, labels, strict=True):
        scored = (wanted != IGNORE_INDEX).nonzero().flatten()
        assert scored.tolist() == list(range(seq_len - num_tokens, seq_len))
        assert torch.equal(wanted[scored], row[scored])
        before = row[: seq_len - num_tokens - 1]
        assert int(row[seq_len - num_tokens - 1]) == 1
        assert torch.equal(before[before != 0], row[scored])
        assert selective or bool((before[:num_tokens] != 0).all())
        assert 2 <= int(row[scored].min()) <= int(row[scored].max()) < vocab
    assert torch.equal(copying(1, **options, first=9).input_ids[0], ids[2])


def test_mqar_power_moves_queries_towards_the_pairs():
    def mean_position(power):
        labels = mqar(200, seq_len=256, num_pairs=4, power=power).labels
        return float((labels != IGNORE_INDEX).nonzero()[:, 1].double().mean())

    near, even = mean_position(0.01), mean_position(1.0)
    # an even spread over 8 ... 255 has its mean at about 132
    assert abs(even - 132) < 8
    assert near < even - 30


def test_mqar_without_random_filler_leaves_zeros():
    ids, _ = mqar(2, seq_len=64, num_pairs=4, random_filler=False)
    assert (ids != 0).sum(1).tolist() == [12, 12]


@pytest.mark.parametrize("task", NIAH_TASKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("max_tokens", [450, 2000, 9000])
def test_needle_is_there_once_and_the_prompt_fills_the_length(task, depth, max_tokens):
    example = niah(task, max_tokens=max_tokens, count_tokens=len, depth=depth, haystack=WORDS, seed=3, index=7)
    prompt = example.context + example.question
    assert prompt.count(example.answer) == 1
    assert example.tokens == len(prompt)
    assert example.tokens + 1 + len(example.answer) <= max_tokens
    # one more unit of the haystack (the longest one) would not fit, or nearly so
    assert example.tokens + 1 + len(example.answer) > max_tokens - 2 * (len(NOISE) + 1)
    assert re.fullmatch(r"\d{7}" if task != "s-niah-3" else r"[0-9a-f-]{36}", example.answer)
    key = re.search(r"for (\S+) is: ", example.context).group(1)
    assert key in example.question


def test_needle_stands_at_the_boundary_of_words_nearest_to_the_wanted_depth():
    for task in NIAH_TASKS:
        for depth in np.linspace(0, 1, 11):
            example = niah(task, max_tokens=8000, count_tokens=len, depth=depth, haystack=WORDS)
            assert abs(example.depth - depth) < 0.002
            before, after = example.context.split("\n", 1)[1].split("One of the special")
            assert before == "" or before[-1] in " \n"
            assert len(before) == pytest.approx(depth * (len(before) + len(after) - len(example.answer) - 55), abs=80)


def test_needles_differ_by_index_and_seed_and_repeat_otherwise():
    def make(**changed):
        return niah("s-niah-1", **{"max_tokens": 600, "count_tokens": len, "depth": 0.5, "index": 1, **changed})

    assert make() == make()
    assert len({make().answer, make(index=2).answer, make(seed=1).answer, make(max_tokens=601).answer}) == 4


def test_a_short_haystack_is_repeated():
    example = niah("s-niah-2", max_tokens=3000, count_tokens=len, depth=0.5, haystack=["alpha", "beta."])
    assert example.context.count("alpha beta.") > 100


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mqar(1, num_pairs=20, seq_len=64), r"num_pairs=20 and seq_len=64"),
        (lambda: mqar(1, num_pairs=0), "num_pairs=0"),
        (lambda: mqar(-1), "got -1"),
        (lambda: mqar(1, vocab_size=10, num_pairs=8), "at least .* 18"),
        (lambda: mqar(1, power=0), "power"),
        (lambda: niah("s-niah-4", max_tokens=99, count_tokens=len, depth=0.5), "s-niah-4"),
        (lambda: copying(1, seq_len=8, num_tokens=4), "num_tokens=4"),
        (lambda: copying(1, vocab_size=3), "vocab_size"),
        (lambda: copying(-1), "num_examples"),
        (lambda: niah("s-niah-1", max_tokens=99, count_tokens=len, depth=0.5), "max_tokens=99"),
        (lambda: niah("s-niah-1", max_tokens=999, count_tokens=len, depth=1.5), "depth"),
        (lambda: niah("s-niah-2", max_tokens=999, count_tokens=len, depth=0.5), "haystack"),
    ],
)
def test_sizes_that_cannot_be_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
