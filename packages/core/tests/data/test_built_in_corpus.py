"""Test the built-in corpus: no text that one version of Python holds out is training text of another, or of itself."""

import json
import sysconfig

import numpy as np
import pytest

from support.corpora import token_file
from tokenmix_core.data.prepare import (
    BUILT_IN_HELD_OUT,
    TrainedOn,
    built_in_corpus,
    is_held_out,
    tokens_sha256,
)
from tokenmix_core.data.sources import BY_FAMILY, STDLIB, ModuleText, module_family, stdlib_source
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.text import corpus_of, documents, held_out_from

# "module enum" has a hash that is held out, as have "module code" and "module html"
NAMES = ["enum.py", "html/parser.py", "_code.py", *(f"module{i}.py" for i in range(80))]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Replace Python's standard library by a small one; a second call replaces it by that of another version."""
    monkeypatch.setenv("TOKENMIX_CACHE", str(tmp_path / "cache"))

    def install(version):
        root = tmp_path / version
        for name in NAMES:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {name} of Python {version}\n")
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
        monkeypatch.setattr(sysconfig, "get_python_version", lambda: version)

    return install


def by_text():
    """Return the built-in corpus as it was split before module families existed."""
    from tokenmix_core.data.prepare import _built_in_corpus

    return _built_in_corpus("bytes", stdlib_source(by_family=False))


def test_few_spans_of_the_held_out_text_are_in_the_training_text():
    texts = list(stdlib_source().documents())
    held_out = [text for text in texts if is_held_out(text, BUILT_IN_HELD_OUT)]
    train = "".join(text for text in texts if not is_held_out(text, BUILT_IN_HELD_OUT)).encode()
    text = "".join(held_out).encode()
    assert 0.02 * len(train) < len(text) < 0.1 * len(train)
    starts = np.random.default_rng(0).integers(0, len(text) - 64, 250)
    # when single texts were split, 8.65 % of them were in the training text
    assert sum(text[start : start + 64] in train for start in starts) <= 5


def test_links_to_absent_files_are_left_out(python, tmp_path):
    python("3.0")
    expected = list(stdlib_source().documents())
    (tmp_path / "3.0" / "sitecustomize.py").symlink_to(tmp_path / "absent.py")
    assert list(stdlib_source().documents()) == expected


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (("encodings/cp1254.py", "encodings/hz.py", "encodings/__init__.py"), "encodings"),
        (("datetime.py", "_pydatetime.py"), "datetime"),
        (("zipfile.py", "zipfile/_path/glob.py"), "zipfile"),
        (("_py_abc.py", "abc.py", "_abc.py"), "abc"),
        (("py_compile.py",), "py_compile"),
    ],
)
def test_modules_that_resemble_each_other_are_one_family(names, family):
    assert {module_family(name) for name in names} == {family}


def test_the_split_depends_on_the_family_alone():
    held_out = [is_held_out(ModuleText(text, "enum"), BUILT_IN_HELD_OUT) for text in ("", "a", "b")]
    train = [is_held_out(ModuleText(text, "os"), BUILT_IN_HELD_OUT) for text in ("", "a", "b")]
    assert (held_out, train) == ([True] * 3, [False] * 3)
    assert is_held_out(ModuleText("", "html"), 1e-6)
    assert not is_held_out(ModuleText("", "html"), 0)


def test_python_versions_hold_out_the_same_modules(python):
    found = []
    for version in ("3.11", "3.99"):
        python(version)
        file = TokenFile(built_in_corpus(), "held_out")
        texts = [byte_tokenizer().decode(file.document(i)[:-1]) for i in range(file.num_documents)]
        assert sorted(texts) == sorted(documents(None, byte_tokenizer()))
        assert file.meta.source["python"] == version
        found.append([text.split()[1] for text in texts])
    assert found[0] == found[1]
    assert set(NAMES[:3]) <= set(found[0])
    assert len(found[0]) < len(NAMES) / 2


def test_a_run_that_began_with_the_split_by_text_keeps_it(python, capsys):
    python("3.11")
    now, before = built_in_corpus(), by_text()
    assert tokens_sha256(now) != tokens_sha256(before)
    assert "split" not in TokenFile(before).meta.source
    assert capsys.readouterr().out == ""
    # the fingerprint of a text begins with the sha256 of its tokens
    assert built_in_corpus(begun_with=f"{tokens_sha256(now)} and more") == now
    assert built_in_corpus(begun_with="0" * 64) == now
    capsys.readouterr()
    assert built_in_corpus(begun_with=tokens_sha256(before)) == before
    assert "older split of the built-in corpus" in capsys.readouterr().err


def test_a_recipe_that_goes_on_trains_on_the_text_that_it_began_with(python):
    from tokenmix_core.training.baselines import RECIPES
    from tokenmix_core.training.overrides import overridden
    from tokenmix_core.training.trainer import training_rows

    python("3.11")
    recipe = overridden(RECIPES["tiny"](), ["--sources", STDLIB, "s-niah-2", "--seq_len", "512"])
    for path in (built_in_corpus(), by_text()):
        begun_with = {source: TokenFile(path).meta.sha256["tokens.bin"] for source in recipe.data.sources}
        rows, names = training_rows(recipe, byte_tokenizer(), begun_with)
        assert all(known.startswith(tokens_sha256(path)) for known in names.values())
        assert {file.path for file in rows.token_files} == {path}


def test_an_evaluation_takes_the_split_of_the_run(python, capsys):
    python("3.11")
    options = EvalOptions()
    assert held_out_from(options, TrainedOn()) == options
    assert held_out_from(options, TrainedOn({"mqar": "pairs 8"})) == options
    assert held_out_from(options, TrainedOn({STDLIB: tokens_sha256(built_in_corpus())})) == options
    before = held_out_from(options, TrainedOn({"s-niah-3": tokens_sha256(by_text())}))
    assert before.text == str(by_text())
    capsys.readouterr()
    run = {STDLIB: "0" * 64}
    with pytest.raises(ValueError, match=r"another Python version, split by text: .* Python 3.11 .*--text"):
        held_out_from(options, TrainedOn(run))
    assert capsys.readouterr().err == ""
    corpora = [{"corpus": STDLIB, "python": "3.12", "split": BY_FAMILY}]
    assert held_out_from(options, TrainedOn(run, corpora=corpora)) == options
    told = capsys.readouterr().err
    assert "trained on the built-in corpus of Python 3.12, and is evaluated on that of Python 3.11" in told


def test_a_corpus_that_was_made_again_is_named(tmp_path, capsys):
    paths = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        paths.append(token_file(tmp_path / name, [f"{name} one", f"{name} two"], held_out=0.5))
    options = EvalOptions(text=str(paths[1]))
    sources = ["mqar", str(tmp_path / "elsewhere" / paths[1].name)]
    told = []
    for path in paths:
        fingerprints = {"mqar": "pairs 8", "tokens-1": tokens_sha256(path)}
        assert held_out_from(options, TrainedOn(fingerprints, sources)) == options
        told.append(capsys.readouterr().err)
    assert told == [
        f"{paths[1]} has changed since the model was trained on it: its held-out documents may have been training "
        "documents\n",
        "",
    ]


def test_a_result_names_its_text(python, tmp_path, text_file, token_file):
    python("3.11")
    tokenizer = byte_tokenizer()
    known = {"python": "3.11", "split": BY_FAMILY}
    assert corpus_of(None, tokenizer).items() >= {"sha256": tokens_sha256(built_in_corpus()), **known}.items()
    file = corpus_of(text_file, tokenizer)
    assert file["text"] == text_file
    assert len(file["sha256"]) == 64
    assert corpus_of(token_file, tokenizer)["sha256"] == TokenFile(token_file).meta.sha256["tokens.bin"]
    assert corpus_of(str(tmp_path), tokenizer) == {"text": str(tmp_path), "sha256": None}


def test_the_text_of_a_run_is_read_from_its_manifest(tmp_path):
    from tokenmix_core.training.manifest import trained_on

    checkpoint = tmp_path / "run" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    assert trained_on(checkpoint) == trained_on(tmp_path / "absent") == TrainedOn()
    manifest = {"recipe": "tiny", "values": {"sources": [STDLIB], "tokenizer": "some/folder"}}
    old = {**manifest, "identity": {"data": {STDLIB: "0" * 64}}}
    new = {**old, "corpora": [{"corpus": STDLIB, "python": "3.12", "split": BY_FAMILY}]}
    for content in (manifest, old, new):
        (tmp_path / "run" / "run.json").write_text(json.dumps(content))
        found = trained_on(checkpoint)
        assert (found.sources, found.tokenizer) == ([STDLIB], "some/folder")
        assert found.fingerprints == content.get("identity", {}).get("data", {})
        assert found.corpora == content.get("corpora", [])
    assert trained_on(tmp_path / "run") == found
