"""Test that scripts and notebooks in examples/ run on a CPU and are formatted for reading."""

import ast
import re
import runpy
import sys
from pathlib import Path

import matplotlib
import nbformat
import pytest
from matplotlib import pyplot

from tokenmix_core.data.prepare import prepare
from tokenmix_core.nn import registry

matplotlib.use("agg")
EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
MOST_LINES = 80
TRAINING = "--seq-len 64 --tokens 8192 --width 64"
# the flags that make a script small, and a line that it prints
RUNS = {
    "convert_llama_to_nha.py": ("--source tokens --seq-len 32 --tokens 1024 --width 32", r"finetuned +held-out loss"),
    "custom_mixer.py": ("", r"b'A recurrent state has one size for every text\. '"),
    "decode_batch.py": ("--new 6 3 4", r"'import' -> b"),
    "kernels_in_qwen3_5.py": ("--width 64 --layers 4 --tokens 96 --repeats 1", r"logits differ by \d\.\de-"),
    "packed_documents.py": ("--lengths 70 3 129 --heads 2", r"dbeta differs by \d"),
    "train_on_your_text.py": (f"text {TRAINING}", r"(?m)^It was "),
}
# a notebook's loop of training, and a shorter one
STEPS = {
    "first_steps.ipynb": ("in range(120):", "in range(2):"),
    "what_a_layer_sees.ipynb": ("in range(200):", "in range(2):"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working folder that contains a folder of text and a token file made from it."""
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


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(notebook, folder):
    """The notebook runs in this process with few training steps; its stored outputs are those of a whole run."""
    content = nbformat.read(EXAMPLES / notebook, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    long, short = STEPS[notebook]
    assert sum(long in cell for cell in code) == 1
    namespace = {"__name__": "notebook"}
    with pyplot.rc_context():
        for number, cell in enumerate(code, 1):
            exec(compile(cell.replace(long, short), f"{notebook}, cell {number}", "exec"), namespace)
            pyplot.close("all")


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_stored_with_outputs_that_read_well(notebook):
    text = (EXAMPLES / notebook).read_text(encoding="utf-8")
    content = nbformat.reads(text, as_version=4)
    nbformat.validate(content)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    printed = "".join(output.get("text", "") for output in outputs)
    assert len(printed) < 4_000
    assert not re.search(
        r"(?:/(?:home|root|tmp|work|Users)/|site-packages|\.venv)", re.sub(r'"image/png": "[^"]*"', "", text)
    )
    assert len(text) < 400_000


def test_the_readme_lists_every_example():
    listed = re.findall(r"\]\(([\w.]+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
