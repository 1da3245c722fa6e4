"""Every script of examples/ runs on a CPU at small sizes, and is written so that it can be read from top to bottom."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from tokenmix_core.corpora.prepare import prepare
from tokenmix_core.nn import registry

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
MOST_LINES = 80
TRAINING = "--seq-len 64 --tokens 8192 --width 64"
# the flags that make a script small, and a line that it prints
RUNS = {
    "convert_llama_to_nha.py": (f"--source tokens {TRAINING}", r"finetuned +held-out loss \d\.\d+"),
    "custom_mixer.py": ("", r"b'A recurrent state has one size for every text\. '"),
    "decode_batch.py": ("--new 6 3 4", r"'import' -> b"),
    "kernels_in_qwen3_5.py": ("--width 64 --layers 4 --tokens 96 --repeats 1", r"logits differ by \d\.\de-"),
    "packed_documents.py": ("--lengths 70 3 129 --heads 2", r"dbeta differs by \d"),
    "train_on_your_text.py": (f"text {TRAINING}", r"(?m)^It was "),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a folder of text and a token file made of it."""
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(
            f"It was the {i}th of {i + 1} stories about a folder of text. " * 20
        )
    prepare(str(tmp_path / "text"), tmp_path / "tokens", held_out=0.1, progress=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    yield tmp_path
    # a script runs as __main__; other tests look at all known mixers
    for name in [name for name, mixer in registry._MIXERS.items() if mixer.__module__ == "__main__"]:
        del registry._MIXERS[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_on_a_cpu(script, folder, monkeypatch, capsys):
    flags, line = RUNS[script]
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert re.search(line, capsys.readouterr().out)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_says_its_command_and_uses_public_names(script):
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MOST_LINES
    assert f"\n    python examples/{script}" in (ast.get_docstring(tree, clean=False) or "")
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = [str(node.module) for node in froms]
    for node in (*froms, *(node for node in tree.body if isinstance(node, ast.Import))):
        imported += [alias.name for alias in node.names]
    assert not [name for name in imported if any(part.startswith("_") for part in name.split("."))]
    assert not [name for name in imported if ".testing" in name]


def test_the_readme_lists_every_example():
    listed = re.findall(r"\]\(([\w.]+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
