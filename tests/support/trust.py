"""Model folders whose own Python code leaves a mark when it runs, and the contract that no command runs such code."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

_CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = "with_code"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
def generate(model, *args, **kwargs):
    return args
"""
_CLASSES = {
    "AutoConfig": "code.Config",
    "AutoModelForCausalLM": "code.Model",
    "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"],
}
_SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def mark_of(folder: Path) -> Path:
    """Return the file that the code of a folder creates."""
    return folder.with_name(f"{folder.name}-ran")


def folder_with_code(folder: Path, checkpoint: Path | None = None) -> Path:
    """Make a folder with code: of a model type that only its code knows, or a copy of a checkpoint of a known type."""
    if checkpoint is None:
        folder.mkdir()
        fields, tokenizer = {"model_type": "with_code", "architectures": ["Model"], **_SIZES, "vocab_size": 264}, {}
    else:
        shutil.copytree(checkpoint, folder)
        fields, tokenizer = (json.loads((folder / f"{x}config.json").read_text()) for x in ("", "tokenizer_"))
    tokenizer.setdefault("tokenizer_class", "Tokenizer")
    (folder / "config.json").write_text(json.dumps({**fields, "auto_map": _CLASSES}))
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "auto_map": _CLASSES}))
    (folder / "custom_generate").mkdir()
    for path in (folder / "code.py", folder / "custom_generate" / "generate.py"):
        path.write_text(_CODE.format(mark=str(mark_of(folder))))
    return folder


def run_with_yes(main: Callable[..., int], call: Sequence[str], folder: Path) -> int:
    """Run a command whose stdin answers every question with yes; return its exit code.

    Raises:
        AssertionError: the folder's code ran, or the command read standard input although "-" is no argument.
    """
    before, sys.stdin = sys.stdin, io.StringIO("y\n" * 20)
    try:
        code = main(call)
        assert sys.stdin.tell() == 0 or "-" in call, "standard input was read"
    finally:
        sys.stdin = before
    assert not mark_of(folder).exists(), f"{' '.join(call)} ran the code of {folder}"
    return code


class TrustContract:
    """Tests that commands refuse to run code in a model's folder; a subclass `TestX(TrustContract)` sets attributes.

    Attributes:
        main: the package's command line, as `staticmethod`.
        calls: the commands that read a model's folder, besides `generate`, and the arguments after the folder, in which
            OUT stands for a folder to make.
    """

    main: ClassVar[Callable[..., int]]
    calls: ClassVar[dict[str, str]] = {}

    def pytest_generate_tests(self, metafunc):
        if "command" in metafunc.fixturenames:
            metafunc.parametrize("command", ["generate", *self.calls], scope="class")

    def test_code_in_a_folder_is_refused_and_the_message_names_the_flag(self, command, tmp_path, capsys):
        folder = folder_with_code(tmp_path / "model")
        options = {"generate": "--prompt x", **self.calls}[command].replace("OUT", str(tmp_path / "out"))
        assert run_with_yes(self.main, [command, str(folder), *options.split()], folder) == 2
        assert "--trust-remote-code" in capsys.readouterr().err
