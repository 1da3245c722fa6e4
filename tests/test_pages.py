"""Test that every shell and Python block of every page runs as written, or that the page's source says why not.

A comment before a block, which a rendered page does not show, changes how it is run:

    <!-- not run: needs a GPU -->                        one of `REASONS`; the block's syntax is checked
    <!-- run with: tokenmix train: --total_tokens 20k --> flags for each of its commands that hold these words
    <!-- given: models/Llama-3.2-1B -->                  a small folder that `GIVEN` makes beforehand

The shell blocks of a page run in their order in one new folder, each Python block in a namespace of its own. `pytest
tests` runs all Python blocks and the shell blocks of `QUICK`; `nox -s pages` runs everything, Python blocks in
processes of their own.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from tokenmix_core.data.prepare import prepare as data_prepare
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.nn import registry

ROOT = Path(__file__).parent.parent
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
REASONS = (
    "needs a GPU",
    "needs several GPUs",
    "needs several processes",
    "needs several machines",
    "needs a running server",
    "needs the network",
    "takes minutes",
    "takes an hour",
    "installs packages",
    "part of a file",
)
QUICK = ("README.md",)
_COMMENTS = r"((?:^<!--[^\n]*-->\n+)*)"
_FENCE = re.compile(rf"(?ms){_COMMENTS}^( *)(```|~~~~)([^\n]*)\n(.*?)^\2\3$")
_COMMENT = re.compile(r"(?m)^<!-- (not run|run with|given): (.*?) -->$")
# the tests' environment replaces that of `uv run`; nothing is downloaded
_SHELL = """
set -euo pipefail
uv() { [ "$1" = run ] || { echo "only 'uv run' is known here: uv $*" >&2; return 1; }; shift; "$@"; }
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and what the comments before it say."""

    page: str
    line: int
    language: str
    code: str
    comments: tuple[tuple[str, str], ...]

    @property
    def reason(self) -> str | None:
        """Return why the block is not run; None for a block that runs."""
        return next((text for kind, text in self.comments if kind == "not run"), None)

    @property
    def command(self) -> str:
        """Return the shell's lines with the flags that the comments add."""
        lines = self.code.splitlines()
        for kind, text in self.comments:
            if kind != "run with":
                continue
            words, _, flags = text.partition(": ")
            chosen = [i for i, line in enumerate(lines) if words in line.partition(" # ")[0]]
            assert chosen, f"{self}: no command holds {words!r}"
            for i in chosen:
                call, rest = re.findall(r"^(.*?)((?: +[#&].*)?)$", lines[i])[0]
                lines[i] = f"{call} {flags}{rest}"
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """Return all fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        comments, _, _, language, code = fence.groups()
        line = text.count("\n", 0, fence.start(5))
        found.append(Block(page, line, language.strip(), code, tuple(_COMMENT.findall(comments))))
    assert len(re.findall(r"(?m)^ *(?:```|~~~~)", text)) == 2 * len(found), f"{page}: a fence is not read"
    return found


def pages() -> list[str]:
    """Return the Markdown files of the workspace, except results."""
    folders = (
        ROOT.glob("*.md"),
        ROOT.glob("docs/**/*.md"),
        ROOT.glob("arena/*.md"),
        ROOT.glob("examples/*.md"),
        ROOT.glob("packages/**/*.md"),
    )
    return sorted(path.relative_to(ROOT).as_posix() for group in folders for path in group)


def llama(folder: Path, layers: int) -> None:
    """Save a small Llama with random weights and the byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def mamba2(folder: Path) -> None:
    """Save a small Mamba-2 of transformers with random weights and the byte tokenizer."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 32, "head_dim": 32, "num_heads": 4, "n_groups": 1}
    Mamba2ForCausalLM(Mamba2Config(**sizes, vocab_size=512)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def text(folder: Path) -> None:
    """Write a folder of text files."""
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"It was the {i}th of {i + 1} short stories about a folder of text. " * 40)


def corpus(folder: Path) -> None:
    """Prepare a small corpus of the byte tokenizer."""
    data_prepare("stdlib", folder, max_tokens=200_000, progress=False)


# folders that a reader has, by their path on a page
GIVEN: dict[str, Callable[[Path], object]] = {
    "models/Llama-3.2-1B": partial(llama, layers=16),
    "models/Llama-3.1-8B": partial(llama, layers=32),
    "models/mamba2-130m": mamba2,
    "my-text": text,
    "data/slimpajama": corpus,
    "data/fineweb-edu": corpus,
}
BLOCKS = [block for page in pages() for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.reason is None]
SHELL = list(dict.fromkeys(block.page for block in BLOCKS if block.language == "sh" and block.reason is None))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs_or_says_why_not(block):
    assert block.language in ("sh", "python"), "give the block a language that is run: sh or python"
    assert block.reason is None or block.reason in REASONS
    assert {text for kind, text in block.comments if kind == "given"} <= set(GIVEN)
    if block.language == "python":
        compile(block.code, block.page, "exec")
    else:
        subprocess.run(["bash", "-n", "-c", block.command], check=True)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh" and block.reason], ids=str)
def test_a_command_that_is_not_run_has_its_options(block, capsys):
    """The command's recipe, flags, nox sessions and files must exist."""
    for line in block.code.replace("\\\n", " ").replace("$(which tokenmix)", "tokenmix").splitlines():
        words = shlex.split(line, comments=True)
        for session in words[words.index("-s") + 1 :] if "nox" in words else ():
            if session == "--":
                break
            assert f"def {session.replace('-', '_')}(session" in NOXFILE, f"{block}: no nox session {session!r}"
        for word in words:
            assert not word.endswith(".py") or (ROOT / word).is_file(), f"{block}: no file {word}"
        commands = [i for i, word in enumerate(words) if word.startswith("tokenmix") and ":" not in word]
        if not commands or "pip" in words:
            continue
        name, arguments = words[commands[0]], words[commands[0] + 1 :]
        package = name.replace("-", "_") if "-" in name else "tokenmix_core"
        command = arguments[: 2 if arguments[0] == "data" else 1]
        assert importlib.import_module(f"{package}.cli").main([*command, "--help"]) == 0
        shown = capsys.readouterr().out
        for flag in (word for word in arguments if word.startswith("--")):
            assert f"{flag} " in shown or f"{flag}\n" in shown, f"{block}: {' '.join(command)} has no {flag}"
        if command == ["train"]:
            module = "training.baselines" if package == "tokenmix_core" else "recipes"
            recipes = importlib.import_module(f"{package}.{module}")
            assert arguments[1] in recipes.RECIPES, f"{block}: {arguments[1]}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_runs_by_itself(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(block, tmp_path)
    torch.manual_seed(0)
    # errors name the line of the page
    exec(compile("\n" * block.line + block.code, ROOT / block.page, "exec"), {"__name__": "page"})
    for name in [name for name, mixer in registry._MIXERS.items() if mixer.__module__ == "page"]:
        del registry._MIXERS[name]


@pytest.mark.pages
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_a_python_block_runs_in_a_new_process(block, tmp_path):
    prepare(block, tmp_path)
    run(block, [sys.executable, "-c", block.code], tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [pytest.param(x, marks=() if x in QUICK else pytest.mark.pages) for x in SHELL])
def test_the_shell_blocks_of_a_page_run_in_their_order(page, tmp_path):
    for block in blocks_of(page):
        if block.language == "sh" and block.reason is None:
            prepare(block, tmp_path)
            run(block, ["bash", "-c", _SHELL + block.command], tmp_path)


def prepare(block: Block, folder: Path) -> None:
    """Make the folders that a block needs."""
    for kind, path in block.comments:
        if kind == "given" and not (folder / path).exists():
            GIVEN[path](folder / path)


def run(block: Block, command: list[str], folder: Path) -> None:
    """Run a block's process without a GPU and without the network, with this environment's commands."""
    quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **quiet, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{block}:\n{block.command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
