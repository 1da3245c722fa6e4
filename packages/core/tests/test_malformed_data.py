"""Test damaged corpora, recipes, overrides, checkpoints, folders and commands: each is described in one sentence."""

import gzip
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from tokenmix_core.cli.app import main
from tokenmix_core.data.prepare import prepare
from tokenmix_core.data.sources import BadRow, Source
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.token_writer import TokenFileWriter
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.checkpoint import checkpoint_to_resume, write_manifest
from tokenmix_core.training.manifest import resumed
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens

MODEL = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "mixers": ["attention"]}


def recipe():
    batch = Tokens(128)
    return Recipe(
        name="nano",
        description="for tests",
        model={**MODEL, "mixer_options": {"attention": {"num_heads": 2}}},
        data=DataRecipe(seq_len=32),
        optimizer=OptimizerRecipe(total_tokens=Tokens(512), batch_tokens=batch, micro_batch_tokens=batch),
    )


def one_sentence(error):
    """Return the message of an error, after checking that it is one sentence: not empty and not long."""
    said = " ".join(str(error.value).split())
    assert 20 < len(said) < 700
    return said


def _meta(**changes):
    def spoil(folder):
        content = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps({**content, **changes}))

    return spoil


def _without(name):
    def spoil(folder):
        content = json.loads((folder / "meta.json").read_text())
        del content[name]
        (folder / "meta.json").write_text(json.dumps(content))

    return spoil


def _write(name, content):
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


META_FILES = [
    (_write("meta.json", ""), "meta.json is not valid JSON"),
    (_write("meta.json", "null"), "must have format .* got 'NoneType'"),
    (_write("meta.json", b"\xff\xfe\x00"), "meta.json is not valid JSON"),
    (_write("meta.json", "[" * 100_000), "meta.json is not valid JSON"),
    (_meta(format=3), "must have format .* got 3"),
    (_meta(sha256="abc"), "sha256 must be a dictionary .*got 'abc'"),
    (_meta(sha256=None), "sha256 must be a dictionary .*got None"),
    (_meta(sha256={}), "sha256 must be of tokens.bin and documents.npy, got none"),
    (_meta(sha256={"tokens.bin": 3, "documents.npy": 4}), "sha256 must be a dictionary"),
    (_meta(sha256={"../x": "a", "documents.npy": "b"}), "sha256 must be of tokens.bin and documents.npy"),
    (_meta(held_out_documents=10**6), "held_out_documents must be from 0 to documents=60, got 1000000"),
    (_meta(held_out_documents=-1), "held_out_documents must be from 0"),
    (_meta(held_out_tokens=10**9), "held_out_tokens must be from 0 to tokens="),
    (_meta(held_out_tokens=1), "expected 1 held-out tokens, got"),
    (_meta(tokens="many"), "tokens must be an integer, got 'many'"),
    (_meta(tokens=True), "tokens must be an integer, got True"),
    (_meta(tokens=-5), "held_out_tokens must be from 0 to tokens=-5"),
    (_meta(documents=61), r"expected int64 \[62\], got int64 \[61\]"),
    (_meta(documents=None), "documents must be an integer, got None"),
    (_meta(dtype="<f4"), "dtype must be one of '<u2', '<u4', got '<f4'"),
    (_meta(dtype="object"), "dtype must be one of"),
    (_meta(dtype="<u4"), "tokens.bin is truncated"),
    (_meta(eos_token_id=-1), "must be at least 0, got -1"),
    (_meta(eos_token_id=[2]), r"eos_token_id must be an integer, got \[2\]"),
    (_meta(source="here"), "source must be a dictionary"),
    (_meta(tokenizer=None), "tokenizer must be a string, got None"),
    (_meta(colour="red"), "unexpected keyword argument 'colour'"),
    (_without("sha256"), "sha256"),
]
TOKEN_FILES = [
    (_write("tokens.bin", b""), "tokens.bin is truncated: expected .* got 0"),
    (_write("documents.npy", b""), "documents.npy is damaged"),
    (lambda f: (f / "tokens.bin").unlink(), "it lacks tokens.bin"),
    (lambda f: [(f / "tokens.bin").unlink(), (f / "tokens.bin").mkdir()], "it lacks tokens.bin"),
]
# the sums match, as if the offsets had been written like this
OFFSETS = [
    (b"", "cannot be read"),
    (b"\x93NUMPY", "cannot be read"),
    (b"PK\x03\x04 no archive", "cannot be read"),
    (np.array(3), r"expected int64 \[61\], got int64 \[\]"),
    (np.zeros((61, 2), np.int64), r"got int64 \[61, 2\]"),
    (np.zeros(61), r"got float64 \[61\]"),
    (np.zeros(61, np.int64), "rise from 0 to .* got 0 to 0"),
    (np.array([5] * 60 + [0]), "rise from 0"),
    (np.array([{}] * 61, dtype=object), "cannot be read"),
]


@pytest.fixture
def tokens(token_file, tmp_path):
    shutil.copytree(token_file, tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.mark.parametrize(("spoil", "said"), META_FILES + TOKEN_FILES)
def test_token_files(spoil, said, tokens):
    TokenFile(tokens)
    spoil(tokens)
    with pytest.raises(ValueError, match=said) as error:
        TokenFile(tokens)
    assert str(tokens) in one_sentence(error)


@pytest.mark.parametrize(("content", "said"), OFFSETS)
def test_offsets(content, said, tokens):
    path = tokens / "documents.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(ValueError, match=said) as error:
        TokenFile(tokens, verify=False)
    assert str(path) in one_sentence(error)


def _jsonl(content):
    return "a.jsonl", content.encode() if isinstance(content, str) else content


SOURCES = [
    (*_jsonl('{"text": null}'), "line 1: field 'text' must be text, got null"),
    (*_jsonl('{"text": ["a"]}'), "must be text, got list"),
    (*_jsonl('{"text": true}'), "must be text, got bool"),
    (*_jsonl("null"), "line 1 has no field 'text'; it has NoneType"),
    (*_jsonl("3"), "it has int"),
    (*_jsonl('\n\n{"text": '), "line 3: not valid JSON"),
    (*_jsonl(b'{"text": "\xff"}'), "line 1: not valid JSON"),
    (*_jsonl("[" * 100_000), "line 1: not valid JSON"),
    (*_jsonl('{"text": "\\udc00"}'), "half a character at position 0"),
    (*_jsonl(""), "has no text: 0 rows read"),
    (*_jsonl('{"text": ""}\n{"text": ""}'), "has no text: 2 rows read, all of them empty"),
    ("a.jsonl.gz", b"no archive", "a.jsonl.gz is damaged or cut short after line 0: Not a gzipped file"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 50, mtime=0)[:-9], "a.jsonl.gz is damaged or cut short after line"),
    ("a.jsonl.gz", gzip.compress(b"x" * 500, mtime=0)[:12] + b"\xff" * 30, "a.jsonl.gz is damaged or cut short"),
    ("a.parquet", b"", "a.parquet is not readable as parquet"),
    ("a.parquet", b"PAR1" + b"x" * 50 + b"PAR1", "a.parquet is not readable as parquet"),
    ("a.md", b"\x80", "a.md is not UTF-8 text: byte 0"),
    ("a.csv", b"a,b", "holds nothing to read"),
]


# tests are named by the expected message, because the contents would put raw bytes into names
@pytest.mark.parametrize(("name", "content", "said"), SOURCES, ids=[said for *_, said in SOURCES])
def test_sources(name, content, said, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        prepare(str(folder), tmp_path / "out", progress=False)
    one_sentence(error)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_every_bad_row_can_be_skipped_but_not_all_of_them(tmp_path):
    rows = [BadRow("row 0 is bad"), BadRow("row 1 is bad")]
    with pytest.raises(ValueError, match=r"no text: 2 rows read, all of them empty or bad \(2\)"):
        prepare(Source({}, lambda n: iter(rows[n:])), tmp_path / "out", on_bad_row="skip", progress=False)
    assert not list(tmp_path.iterdir())


PARTIALS = [
    (_write("progress.json", "{"), "its progress.json cannot be read; remove it"),
    (_write("progress.json", "[]"), "its progress.json cannot be read"),
    (_write("progress.json", '{"settings": {}, "consumed": 1, "skipped": 0, "sizes": {}}'), "cannot be read"),
    (_write("progress.json", '{"settings": 3}'), "cannot be read"),
    (lambda f: (f / "train.tokens").unlink(), "train.tokens has 0 bytes, expected at least 4; remove it"),
    (_write("train.lengths", b"\0"), "train.lengths has 1 bytes, expected at least 8"),
]


@pytest.mark.parametrize(("spoil", "said"), PARTIALS)
def test_partial_token_files(spoil, said, tmp_path):
    writer = TokenFileWriter(tmp_path / "out", {}, 259)
    writer.append([[1, 2]], [False])
    writer.commit(1)
    writer.close()
    TokenFileWriter(tmp_path / "out", {}, 259).close()
    spoil(tmp_path / "out.partial")
    with pytest.raises(ValueError, match=said) as error:
        TokenFileWriter(tmp_path / "out", {}, 259)
    assert "out.partial is damaged" in one_sentence(error)


FIELDS = [
    (lambda: DataRecipe(sources=[3]), r"sources must be a list .*got \[3\]"),  # type: ignore[list-item]
    (lambda: DataRecipe(sources="stdlib"), "sources must be a list .*got 'stdlib'"),  # type: ignore[arg-type]
    (lambda: DataRecipe(weights=[float("nan")]), "weights must be"),
    (lambda: DataRecipe(tokenizer=None), "tokenizer must be a string, got None"),  # type: ignore[arg-type]
    (lambda: DataRecipe(mqar_pairs=0), "mqar_pairs must be at least 1, got 0"),
    (lambda: DataRecipe(mqar_vocab_size=3), "mqar_vocab_size must be at least 4, got 3"),
    (lambda: DataRecipe(mqar_ramp=2.0), "mqar_ramp must be from 0 to 1, got 2.0"),
    (lambda: OptimizerRecipe(batch_tokens=Tokens(0)), "batch_tokens must be at least 1, got 0"),
    (lambda: OptimizerRecipe(max_grad_norm=-1.0), "max_grad_norm must be at least 0"),
    (lambda: OptimizerRecipe(learning_rate=float("inf")), "learning_rate must be a number, got inf"),
    (lambda: OptimizerRecipe(initial_learning_rate=1.0), "initial_learning_rate must be from 0 to 0.0003"),
    (lambda: RunRecipe(seed=2**32), "seed must be from 0 to .* got 4294967296"),
    (lambda: RunRecipe(dataloader_num_workers=-1), "dataloader_num_workers must be from 0"),
    (lambda: RunRecipe(evaluation_limit=0), "evaluation_limit must be at least 1"),
    (lambda: RunRecipe(report_to="wandb"), "report_to must be a list"),  # type: ignore[arg-type]
    (lambda: overridden(recipe(), ["--seq_len="]), "seq_len"),
    (lambda: overridden(recipe(), ["--sources"]), "sources"),
    (lambda: overridden(recipe(), ["--model.mixers=[attention"]), "mixers.*not valid YAML"),
    (lambda: overridden(recipe(), ["--model.mixer_options={a: {}, a: {}}"]), "mixer_options.*'a' occurs twice"),
    (lambda: overridden(recipe(), ["--model.mixers=attention"]), "mixers must be"),
    (lambda: overridden(recipe(), ["--model.="]), "unknown field --model."),
    (lambda: overridden(recipe(), ["--model.vocab_size=null"]), "vocab_size must be .*got None"),
    (lambda: overridden(recipe(), ["--"]), "--"),
    (lambda: overridden(recipe(), ["-x"]), "unexpected argument '-x'"),
    (lambda: overridden(recipe(), ["--total_tokens", "1e400"]), "total_tokens|1e400"),
    (lambda: overridden(recipe(), ["--total_tokens", "-5"]), "total_tokens"),
    (lambda: overridden(recipe(), ["--batch_tokens", "2**-1"]), r"batch_tokens|2\*\*-1"),
    (lambda: overridden(recipe(), ["--fsdp", "maybe"]), "Truthy value expected: got maybe"),
]


@pytest.mark.parametrize(("make", "said"), FIELDS)
def test_fields(make, said):
    with pytest.raises(ValueError, match=said):
        make()


YAMLS = [
    ("", "must hold `field: value` lines, got NoneType"),
    ("seq_len", "must hold `field: value` lines, got str"),
    (b"\xff\xfe\xff", "not valid YAML"),
    ("a: &a [*a]\nb: *c", "not valid YAML"),
    ("!!python/object:os.system {}", "not valid YAML"),
    ("- " * 5000, "not valid YAML"),
    ("seq_len: 64\nseq_len: 128", "(?s)'seq_len' occurs twice.*line 2"),
    ("model:\n  hidden_size: 64\n  hidden_size: 32", "(?s)'hidden_size' occurs twice.*line 3"),
    ("model: {mixer_options: {attention: {num_heads: 2, num_heads: 4}}}", "'num_heads' occurs twice"),
    ("3: 4", "unknown field 3 in"),
    ("null: 4", "unknown field None in"),
    ("seq_len: 2020-01-01", "invalid int value"),
    ("sources: {a: b}", "sources must have one value or a list"),
    ("weights: [a]", "invalid float value: 'a'"),
    ("model: [a]", "model must hold .* got list"),
    ("model: {hidden_size: {}}", "hidden_size must be an integer"),
    ("model: {mixers: 3}", "mixers must be"),
    ("total_tokens: .nan", "a number of tokens .* got 'nan'"),
    ("torch_compile: 7", "Truthy value expected"),
]


@pytest.mark.parametrize(("content", "said"), YAMLS)
def test_recipe_files(content, said, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=said) as error:
        overridden(recipe(), config=path)
    one_sentence(error)


IDENTITY = {"learning_rate": 0.1}


@pytest.fixture
def run_folder(tmp_path):
    """Return the folder of a run: its manifest, its log, and a checkpoint in the Trainer's layout."""
    folder = tmp_path / "run"
    saved = folder / "checkpoint-4"
    saved.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (saved / name).write_bytes(name.encode())
    (saved / "trainer_state.json").write_text('{"global_step": 4}')
    write_manifest(saved, {"step": 4, "identity": IDENTITY})
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    made = recipe()
    (folder / "run.json").write_text(json.dumps({"recipe": made.name, "values": made.values()}))
    return folder


def _manifest(**changes):
    def spoil(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def _renewed(name, content):
    def spoil(folder):
        (folder / name).write_text(content)
        write_manifest(folder, {"step": 4, "identity": IDENTITY})

    return spoil


def _gone(name):
    def spoil(folder):
        (folder / name).unlink()
        write_manifest(folder, {"step": 4, "identity": IDENTITY})

    return spoil


CHECKPOINTS = [
    (_write("manifest.json", ""), "no readable manifest.json"),
    (_write("manifest.json", "null"), "no readable manifest.json"),
    (_write("manifest.json", b"\xff"), "no readable manifest.json"),
    (_write("manifest.json", "[" * 100_000), "no readable manifest.json"),
    (_manifest(files=[]), "no readable manifest.json"),
    (_manifest(files={"optimizer.pt": 3}), "no readable manifest.json"),
    (_manifest(files={"optimizer.pt": {"bytes": "x", "sha256": ""}}), "no readable manifest.json"),
    (_manifest(files={}), "lists no model"),
    (_manifest(identity=3), "no readable manifest.json"),
    (_manifest(identity={"learning_rate": 0.2}), "belongs to another run: learning_rate was 0.2 and is 0.1"),
    (_manifest(identity={}), "learning_rate was None and is 0.1"),
    (_manifest(step=5), "trainer_state.json is of step 4, expected 5"),
    (_manifest(step=None), "no readable manifest.json"),
    (_write("optimizer.pt", "changed....."), "the content of optimizer.pt has changed since"),
    (_write("scheduler.pt", ""), "scheduler.pt has 0 bytes, expected 12"),
    (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    (_gone("optimizer.pt"), "lists no optimizer"),
    (_gone("rng_state.pth"), "lists no rng_state"),
    (_gone("trainer_state.json"), "lists no trainer_state"),
    (_renewed("trainer_state.json", "{"), "trainer_state.json cannot be read"),
    (_renewed("trainer_state.json", '{"global_step": "x"}'), "is of step 'x', expected 4"),
]


@pytest.mark.parametrize(("spoil", "said"), CHECKPOINTS)
def test_checkpoints_to_resume_from(spoil, said, run_folder):
    assert checkpoint_to_resume(run_folder, IDENTITY) == run_folder / "checkpoint-4"
    spoil(run_folder / "checkpoint-4")
    with pytest.raises(ValueError, match=said) as error:
        checkpoint_to_resume(run_folder, IDENTITY)
    assert str(run_folder) in one_sentence(error)


RECORDS = [
    ("", "run.json is damaged"),
    ("null", "run.json is damaged"),
    (b"\xff", "run.json is damaged"),
    ("{}", "run.json is damaged"),
    ('{"recipe": "nano", "values": 3}', "run.json is damaged"),
    ('{"recipe": "tiny", "values": {}}', "holds a run of the recipe 'tiny', not of 'nano'"),
    ('{"recipe": "nano", "values": {"colour": 3}}', "cannot take: unknown field 'colour'"),
    ('{"recipe": "nano", "values": {"seq_len": null}}', "cannot take: .*seq_len must have one value"),
    ('{"recipe": "nano", "values": {"model": {"hidden_size": 0}}}', "cannot take: hidden_size must be"),
]


@pytest.mark.parametrize(("content", "said"), RECORDS)
def test_records_of_runs(content, said, run_folder):
    assert resumed(recipe(), run_folder) == recipe()
    (run_folder / "run.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=said) as error:
        resumed(recipe(), run_folder)
    assert str(run_folder) in one_sentence(error)


LOGS = [
    ('3\n{"step": 2}\n', "line 1 is damaged"),
    ('{"step": 1}\nnull\n{"step": 2}\n', "line 2 is damaged"),
    (b'\xff\n{"step": 2}\n', "line 1 is damaged"),
    ('{"step": ["x"]}\n{"step": 2}\n', r"line 1 is damaged: .*its step must be an integer, got \['x'\]"),
]


@pytest.mark.parametrize(("content", "said"), LOGS)
def test_logs(content, said, run_folder):
    path = run_folder / "metrics.jsonl"
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=said) as error:
        read_metrics(path)
    assert str(path) in one_sentence(error)


COMMANDS = [
    ("eval CHECKPOINT --suite mqar --text FILE", "mqar does not read text; leave it out"),
    ("eval CHECKPOINT --suite mqar --suite copying --text FILE", "mqar, copying do not read text; leave it out"),
    ("eval CHECKPOINT --suite niah --vocab-size 64", "niah does not read vocab_size; leave it out"),
    ("eval CHECKPOINT --suite perplexity-by-position --include .", "does not read include"),
    ("train nano --resume --out RUN --learning_rate 1", "learning_rate was 0.0003 and is 1.0"),
    ("train nano --resume --out RUN --learning_rate", "learning_rate"),
    ("train nano --resume --out RUN --seed -1", "seed must be from 0"),
    ("train other --resume --out RUN", "holds a run of the recipe 'nano', not of 'other'"),
    ("train nano --out RUN", "is not empty; resume the run that it holds"),
    ("train nano --out FILE", "FILE.txt is a file, expected a folder"),
    ("train nano --resume=yes --out RUN", "--resume and --out name two folders, yes and "),
    ("train nano --config RUN", "cannot be read: Is a directory"),
    ("train nano --total_tokens 0", "total_tokens must be at least 1"),
    ("train nano --evaluations perplexity-by-position --sources EMPTY", "EMPTY holds nothing to read"),
    ("train nano --weights 1 1", "weights must be positive, one for each"),
    ("data prepare FILE out --on-bad-row drop", "invalid choice: 'drop'"),
    ("data prepare FILE out --on-bad-row", "expected one argument"),
    ("data prepare FILE out --held-out some", "invalid float value: 'some'"),
    ("data prepare FILE out --held-out nan", "held_out must be a share .*got nan"),
    ("data prepare FILE out --max-tokens 1.5", "invalid int value: '1.5'"),
    ("data prepare FILE EMPTY", "EMPTY exists already"),
    ("data prepare FILE FILE/out", "FILE.txt: File exists"),
    ("data prepare FILE out --tokenizer EMPTY", "could not be loaded .*expected 'bytes'"),
    ("data prepare EMPTY out", "holds nothing to read"),
    ("data prepare FILE out --output x", "unexpected argument '--output'"),
    ("eval RUN --suite mqar", "holds no model: expected config.json"),
    ("generate RUN/checkpoint-4 --prompt x", "holds no model: expected config.json"),
]


@pytest.mark.parametrize(("line", "said"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_commands(line, said, run_folder, monkeypatch, capsys, tmp_path):
    work = tmp_path / "work"
    (work / "EMPTY").mkdir(parents=True)
    (work / "FILE").write_text("text")
    (work / "FILE").rename(work / "FILE.txt")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(tmp_path.rglob("*"))
    argv = [word.replace("RUN", str(run_folder)).replace("FILE", "FILE.txt") for word in line.split()]
    made = {"nano": recipe, "other": lambda: replace(recipe(), name="other")}
    assert main(argv, recipes=made) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    last = error.strip().splitlines()[-1]
    assert last.startswith("tokenmix")
    with pytest.raises(ValueError, match=said):
        raise ValueError(last)
    assert sorted(tmp_path.rglob("*")) == before


def test_there_are_well_over_a_hundred():
    tables = (META_FILES, TOKEN_FILES, OFFSETS, SOURCES, PARTIALS, FIELDS, YAMLS, CHECKPOINTS, RECORDS, LOGS, COMMANDS)
    assert sum(map(len, tables)) >= 150
