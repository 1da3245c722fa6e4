import pickle
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.corpora import token_file
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.training.data import (
    IGNORE_INDEX,
    ChunkRows,
    CopyRows,
    MixedRows,
    MQARRows,
    NiahRows,
    collate_joined,
    collate_separate,
    permuted,
)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_permutation_meets_every_index_once(size, seed, epoch):
    assert sorted(permuted(i, size, (seed, epoch)) for i in range(size)) == list(range(size))


def test_permutations_of_epochs_and_seeds_differ_and_need_no_table():
    orders = {tuple(permuted(i, 50, key) for i in range(50)) for key in [(0, 0), (0, 1), (1, 0)]}
    assert len(orders) == 3
    # at once, in the middle of an epoch of a trillion rows
    assert 0 <= permuted(10**12 - 7, 10**12, (0, 0)) < 10**12
    with pytest.raises(ValueError, match="index must be from 0 to 4, got 5"):
        permuted(5, 5, (0, 0))


def test_an_epoch_holds_every_chunk_once_and_the_next_has_another_order(corpus):
    file = TokenFile(corpus)
    rows = ChunkRows(file, 32, seed=3)
    chunks = {bytes(file.tokens[i * 32 : (i + 1) * 32].tobytes()) for i in range(rows.chunks)}
    orders = []
    for epoch in (0, 1):
        ids = [rows[epoch * rows.chunks + i]["input_ids"].numpy().astype(file.tokens.dtype) for i in range(rows.chunks)]
        assert {x.tobytes() for x in ids} == chunks
        orders.append([x.tobytes() for x in ids])
    assert orders[0] != orders[1]
    assert torch.equal(rows[5]["input_ids"], ChunkRows(file, 32, seed=3)[5]["input_ids"])


def test_a_file_shorter_than_a_row_is_refused(corpus):
    with pytest.raises(ValueError, match="fewer than seq_len=1000000"):
        ChunkRows(TokenFile(corpus), 10**6, 0)


class _Counted(torch.utils.data.Dataset):
    def __init__(self, name):
        self.name = name

    def __getitem__(self, index):
        return self.name, index


def test_sources_are_mixed_in_exact_shares_each_in_its_own_order():
    mixed = MixedRows([_Counted("a"), _Counted("b"), _Counted("c")], [2.0, 1.0, 1 / 3], 2000, seed=1)
    assert len(mixed) == 2000
    rows = [mixed[i] for i in range(2000)]
    for name, count in (("a", 600), ("b", 300), ("c", 100)):
        assert [i for n, i in rows if n == name] == list(range(2 * count))
    assert len({n for n, _ in rows[:20]}) > 1, "sources come in runs"


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, 1e-6]])
def test_weights_that_make_no_mixture_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        MixedRows([_Counted("a"), _Counted("b")], weights, 10, 0)


def examples(row):
    """Return the examples of a row, and the pairs and scored positions of each."""
    boundaries = [0, *row["boundaries"].tolist(), len(row["input_ids"])]
    parts = [slice(a, b) for a, b in pairwise(boundaries)]
    return [(row["input_ids"][part], int((row["labels"][part] != IGNORE_INDEX).sum())) for part in parts]


def test_recall_rows_depend_on_their_index_alone():
    a, b = (MQARRows(64, 4, 100, seed=2) for _ in range(2))
    assert torch.equal(a[7]["input_ids"], b[7]["input_ids"])
    assert not torch.equal(a[7]["input_ids"], a[8]["input_ids"])
    with pytest.raises(ValueError, match="num_pairs"):
        MQARRows(8, 4, 100, seed=2)


def test_a_row_is_filled_with_recall_examples_of_one_size():
    rows = MQARRows(500, 64, 1000, seed=2)
    sizes, seen = set(), set()
    for i in range(300):
        *first, (last, pairs) = examples(rows[i])
        assert all(count == pairs and len(ids) <= len(last) < 2 * len(ids) for ids, count in first)
        sizes.add((pairs, len(first[0][0]) if first else 500))
        seen |= {tuple(ids.tolist()) for ids, _ in first}
        # each key comes again, so an example can be answered from itself
        assert {*last[: 2 * pairs : 2].tolist()} <= {*last[2 * pairs :].tolist()}
    lengths = {p: {size for count, size in sizes if count == p} for p, _ in sizes}
    # of 256 tokens there is one example, which takes the rest of the row
    assert lengths.keys() == {2, 4, 8, 16, 32, 64}
    assert lengths[2] == {16, 32, 64, 128, 500}
    assert lengths[32] == {128, 500}
    assert lengths[64] == {500}
    assert len(seen) > 1000


def test_recall_examples_of_joined_documents_have_rows_of_their_own():
    rows = MQARRows(512, 64, 1000, seed=2, packed=False)
    scored = [examples(rows[i]) for i in range(60)]
    assert all(len(row) == 1 for row in scored)
    assert {row[0][1] for row in scored} == {2, 4, 8, 16, 32, 64}


def test_both_ways_of_copying_fill_rows_with_examples_of_their_own():
    plain, selective = (CopyRows(task, 256, 16, 64, seed=2) for task in ("copying", "selective-copying"))
    assert {count for i in range(60) for _, count in examples(selective[i])} == {2, 4, 8, 16}
    assert torch.equal(plain[5]["input_ids"], CopyRows("copying", 256, 16, 64, seed=2)[5]["input_ids"])
    assert not torch.equal(plain[5]["input_ids"], selective[5]["input_ids"])


@pytest.mark.parametrize("packed", [False, True])
def test_recall_examples_grow_to_all_sizes(packed):
    rows = MQARRows(256, 32, 1000, seed=2, packed=packed, ramp_rows=500)

    def sizes(first, last):
        found = [example for i in range(first, last) for example in examples(rows[i])]
        return {count for _, count in found}, max(len(ids) for ids, _ in found)

    # the second of five counts joins after √(1/5) of the ramp
    assert sizes(0, 223) == ({2}, 32 if packed else 256)
    assert sizes(224, 316) == ({2, 4}, 64 if packed else 256)
    assert sizes(448, 500) == sizes(500, 600) == sizes(10**6, 10**6 + 100) == ({2, 4, 8, 16, 32}, 256)


def _facts(row, tokenizer):
    """Return each example's facts, and its scored tokens, as keys and values."""
    found = []
    parts = (np.split(row[name].numpy(), row["boundaries"]) for name in ("input_ids", "labels"))
    for ids, labels in zip(*parts, strict=True):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        hidden = dict(re.findall(r"One of the special magic \w+s for (\S+) is: (\S+)\.", text))
        asked = re.findall(r"\nThe special magic \w+ for (\S+) mentioned in the provided text is (\S+)", text)
        scored = tokenizer.decode(labels[labels != IGNORE_INDEX].tolist()).split()
        assert [value for _, value in asked] == scored
        assert (labels[labels != IGNORE_INDEX] == ids[labels != IGNORE_INDEX]).all()
        if asked:
            assert dict(asked) == hidden
            found.append((len(ids), len(asked)))
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("task", ["s-niah-1", "s-niah-2", "s-niah-3"])
def test_needle_rows_ask_for_the_facts_that_they_hide(task, packed, corpus):
    tokenizer = byte_tokenizer()
    text = None if task == "s-niah-1" else TokenFile(corpus)
    rows = NiahRows(task, tokenizer, text, 900, seed=0, packed=packed, ramp_rows=60)
    found = [_facts(rows[index], tokenizer) for index in range(80)]
    for index, examples in enumerate(found):
        assert rows[index]["input_ids"].shape == rows[index]["labels"].shape == (900,)
        assert len(examples) >= 1 if packed else len(examples) == 1
    assert {facts for examples in found[:10] for _, facts in examples} == {1}
    assert max(facts for examples in found for _, facts in examples) > 1
    if packed:
        assert max(length for examples in found[:10] for length, _ in examples) <= 300
        assert max(length for examples in found[60:] for length, _ in examples) > 500
    assert torch.equal(rows[5]["input_ids"], rows[5]["input_ids"])


def test_needle_rows_are_the_same_in_another_process(tmp_path):
    # the text names a token, whose name is bytes like any other
    text = TokenFile(token_file(tmp_path, ["some <|end|> words " * 300]))
    rows = NiahRows("s-niah-2", byte_tokenizer(), text, 900, seed=0)
    there = pickle.loads(pickle.dumps(rows))
    for index in range(4):
        assert torch.equal(there[index]["input_ids"], rows[index]["input_ids"])


def test_a_row_too_short_for_a_needle_is_refused():
    with pytest.raises(ValueError, match="s-niah-1: seq_len=100 is too short"):
        NiahRows("s-niah-1", byte_tokenizer(), None, 100, seed=0)


def _batch(corpus, count=4, seq_len=64):
    rows = ChunkRows(TokenFile(corpus), seq_len, seed=0)
    chosen = [rows[i] for i in range(count)]
    assert sum(len(row["boundaries"]) for row in chosen) > 2, "the rows should have boundaries"
    return chosen


def test_separate_documents_are_packed_and_no_label_crosses_a_boundary(corpus):
    rows = _batch(corpus)
    batch = collate_separate(rows)
    cu_seqlens = batch["cu_seqlens"]
    starts = cu_seqlens[:-1][cu_seqlens.diff() > 0].tolist()
    eos = byte_tokenizer().eos_token_id
    ids = batch["input_ids"][0]
    expected = [i for i in range(len(ids)) if i % 64 == 0 or ids[i - 1] == eos]
    assert starts == expected
    assert cu_seqlens[-1] == len(ids) == 4 * 64
    assert (len(cu_seqlens) - 1).bit_count() == 1, "the number of sequences should be a power of two"
    labels = batch["labels"][0]
    assert torch.equal((labels == IGNORE_INDEX).nonzero().flatten(), torch.tensor(starts))
    assert torch.equal(labels[labels != IGNORE_INDEX], ids[labels != IGNORE_INDEX])


def test_joined_documents_stay_rows(corpus):
    rows = _batch(corpus)
    batch = collate_joined(rows)
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (4, 64)
    assert (batch["labels"][:, 0] == IGNORE_INDEX).all()
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])


def test_a_row_s_own_inputs_go_with_it_into_the_batch(corpus):
    def inputs(index):
        return {"index": 1000 * index + torch.arange(64)}

    rows = MixedRows([ChunkRows(TokenFile(corpus), 64, seed=0)], [1.0], 8, 0, inputs)
    batch = [rows[5], rows[2]]
    expected = torch.stack([5000 + torch.arange(64), 2000 + torch.arange(64)])
    assert torch.equal(collate_joined(batch)["index"], expected)
    assert torch.equal(collate_separate(batch)["index"], expected.view(1, -1))


def test_packed_documents_never_see_each_other(corpus):
    options = {
        "gated_delta_net": {"num_heads": 2, "head_dim": 16, "expand_v": 1.0},
        "attention": {"num_heads": 2},
        "window": {"type": "attention", "num_heads": 2, "window": 8},
        "mamba2": {"head_dim": 16, "state_size": 16},
    }
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=264,
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=48,
        mixers=list(options),
        mixer_options=options,
    )
    model = HybridForCausalLM(config).double()
    batch = collate_separate(_batch(corpus))
    boundaries = torch.unique(batch["cu_seqlens"]).tolist()
    together = model(**batch, num_items_in_batch=1, use_cache=False).loss
    apart = []
    for start, end in pairwise(boundaries):
        ids = batch["input_ids"][:, start:end]
        apart.append(model(input_ids=ids, labels=ids, num_items_in_batch=1, use_cache=False).loss)
    torch.testing.assert_close(together, torch.stack(apart).sum(), rtol=1e-12, atol=0)
    # the first document's loss does not depend on the tokens that follow it
    other = batch["input_ids"].clone()
    other[:, boundaries[1] :] = np.random.default_rng(0).integers(0, 256)
    labels = batch["labels"].clone()
    labels[:, boundaries[1] :] = IGNORE_INDEX
    losses = [
        model(input_ids=x, labels=labels, cu_seqlens=batch["cu_seqlens"], num_items_in_batch=1, use_cache=False).loss
        for x in (batch["input_ids"], other)
    ]
    assert losses[0] == losses[1]
