import gzip
import json
import os
import shutil
import sys

import numpy as np
import pytest

from tokenmix_core.data import encode as encode_module
from tokenmix_core.data import prepare as prepare_module
from tokenmix_core.data.prepare import built_in_corpus, is_held_out, prepare
from tokenmix_core.data.sources import Source, open_source, stdlib_source
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.token_writer import TokenFileWriter
from tokenmix_core.data.tokenizer import byte_tokenizer, tokenizer_fingerprint

TEXTS = [f"document {i}: " + "ä\n" * (i * i % 97) for i in range(600)]
EOS = byte_tokenizer().eos_token_id


def documents(path, split="all"):
    file = TokenFile(path, split)
    assert all(file.document(i)[-1] == EOS for i in range(file.num_documents))
    return [bytes(file.document(i)[:-1].astype(np.uint8)).decode() for i in range(file.num_documents)]


def write(folder, kind):
    folder.mkdir()
    if kind == "text":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:04}.txt").write_text(text, newline="")
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[:300]) + "\n")
        with gzip.open(folder / "b.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": t, "other": 1}) + "\n" for t in TEXTS[300:])
    else:
        datasets = pytest.importorskip("datasets")
        data = datasets.Dataset.from_dict({"text": TEXTS})
        if kind == "parquet":
            data.to_parquet(folder / "a.parquet")
        elif kind == "saved":
            data.save_to_disk(folder)
        else:
            datasets.DatasetDict({"train": data}).save_to_disk(folder)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "saved", "saved splits"])
def test_all_documents_of_a_source_come_back_in_order(kind, tmp_path):
    write(tmp_path / "in", kind)
    meta = prepare(str(tmp_path / "in"), tmp_path / "out", held_out=0, progress=False)
    assert documents(tmp_path / "out") == TEXTS
    assert (meta.documents, meta.held_out_documents) == (600, 0)
    assert meta.tokens == sum(len(t.encode()) + 1 for t in TEXTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("stop", [None, 4, 13, 21])
def test_all_kinds_of_files_in_a_folder_are_read_and_counted(stop, tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    from tokenmix_core.cli.app import main

    folder = tmp_path / "in"
    texts = {name: [f"{name} {i}" for i in range(8)] for name in ("b", "c", "d")}
    (folder / "more").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "a.JSONL").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts["b"]))
    datasets.Dataset.from_dict({"text": texts["c"]}).to_parquet(folder / "c.parquet")
    for i, text in enumerate(texts["d"]):
        (folder / "more" / f"{i}.{'md' if i % 2 else 'txt'}").write_text(text)
    (folder / ".cache" / "x.txt").write_text("hidden")
    (folder / "table.csv").write_text("text\nno\n")
    call = ["data", "prepare", str(folder), str(tmp_path / "out"), "--held-out", "0"]
    if stop is not None:
        # a preparation that was stopped continues with the same counts
        monkeypatch.setattr(prepare_module, "_COMMIT_SECONDS", 0.0)
        ended = TokenFileWriter.end_document
        left = iter(range(stop))

        def end(self, **given):
            if next(left, None) is None:
                raise KeyboardInterrupt
            ended(self, **given)

        monkeypatch.setattr(TokenFileWriter, "end_document", end)
        assert main(call) == 130
        monkeypatch.setattr(TokenFileWriter, "end_document", ended)
    capsys.readouterr()
    assert main(call) == 0
    said = capsys.readouterr().out
    assert documents(tmp_path / "out") == [*texts["b"], *texts["c"], *texts["d"]]
    assert "24 documents" in said
    assert (
        "read 1 JSONL file (8 documents), 1 parquet file (8 documents), 8 text files (8 documents); "
        "of a kind that is not read: 1 .csv" in said
    )
    assert TokenFile(tmp_path / "out").meta.source["skipped_rows"] == 0


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows.TSV"])
def test_a_file_of_data_is_not_taken_for_text(name, tmp_path):
    (tmp_path / name).write_text('{"text": "x"}')
    with pytest.raises(ValueError, match=f"{name} is no running text, JSONL or parquet; expected one that ends in"):
        open_source(str(tmp_path / name))


def test_documents_are_held_out_by_their_text_alone(tmp_path):
    source = Source({"corpus": "test"}, lambda n: iter((TEXTS + TEXTS[::-1])[n:]))
    prepare(source, tmp_path / "out", held_out=0.2, progress=False)
    train, held_out = (documents(tmp_path / "out", split) for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(TEXTS * 2)
    assert not set(train) & set(held_out)
    assert set(held_out) == {t for t in TEXTS if is_held_out(t, 0.2)}
    assert 60 < len(set(held_out)) < 180


class Killed(BaseException):
    pass


@pytest.mark.parametrize("stops", [[300], [1, 256, 599], [0, 512, 513]])
def test_a_preparation_that_was_stopped_goes_on_to_the_same_file(stops, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "_COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(encode_module, "_BATCH_CHARS", 3000)

    def source(stop=None):
        def read(skip):
            asked.append(skip)
            for i, text in enumerate(TEXTS[skip:], start=skip):
                if i == stop:
                    raise Killed
                yield text

        return Source({"corpus": "test"}, read, len(TEXTS))

    asked = []
    prepare(source(), tmp_path / "whole", held_out=0.1, progress=False)
    for stop in stops:
        with pytest.raises(Killed):
            prepare(source(stop), tmp_path / "out", held_out=0.1, progress=False)
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match="no token file"):
            TokenFile(tmp_path / "out")
        # bytes that a killed process wrote after the last commit are cut off
        with open(tmp_path / "out.partial" / "train.tokens", "ab") as file:
            file.write(b"torn")
    prepare(source(), tmp_path / "out", held_out=0.1, progress=False)
    assert asked[-1] >= stops[-1] - 50, "the last call began again"
    for name in ("tokens.bin", "documents.npy", "meta.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out.partial").exists()


def _rows_with_holes(bad):
    """Return JSONL of 600 documents, of which the rows in `bad` are damaged."""
    rows = [json.dumps({"text": t}) for t in TEXTS]
    for index, row in zip(bad, ('{"text": null}', '{"text": 3}', "{", '["a"]', '{"body": "a"}'), strict=False):
        rows[index] = row
    return "\n".join(rows)


def test_a_bad_row_keeps_what_came_before_it_and_skipping_goes_on_from_there(tmp_path, monkeypatch, capsys):
    bad = [290, 291, 400, 401, 599]
    (tmp_path / "in.jsonl").write_text(_rows_with_holes(bad))
    told = rf"line 291: field 'text' must be text, got null; 290 rows before it are kept in {tmp_path}/out.partial; "
    with pytest.raises(ValueError, match=told + "--on-bad-row skip continues"):
        prepare(str(tmp_path / "in.jsonl"), tmp_path / "out", held_out=0.1, progress=False)
    # at the second attempt no earlier row is encoded again, and no row is lost
    seen = []
    monkeypatch.setattr(
        prepare_module, "is_held_out", lambda text, share: seen.append(text) or is_held_out(text, share)
    )
    with pytest.raises(ValueError, match=told):
        prepare(str(tmp_path / "in.jsonl"), tmp_path / "out", held_out=0.1, progress=False)
    assert seen == []
    meta = prepare(str(tmp_path / "in.jsonl"), tmp_path / "out", held_out=0.1, on_bad_row="skip", progress=False)
    good = [text for index, text in enumerate(TEXTS) if index not in bad]
    assert seen == good[290:]
    assert sorted(documents(tmp_path / "out")) == sorted(good)
    assert meta.source["skipped_rows"] == 5
    assert capsys.readouterr().err.count("skipped: ") == 5
    # the result is the same as if the row had been skipped from the start
    prepare(str(tmp_path / "in.jsonl"), tmp_path / "whole", held_out=0.1, on_bad_row="skip", progress=False)
    for name in ("tokens.bin", "documents.npy", "meta.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out.partial").exists()


def test_rows_past_the_last_token_wanted_are_not_asked_for(tmp_path):
    (tmp_path / "in.jsonl").write_text(_rows_with_holes([50, 60]))
    enough = {"held_out": 0, "max_tokens": sum(len(t.encode()) + 1 for t in TEXTS[:50]), "progress": False}
    assert prepare(str(tmp_path / "in.jsonl"), tmp_path / "stop", **enough).documents == 50
    meta = prepare(str(tmp_path / "in.jsonl"), tmp_path / "skip", on_bad_row="skip", **enough)
    assert (meta.documents, meta.source["skipped_rows"]) == (50, 0)


def test_the_whole_lines_of_a_file_that_is_cut_short_can_be_kept(tmp_path):
    (tmp_path / "in").mkdir()
    whole = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[:300]).encode())
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "in" / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[300:]))
    with pytest.raises(ValueError, match=r"a.jsonl.gz is damaged or cut short after line \d+: .* are kept in"):
        prepare(str(tmp_path / "in"), tmp_path / "out", held_out=0, progress=False)
    meta = prepare(str(tmp_path / "in"), tmp_path / "out", held_out=0, on_bad_row="skip", progress=False)
    kept = documents(tmp_path / "out")
    assert meta.source["skipped_rows"] == 1
    assert kept == TEXTS[: len(kept) - 300] + TEXTS[300:]
    assert 350 < len(kept) < 600


def test_a_damaged_parquet_file_is_named_and_loses_no_other_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    (tmp_path / "in").mkdir()
    for name, texts in (("a", TEXTS[:200]), ("b", TEXTS[200:400]), ("c", TEXTS[400:])):
        parquet.write_table(arrow.table({"text": texts}), tmp_path / "in" / f"{name}.parquet", row_group_size=50)
    assert list(open_source(str(tmp_path / "in")).rows(130)) == TEXTS[130:]
    group = parquet.ParquetFile(tmp_path / "in" / "b.parquet").metadata.row_group(1)
    with open(tmp_path / "in" / "b.parquet", "r+b") as file:
        file.seek(group.column(0).data_page_offset)
        file.write(b"\xff" * 40)
    os.truncate(tmp_path / "in" / "c.parquet", 1000)
    with pytest.raises(ValueError, match=r"in/b.parquet, row 50 cannot be read as parquet: .*; 250 rows before it are"):
        prepare(str(tmp_path / "in"), tmp_path / "out", held_out=0, progress=False)
    meta = prepare(str(tmp_path / "in"), tmp_path / "out", held_out=0, on_bad_row="skip", progress=False)
    assert documents(tmp_path / "out") == TEXTS[:250] + TEXTS[300:400]
    assert meta.source["skipped_rows"] == 51
    rows = list(open_source(str(tmp_path / "in")).rows(0))
    for skip in (0, 49, 251, 299, 300, 399, 400, 401):
        assert list(map(str, open_source(str(tmp_path / "in")).rows(skip))) == list(map(str, rows[skip:]))
    with pytest.raises(ValueError, match=r"c.parquet is not readable as parquet"):
        list(open_source(str(tmp_path / "in" / "c.parquet")).documents())


def test_text_files_keep_their_line_ends(tmp_path):
    text = "one\r\ntwo\rthree\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", held_out=0, progress=False)
    assert documents(tmp_path / "out") == [text]


@pytest.mark.parametrize(
    ("texts", "kept"),
    [(["a", "b"], 1), (["a", "b", "b", "a", "c"], None), ([f"text {i}" for i in range(9)], 8)],
)
def test_a_small_corpus_holds_out_one_document_at_least(texts, kept, tmp_path, capsys):
    source = Source({}, lambda n: iter(texts[n:]))
    assert not any(is_held_out(text, 0.001) for text in texts), "chosen for holding out nothing by share"
    meta = prepare(source, tmp_path / "out", progress=False)
    train, held_out = (documents(tmp_path / "out", split) for split in ("train", "held_out"))
    assert train
    assert len(set(held_out)) == 1
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(texts)
    assert [text for text in texts if text in train] == train, "the order of the others changed"
    assert kept is None or len(train) == kept
    assert (meta.held_out_documents, meta.held_out_tokens) == (len(held_out), sum(len(t) + 1 for t in held_out))
    assert capsys.readouterr().err == ""
    # the choice depends on the texts, not on their order
    prepare(Source({}, lambda n: iter(texts[::-1][n:])), tmp_path / "other", progress=False)
    assert documents(tmp_path / "other", "held_out") == held_out
    assert prepare(source, tmp_path / "none", held_out=0, progress=False).held_out_documents == 0


@pytest.mark.parametrize(("texts", "told"), [(["a"], "is one document"), (["a", "a"], "are 2 equal documents")])
def test_where_nothing_can_be_held_out_it_is_said(texts, told, tmp_path, capsys):
    assert prepare(Source({}, lambda n: iter(texts[n:])), tmp_path / "out", progress=False).held_out_documents == 0
    assert f"out: nothing is held out, for there {told}" in capsys.readouterr().err
    assert documents(tmp_path / "out", "train") == texts


def test_a_partial_file_of_other_settings_or_in_use_is_refused(tmp_path):
    writer = TokenFileWriter(tmp_path / "out", {"held_out": 0.1}, 259)
    writer.append([[1, 2]], [False])
    writer.commit(1)
    with pytest.raises(
        ValueError, match=r"out.partial is in use: process \d+ on .* has been preparing a corpus there since"
    ):
        TokenFileWriter(tmp_path / "out", {"held_out": 0.1}, 259)
    writer.close()
    with pytest.raises(ValueError, match=r"held_out was 0.1 and is 0.2"):
        TokenFileWriter(tmp_path / "out", {"held_out": 0.2}, 259)


def test_max_tokens_stops_at_the_document_that_reaches_it(tmp_path):
    write(tmp_path / "in", "text")
    meta = prepare(str(tmp_path / "in"), tmp_path / "out", held_out=0, max_tokens=5000, progress=False)
    kept = documents(tmp_path / "out")
    assert kept == TEXTS[: len(kept)]
    assert 5000 <= meta.tokens < 5000 + len(TEXTS[len(kept) - 1].encode()) + 1


def test_large_vocabularies_take_four_bytes_a_token(tmp_path):
    writer = TokenFileWriter(tmp_path / "out", {}, 100_000)
    writer.append([[70_000, 99_999], [3]], [False, True])
    meta = writer.finish(eos_token_id=3, tokenizer="test", fingerprint="f", source={})
    assert meta.dtype == "<u4"
    assert TokenFile(tmp_path / "out").tokens.tolist() == [70_000, 99_999]
    assert TokenFile(tmp_path / "out", "held_out").tokens.tolist() == [3]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    prepare(Source({}, lambda n: iter(TEXTS[n:])), folder / "tokens", held_out=0.1, progress=False)
    return folder / "tokens"


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _edit_meta(path, **changes):
    content = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({k: v for k, v in {**content, **changes}.items() if v is not None}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda p: os.truncate(p / "tokens.bin", 1001), "tokens.bin is truncated: expected .* bytes, got 1001"),
        (lambda p: (p / "tokens.bin").open("ab").write(b"x"), "tokens.bin is too long"),
        (lambda p: _flip(p / "tokens.bin"), "tokens.bin is damaged: its sha256"),
        (lambda p: _flip(p / "documents.npy"), "documents.npy is damaged"),
        (lambda p: (p / "documents.npy").unlink(), "lacks documents.npy"),
        (lambda p: (p / "meta.json").unlink(), "lacks meta.json"),
        (lambda p: (p / "meta.json").write_text("{"), "meta.json is not valid JSON"),
        (lambda p: (p / "meta.json").write_text("[]"), "must have format 'tokenmix-tokens-1', got 'list'"),
        (lambda p: _edit_meta(p, format="other"), "got 'other'"),
        (lambda p: _edit_meta(p, dtype=None), "meta.json does not hold what"),
        (lambda p: shutil.rmtree(p), "is no token file"),
    ],
)
def test_a_damaged_token_file_is_refused_with_its_reason(damage, told, good, tmp_path):
    TokenFile(good)
    shutil.copytree(good, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(ValueError, match=told):
        TokenFile(tmp_path / "copy")


def test_a_token_file_of_another_tokenizer_is_refused(good):
    TokenFile(good, fingerprint=tokenizer_fingerprint(byte_tokenizer()))
    with pytest.raises(ValueError, match=r"was prepared with the tokenizer 'bytes' .* not the one expected"):
        TokenFile(good, fingerprint="another")


def test_boundaries_are_where_documents_begin_inside_a_range(good):
    file = TokenFile(good)
    starts = {int(x) for x in file.documents}
    for start in (0, 7, int(file.documents[5]), len(file) - 50):
        stop = min(start + 300, len(file))
        expected = [at - start for at in range(start + 1, stop) if at in starts]
        assert file.boundaries(start, stop).tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"source": "./nowhere"}, "does not exist"),
        ({"source": "missing.jsonl"}, "does not exist"),
        ({"source": "{in}/empty"}, "holds nothing to read"),
        ({"source": "{in}/bad.jsonl"}, "bad.jsonl, line 2: not valid JSON"),
        ({"source": "{in}/field.jsonl"}, r"field.jsonl, line 1 has no field 'text'; it has body"),
        ({"source": "{in}/field.jsonl", "text_field": "n"}, "line 1 has no field 'n'"),
        ({"source": "{in}/number.jsonl"}, "field 'text' must be text, got int"),
        ({"source": "{in}/half.jsonl"}, "line 1: field 'text' holds half a character at position 1"),
        ({"source": "{in}/list.jsonl"}, "has no field 'text'; it has list"),
        ({"source": "{in}/latin.txt"}, "is not UTF-8 text: byte 3"),
        ({"source": "{in}/blank.txt"}, "has no text"),
        ({"source": "{in}/cut.jsonl.gz"}, "cut.jsonl.gz is damaged or cut short after line 0"),
        ({"source": "{in}/good.txt", "on_bad_row": "drop"}, "on_bad_row must be one of 'stop', 'skip', got 'drop'"),
        ({"source": "{in}/good.txt", "held_out": 1.0}, "held_out must be a share"),
        ({"source": "{in}/good.txt", "held_out": -0.1}, "held_out must be a share"),
        ({"source": "{in}/good.txt", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"source": "{in}/good.txt", "output": "{in}/empty"}, "exists already"),
        ({"source": "{in}/good.txt", "tokenizer": "{in}/empty"}, "could not be loaded"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(arguments, told, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "in"
    (folder / "empty").mkdir(parents=True)
    (folder / "bad.jsonl").write_text('\n{"text": \n')
    (folder / "field.jsonl").write_text('{"body": "a"}\n')
    (folder / "number.jsonl").write_text('{"text": 3}\n')
    (folder / "half.jsonl").write_text('{"text": "a\\ud800"}\n')
    (folder / "list.jsonl").write_text('["a"]\n')
    (folder / "latin.txt").write_bytes(b"caf\xe9 ")
    (folder / "blank.txt").write_text("")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:20])
    (folder / "good.txt").write_text("hello")
    before = sorted(tmp_path.rglob("*"))
    made = {k: v.replace("{in}", str(folder)) if isinstance(v, str) else v for k, v in arguments.items()}
    output = made.pop("output", tmp_path / "out")
    with pytest.raises(ValueError, match=told):
        prepare(made.pop("source"), output, progress=False, **made)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_hub_dataset_is_streamed_and_errors_of_the_hub_are_told(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load(name, subset, *, split, streaming):
        calls.append((name, subset, split, streaming))
        if name == "some/unknown":
            raise FileNotFoundError("no such dataset")
        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare("fineweb-edu", tmp_path / "out", held_out=0, progress=False)
    assert documents(tmp_path / "out") == TEXTS
    assert calls == [("HuggingFaceFW/fineweb-edu", "sample-100BT", "train", True)]
    assert list(open_source("slimpajama").documents(597)) == TEXTS[597:]
    with pytest.raises(ValueError, match=r"some/unknown.*no such dataset"):
        open_source("some/unknown")
    with pytest.raises(ValueError, match="no field 'body'; its fields are text"):
        open_source("fineweb-edu", text_field="body")


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENMIX_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(prepare_module, "stdlib_source", lambda: Source({"sha256": "0" * 64}, lambda n: iter(["a"]), 1))
    with pytest.raises(
        ValueError, match=r"corpus cannot be kept in .*file/cache \(Not a directory\); set TOKENMIX_CACHE"
    ):
        built_in_corpus()


def test_the_built_in_corpus_is_python_without_tests_or_machine_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENMIX_CACHE", str(tmp_path))
    first, second = stdlib_source(), stdlib_source()
    assert first.description == second.description
    assert len(first.description["sha256"]) == 64
    texts = list(first.documents(0))
    assert 5_000_000 < sum(map(len, texts)) < 30_000_000
    assert not any("build_time_vars" in text[:400] for text in texts), "a build's configuration is in the corpus"
    # all texts would take ten seconds, so a part is enough here
    part = Source(first.description, lambda n: iter(texts[n:60]), 60)
    monkeypatch.setattr(prepare_module, "stdlib_source", lambda: part)
    path = built_in_corpus()
    # if the corpus exists, nothing is written next to it, since it may be another user's
    monkeypatch.setattr(prepare_module, "FileLock", None)
    assert built_in_corpus() == path
    train, held_out = (documents(path, split) for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(text for text in texts[:60] if text)
    os.truncate(path / "tokens.bin", 10)
    with pytest.raises(ValueError, match=r"truncated.*remove .* to have it made again"):
        built_in_corpus()


def test_slimpajama_without_its_decompression_names_the_extra(monkeypatch):
    from tokenmix_core.data.sources import open_source

    pytest.importorskip("datasets")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"zstandard is not installed; install it with: .*data"):
        open_source("slimpajama")
