"""Test tokenizing in several processes, long documents in parts, and text that spells special tokens."""

import itertools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tokenmix_core.data import encode as encode_module
from tokenmix_core.data import sources as sources_module
from tokenmix_core.data import text as text_module
from tokenmix_core.data.encode import Encoding, encode_stream, encoding_of
from tokenmix_core.data.prepare import prepare
from tokenmix_core.data.sources import BadRow, Source, open_source
from tokenmix_core.data.text import LongText, parts_of
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import BYTES, byte_tokenizer, encode_texts, load_tokenizer

TEXTS = [f"document {i}, naïve café 漢字 {i * i} " * (i % 13) for i in range(400)]
FILES = ("tokens.bin", "documents.npy", "meta.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a byte-level BPE tokenizer with 300 tokens, for which transformers parses special tokens in text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    bpe.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(path)
    return str(path)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(encode_module, "_BATCH_CHARS", 2000)
    monkeypatch.setattr(encode_module, "_FIRST_BATCHES", 2)


def source(texts=TEXTS, stop=None):
    def read(skip):
        for i, text in enumerate(texts[skip:], start=skip):
            if i == stop:
                raise Killed
            yield text

    return Source({"corpus": "test"}, read, len(texts))


class Killed(BaseException):
    pass


def assert_same(a, b):
    for name in FILES:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.usefixtures("small_batches")
def test_a_file_does_not_depend_on_the_number_of_processes(folder, tmp_path):
    rows = [*TEXTS[:100], BadRow("row 100 is bad"), *TEXTS[100:]]
    options = {"held_out": 0.1, "on_bad_row": "skip", "progress": False}
    for tokenizer in (BYTES, folder):
        kind = "bytes" if tokenizer == BYTES else "folder"
        for workers in (1, 2, 3):
            out = tmp_path / f"{kind}-{workers}"
            prepare(source(rows), out, tokenizer=tokenizer, workers=workers, **options)
            assert_same(out, tmp_path / f"{kind}-1")
    expected = load_tokenizer(folder)(TEXTS[5])["input_ids"]
    file = TokenFile(tmp_path / "folder-1", "all")
    assert expected in [file.document(i)[:-1].tolist() for i in range(file.num_documents)]


@pytest.mark.usefixtures("small_batches")
def test_a_stopped_preparation_continues_with_another_number_of_processes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmix_core.data.prepare._COMMIT_SECONDS", 0.0)
    options = {"tokenizer": folder, "held_out": 0.1, "progress": False}
    prepare(source(), tmp_path / "whole", **options)
    for stop, workers in ((150, 2), (330, 1)):
        with pytest.raises(Killed):
            prepare(source(stop=stop), tmp_path / "out", workers=workers, **options)
        progress = json.loads((tmp_path / "out.partial" / "progress.json").read_text())
        assert 0 < progress["consumed"] <= stop
    prepare(source(), tmp_path / "out", workers=2, **options)
    assert_same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.usefixtures("small_batches")
def test_a_killed_process_is_told_and_costs_no_committed_rows(folder, tmp_path, monkeypatch):
    import multiprocessing

    monkeypatch.setattr("tokenmix_core.data.prepare._COMMIT_SECONDS", 0.0)
    texts = TEXTS * 20

    def read(skip):
        for i, text in enumerate(texts[skip:], start=skip):
            if i == 4000:
                for child in multiprocessing.active_children():
                    os.kill(child.pid, signal.SIGKILL)
            yield text

    options = {"tokenizer": folder, "held_out": 0, "progress": False}
    with pytest.raises(
        OSError, match=r"^a process that tokenizes was killed.*the same command continues, perhaps with"
    ):
        prepare(Source({"corpus": "test"}, read), tmp_path / "out", workers=2, **options)
    assert json.loads((tmp_path / "out.partial" / "progress.json").read_text())["consumed"] > 0
    monkeypatch.setattr("tokenmix_core.data.prepare._COMMIT_SECONDS", 10.0)
    prepare(source(texts), tmp_path / "out", **options)
    assert TokenFile(tmp_path / "out").num_documents == sum(map(bool, texts))


def test_a_disk_that_is_full_is_told_with_the_folder(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    told = r"the corpus could not be written into .*out.partial, where [\d,.]+ MB are free.*: .*No space left on device"
    with pytest.raises(OSError, match=told):
        prepare(source(), tmp_path / "out", progress=False)
    monkeypatch.undo()
    prepare(source(), tmp_path / "out", progress=False)


def test_a_small_corpus_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(encode_module, "ProcessPoolExecutor", None)
    prepare(source(), tmp_path / "out", workers=8, progress=False)


@pytest.mark.parametrize("workers", [0, 5000])
def test_a_wrong_number_of_processes_is_told(workers, tmp_path):
    with pytest.raises(ValueError, match=f"workers must be from 1 to 1024, got {workers}"):
        prepare(source(), tmp_path / "out", workers=workers)


@pytest.mark.parametrize("text", ["word " * 900, "line\n" * 900, "漢" * 4000, "a" * 4000, "two  spaces " * 300, ""])
def test_the_parts_of_a_document_are_its_text(text, monkeypatch, tmp_path):
    monkeypatch.setattr(text_module, "PART_CHARS", 1000)
    monkeypatch.setattr(text_module, "LOOK_BACK", 100)
    monkeypatch.setattr(text_module, "_BLOCK_BYTES", 77)
    parts = list(parts_of(text))
    assert "".join(parts) == text
    assert all(0 < len(part) <= 1000 for part in parts)
    (tmp_path / "long.txt").write_bytes(text.encode())
    long = LongText(tmp_path / "long.txt", "text")
    assert (list(parts_of(long)), str(long)) == (parts, text)


def test_a_document_in_parts_has_the_tokens_of_the_whole(folder, tmp_path, monkeypatch):
    text = " ".join(TEXTS[1:60])
    prepare(source([text, "end"]), tmp_path / "whole", tokenizer=folder, held_out=0, progress=False)
    monkeypatch.setattr(text_module, "PART_CHARS", 500)
    monkeypatch.setattr(text_module, "LOOK_BACK", 100)
    prepare(source([text, "end"]), tmp_path / "parts", tokenizer=folder, held_out=0, progress=False)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("at", [0, 76, 77, 78, 5000])
def test_the_byte_that_is_not_utf8_is_named_in_a_long_file_too(at, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_BLOCK_BYTES", 77)
    monkeypatch.setattr(sources_module, "_LONG_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"a" * at + b"\xff" + b"b" * 300)
    (row,) = open_source(str(tmp_path / "a.txt")).rows(0)
    assert str(row) == f"{tmp_path}/a.txt is not UTF-8 text: byte {at} cannot be decoded"


PEAK = """
import resource, sys
from tokenmix_core.data.prepare import prepare
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(sys.argv[1], sys.argv[2], progress=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory in Linux's unit")
def test_the_memory_that_a_document_takes_is_bounded(tmp_path):
    path = tmp_path / "long.txt"
    with open(path, "w") as file:
        for i in range(40):
            file.write(f"{i} words of a long document\n" * 2**15)
    size = path.stat().st_size / 2**20
    assert size > 30
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "out")]
    out = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert out.returncode == 0, out.stderr
    # transformers itself takes about 100 MB
    assert int(out.stdout) < 300, "the memory grows with the document"
    file = TokenFile(tmp_path / "out", "all")
    assert file.tokens.size - file.num_documents == path.stat().st_size


@pytest.mark.parametrize("equal", [False, True])
def test_a_large_text_file_yields_held_out_text(equal, tmp_path):
    text = "".join(f"line {i}\n" for i in range(60_000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(text)
    if equal:
        # both copies belong to the same split
        (tmp_path / "in" / "b.txt").write_text(text)
    meta = prepare(str(tmp_path / "in"), tmp_path / "out", progress=False)
    train, held_out = (TokenFile(tmp_path / "out", split) for split in ("train", "held_out"))
    if equal:
        assert (meta.documents, meta.held_out_documents) == (2, 0)
        return
    assert (train.num_documents, held_out.num_documents, len(held_out)) == (1, 1, 2**14)
    parts = [bytes(file.document(0)[:-1].astype(np.uint8)).decode() for file in (train, held_out)]
    assert "".join(parts) == text
    assert all(file.document(0)[-1] == byte_tokenizer().eos_token_id for file in (train, held_out))


def test_one_of_two_large_documents_is_not_held_out_whole(tmp_path):
    large = ["".join(f"{name} {i}\n" for i in range(50_000)) for name in ("first", "second")]
    prepare(source(["short", *large]), tmp_path / "out", held_out=1e-9, progress=False)
    train, held_out = (TokenFile(tmp_path / "out", split) for split in ("train", "held_out"))
    ends = [
        bytes(file.document(i)[:-1].astype(np.uint8))
        for file in (train, held_out)
        for i in range(len(file.documents) - 1)
    ]
    assert len(held_out) < 2**15
    assert sum(map(len, ends)) == sum(map(len, ["short", *large]))


def test_text_that_spells_a_special_token_is_text(folder, tmp_path):
    texts = ["one <|endoftext|> two", "three"]
    tokenizer = load_tokenizer(folder)
    eos = tokenizer.eos_token_id
    prepare(source(texts), tmp_path / "text", tokenizer=folder, held_out=0, progress=False)
    file = TokenFile(tmp_path / "text")
    assert (file.tokens == eos).sum() == 2
    assert tokenizer.decode(file.document(0)[:-1]) == texts[0]
    prepare(source(texts), tmp_path / "tokens", tokenizer=folder, held_out=0, special_tokens=True, progress=False)
    assert (TokenFile(tmp_path / "tokens").tokens == eos).sum() == 3
    assert eos in encode_texts(tokenizer, texts, special_tokens=True)[0]
    assert eos not in encode_texts(tokenizer, texts)[0]


def test_a_tokenizer_that_reads_special_tokens_whatever_it_is_told_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((c, -5.0) for c in "</s>ab ")]
    unigram = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="</s>", unk_token="<unk>")
    with pytest.raises(
        ValueError, match=r"turns text that spells '</s>' into that special token.*--special-tokens acc"
    ):
        encoding_of("unigram", tokenizer)
    assert encoding_of("unigram", tokenizer, special_tokens=True).special_tokens


def test_bytes_are_the_tokens_of_the_built_in_tokenizer():
    texts = ["", "a<|end|>b", "naïve 漢字 😀 \x00\r\n", *TEXTS[:5]]
    found = Encoding("bytes", "", False, "<u2").load()(texts)
    assert [x.tolist() for x in found] == encode_texts(byte_tokenizer(), texts)


def test_a_complete_file_of_the_same_arguments_is_left_as_it_is(tmp_path):
    options = {"held_out": 0.1, "progress": False}
    meta = prepare(source(), tmp_path / "out", **options)
    before = [(tmp_path / "out" / name).stat().st_mtime_ns for name in FILES]
    assert prepare(source(), tmp_path / "out", **options) == meta
    assert before == [(tmp_path / "out" / name).stat().st_mtime_ns for name in FILES]
    with pytest.raises(ValueError, match="exists already; choose another folder or remove it"):
        prepare(source(), tmp_path / "out", held_out=0.2, progress=False)


def test_items_come_back_in_order_with_their_tokens():
    class Item:
        ends_batch = False

        def __init__(self, text):
            self.text = text

    items = [Item(text) for text in TEXTS]
    stream = encode_stream(iter(items), Encoding("bytes", "", False, "<u2"), 1)
    for item, (same, tokens) in itertools.zip_longest(items, stream):
        assert item is same
        assert bytes(tokens.astype(np.uint8)).decode() == item.text
