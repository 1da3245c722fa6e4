"""The corpus of the arena: from packages that the test builds to tokens, without repeated and leaked text."""

import hashlib
import json
import lzma
import math
import shutil
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arena import corpus, parts, store
from arena.__main__ import main
from arena.cloze import DISTANCES, names_suite, questions
from arena.comparison import Comparison, Run, fingerprint, recipe_of
from arena.contestants import PARAMETERS
from arena.execution import execute
from arena.packages import html_text
from arena.runner import run as run_all
from arena.schedule import Schedule
from arena.sizes import SIZES
from arena.spans import SPAN, Hashes, SpanSet, covered, without
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import load_tokenizer
from tokenmix_core.evaluation import EvalOptions

LICENCE = "".join(
    f"// line {i} of a licence that stands at the beginning of every file of the project\n" for i in range(6)
)
RECIPE = corpus.Recipe(held_out=("/fs/btree/",), vocabulary=360, least_held_out=4000)


def name_of(topic, i):
    # rare, so that the vocabulary splits it into many tokens
    letters = (
        hashlib.sha256(f"{topic} {i}".encode()).hexdigest()[:10].translate(str.maketrans("0123456789", "ghijklmnop"))
    )
    return f"{topic}_{letters}"


def function(topic, i):
    name = name_of(topic, i)
    lines = "".join(f"\tvalue += {topic}_{i}_{j}(value, {'abcdefgh'[j]});\n" for j in range(8))
    return f"static int {name}(int value)\n{{\n{lines}\treturn value;\n}}\n"


def source(topic, first):
    functions = [function(topic, i) for i in range(first, first + 12)]
    uses = "".join(f"\ttotal -= {name_of(topic, i)}(total);\n" for i in range(first, first + 12))
    return LICENCE + "\n".join(functions) + f"\nint {topic}_{first}(int total)\n{{\n{uses}\treturn total;\n}}\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build a corpus from two packages, and return its folder and manifest."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    root = tmp_path_factory.mktemp("corpus")
    files = {f"net/queue/f{i}.c": source("queue", 12 * i) for i in range(12)}
    files |= {f"fs/btree/f{i}.c": source("btree", 12 * i) for i in range(4)}
    files |= {"net/copy.c": files["net/queue/f0.c"], "fs/btree/leak.c": files["net/queue/f1.c"]}
    files["doc/page.html"] = f"<title>x</title><body><p>{'A page of <b>text</b> &amp; more words. ' * 10}</p></body>"
    for name, content in (("code", files), ("other", {"a/b.rst": "Words of another package.\n" + source("other", 0)})):
        tree = root / name
        for path, text in content.items():
            target = tree / "usr/src" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        (tree / "DEBIAN").mkdir()
        control = f"Package: {name}\nVersion: 1.2\nArchitecture: all\nMaintainer: m <m@x.org>\nDescription: d\n"
        (tree / "DEBIAN/control").write_text(control)
        (root / "packages").mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "-b", str(tree), str(root / "packages" / f"{name}.deb")], check=True)
    folder = root / "built"
    return folder, corpus.build(folder, root / "packages", RECIPE, progress=False)


def texts(folder, split):
    tokenizer = load_tokenizer(str(folder / corpus.TOKENIZER))
    file = TokenFile(folder / corpus.TOKENS_FOLDER, split)
    return [tokenizer.decode(file.document(i)[:-1]) for i in range(file.num_documents)]


def test_a_corpus_holds_out_a_subsystem_without_repeated_and_leaked_text(built):
    folder, manifest = built
    train, held_out = texts(folder, "train"), texts(folder, "held_out")
    assert manifest["counts"]["copied documents"] == 2
    assert (len(train), len(held_out)) == (14, 4)
    # the copy among the held-out documents was removed, and the licence is left once
    assert all("btree" in text and "queue" not in text for text in held_out)
    assert sum(text.count("line 3 of a licence") for text in train + held_out) == 1
    assert any("A page of text & more words." in text for text in train)
    spans = {text[i : i + SPAN] for text in train for i in range(len(text) - SPAN + 1)}
    assert not any(text[i : i + SPAN] in spans for text in held_out for i in range(len(text) - SPAN + 1))
    assert manifest["leaked"] == 0
    assert list(manifest["packages"]) == ["code 1.2", "other 1.2"]
    assert len(load_tokenizer(str(folder / corpus.TOKENIZER))) == RECIPE.vocabulary
    for index, defined, used, name in json.loads((folder / corpus.NAMES).read_text()):
        text = held_out[index]
        assert text[defined:].startswith(name)
        assert text.count(name, 0, used + 1) == 1
        assert text[used:].startswith(name)
        assert not any(name in other for other in train)


def test_a_finished_corpus_is_left_and_another_recipe_is_refused(built, tmp_path, capsys):
    folder, _ = built
    assert main(["corpus", "--out", str(folder)]) == 0
    assert "2 packages" in capsys.readouterr().out
    sources = folder.parent / "packages"
    shutil.copy(folder / "begun.json", tmp_path / "begun.json")
    with pytest.raises(ValueError, match="with another recipe"):
        corpus.build(tmp_path, sources, RECIPE._replace(vocabulary=500), progress=False)
    with pytest.raises(ValueError, match="bytes are held out, fewer than 9,000,000"):
        corpus.build(tmp_path / "x", sources, RECIPE._replace(least_held_out=9_000_000), progress=False)
    # a call that was stopped after the text continues: same tokens
    with pytest.raises(ValueError, match="holds no package"):
        corpus.build(tmp_path / "y", tmp_path / "y", RECIPE, progress=False)


def test_a_corpus_is_carried_in_parts_that_arrive_one_by_one(built, tmp_path):
    folder, manifest = built
    names = [*manifest["sha256"], corpus.MANIFEST]
    made = parts.pack(folder, names, tmp_path / "parts", most=4096)
    assert len(made) > len(names)
    assert all((tmp_path / "parts" / name).stat().st_size <= 4096 for name in made)
    assert parts.pack(folder, names, tmp_path / "parts", most=4096) == made
    arriving, target = tmp_path / "arriving", tmp_path / "target"
    arriving.mkdir()
    shutil.copy(tmp_path / "parts" / parts.INDEX, arriving)
    for count, name in enumerate(made, start=1):
        shutil.copy(tmp_path / "parts" / name, arriving)
        assert len(parts.unpack(arriving, target)) == len(made) - count
        (arriving / name).unlink()
    for name in names:
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    (arriving / made[0]).write_bytes(lzma.compress(b"other"))
    with pytest.raises(ValueError, match="is damaged; transfer it again"):
        parts.unpack(arriving, tmp_path / "fresh")


def test_hashes_of_spans_are_equal_where_the_text_is():
    text = b"one line\nanother line\none line\nanother line\nend"
    hashes = Hashes(text)
    every = hashes.all_spans(9)
    equal = {(i, j) for i in range(len(every)) for j in range(i) if every[i] == every[j]}
    assert equal == {(i, j) for i in range(len(every)) for j in range(i) if text[i : i + 9] == text[j : j + 9]}
    found, first, last = hashes.windows(12)
    assert (first.tolist(), last.tolist()) == ([0, 1, 2, 3], [1, 1, 3, 3])
    assert found[0] == found[2]
    assert found[1] == found[3]
    members = SpanSet([every[:5]])
    assert members.hashes[members.find(every)].tolist() == sorted(set(every[:5].tolist()))
    mask = covered(5, np.array([0, 3]), np.array([1, 3]))
    assert mask.tolist() == [True, True, False, True, False]
    assert without(text, hashes.line_ends(), mask) == b"one line\nend"


def test_html_becomes_text():
    page = (
        "<html><head><title>t</title></head><body><h1>A  b</h1><pre>x\n  y</pre><script>no</script>&lt;</body></html>"
    )
    assert html_text(page) == "A b\n\nx\n  y\n<\n"


SIZE = replace(SIZES["smoke"], corpus=True, retrieval_lengths=(640,), steps=1, tasks=("text",))


@pytest.mark.parametrize("contestant", ["gdn", "oryx-tm", "lalte"])
def test_a_run_trains_on_the_corpus_and_measures_retrieval_zero_shot(built, tmp_path, monkeypatch, contestant):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    comparison = Comparison(SIZE, tmp_path / "results", (PARAMETERS,), (contestant,), ("text",))
    run = Run(PARAMETERS, contestant, "text", SIZE.rates[0], SIZE.seeds[0])
    monkeypatch.setenv(corpus.FOLDER, str(tmp_path))
    with pytest.raises(ValueError, match="holds no corpus; build it"):
        execute(run, comparison, tmp_path / "work", deadline=math.inf, commit="test")
    monkeypatch.setenv(corpus.FOLDER, str(built[0]))
    assert execute(run, comparison, tmp_path / "work", deadline=math.inf, commit="test")
    result = comparison.result(run)
    assert result["corpus"]["sha256"] == built[1]["sha256"]["tokens/tokens.bin"]
    prefix, modes = {"oryx-tm": ("cross-mode-", 4), "lalte": ("capped-", 5)}.get(contestant, ("", 1))
    assert [row["length"] for row in result["rows"][f"{prefix}niah"]] == [640] * 3 * modes
    names = result["rows"][f"{prefix}names"]
    assert {row["distance"] for row in names} <= set(DISTANCES)
    assert names
    if contestant == "lalte":
        assert {row.get("modes", "") for row in names} == {"", *(f"cap {cap}" for cap in (4, 8, 32, 64))}
    assert ("switch-perplexity" in result["rows"]) == (contestant == "oryx-tm")
    # the folder of the corpus is no setting
    assert "corpus" in recipe_of(run, SIZE).data.sources


def test_questions_about_names_begin_where_no_other_name_does(built):
    folder, _ = built
    tokenizer = load_tokenizer(str(folder / corpus.TOKENIZER))
    found = questions(folder / corpus.TOKENS_FOLDER, tokenizer, 8192, 64)
    assert found
    for question in found:
        text = tokenizer.decode(question.tokens[: question.name])
        given = tokenizer.decode(question.tokens[question.name : question.answer]).strip()
        name = tokenizer.decode(question.tokens[question.name :]).strip()
        assert text.count(given) == text.count(name) == 1
        assert len(question.tokens) - question.answer >= 2
        assert name.startswith(given)


def test_names_are_completed_from_the_context_alone(built):
    folder, _ = built
    tokenizer = load_tokenizer(str(folder / corpus.TOKENIZER))

    class Copies(torch.nn.Module):
        """Predicts the token that followed the last two tokens before."""

        device = torch.device("cpu")

        def forward(self, input_ids, use_cache, logits_to_keep):
            ids, logits = input_ids[0].tolist(), torch.zeros(1, input_ids.shape[1], len(tokenizer))
            last = {}
            for at in range(1, len(ids)):
                logits[0, at, last.get((ids[at - 1], ids[at]), 0)] = 1.0
                if at + 1 < len(ids):
                    last[ids[at - 1], ids[at]] = ids[at + 1]
            return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    options = EvalOptions(text=str(folder / corpus.TOKENS_FOLDER), lengths=(8192,), limit=16, progress=False)
    result = names_suite(Copies(), tokenizer, options)
    for row, samples in zip(result["rows"], result["samples"], strict=True):
        assert row["accuracy"] == sum(samples) / len(samples) > 0.25
        assert row["without definition"] == 0


def test_the_schedule_expects_hours_from_measured_speeds_and_starts_what_fits(tmp_path, capsys):
    size = replace(SIZES["text-30m"], contestants=("gdn-h", "gdn"))
    comparison = Comparison(size, tmp_path)
    schedule = Schedule(comparison)
    runs = schedule.remaining()
    assert [run.contestant for run in runs] == sorted((run.contestant for run in runs), key=size.contestants.index)
    final = next(run for run in runs if run.seed in size.seeds and run.contestant == "gdn-h")
    tokens = size.steps * size.batch_tokens
    assert schedule.minutes(final) == pytest.approx(tokens / size.speed / 60)
    about = {"last loss": 1.0, "rows": {"x": [{}]}, "rule": fingerprint(final, size), "evaluation seconds": 30.0}
    store.add(comparison.folder, {**final._asdict(), **about, "tokens per second": 1e5})
    assert Schedule(comparison).minutes(final) == pytest.approx(tokens / 1e5 / 60 + 0.5)
    started = []
    monkey = {"commit": "test", "whole": True, "deadline": time.time() + 60, "log": started.append}
    assert not run_all(comparison, tmp_path, **monkey).done
    assert started == []
    assert main(["plan", "--size", "recall-1m", "--results", str(tmp_path), "--tasks", "mqar"]) == 0
    assert "GPU hours" in capsys.readouterr().out
