"""Test that wrong or hostile model folders are refused at once, in one sentence, by every command and by Python."""

import json
import pickle
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmix_core.cli.app import main
from tokenmix_core.modeling import HybridForCausalLM
from tokenmix_core.modeling.folder_checks import index_parts
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import Tokens

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def _config(**changes):
    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def _write(name, content):
    return lambda folder: (folder / name).write_text(content)


def _weights(change):
    def spoil(folder):
        tensors = load_file(folder / WEIGHTS)
        save_file(change(tensors), folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def _index(name, inside="x.safetensors"):
    def spoil(folder):
        (folder / WEIGHTS).rename(folder.parent / inside)
        parts = dict.fromkeys(load_file(folder.parent / inside), name.format(folder=folder.parent))
        (folder / INDEX).write_text(json.dumps({"weight_map": parts}))

    return spoil


def _pickled(content):
    def spoil(folder):
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return spoil


class Hostile:
    def __reduce__(self):
        return print, ("code of the file ran",)


NORM = "model.norm.weight"
FOLDERS = {
    "index, parent": (
        _index("../x.safetensors"),
        r"index.json names \.\./x.safetensors, which lies outside its folder",
    ),
    "index, absolute": (_index("{folder}/x.safetensors"), "which lies outside its folder; do not use this model"),
    "index, absent": (_index("y.safetensors"), "names y.safetensors, which is not there"),
    "index, number": (_write(INDEX, '{"weight_map": {"a": 3}}'), "names 3, which is not there"),
    "index, null": (_write(INDEX, "null"), "index.json is damaged"),
    "index, other": (_write(INDEX, '{"weight_map": null}'), "must hold the files of the weights by name"),
    "dtype": (_config(dtype=1e308), r"dtype in config.json must be null or of type str, got 1e\+308"),
    "kind": (_config(model_type=[]), r"model_type in config.json must be null or of type str, got \[\]"),
    "end": (_config(eos_token_id="x"), "eos_token_id in config.json must be null or of type int or list, got 'x'"),
    "index, deep": (_write(INDEX, "[" * 100_000), "index.json is damaged"),
    "int8": (_weights(lambda x: x | {NORM: x[NORM].to(torch.int8)}), f"not floating-point numbers: .*{NORM} (I|int)8"),
    "int32": (_weights(lambda x: x | {NORM: x[NORM].to(torch.int32)}), f"not floating-point.*{NORM} (I|int)32"),
    "bool": (_weights(lambda x: x | {NORM: x[NORM].bool()}), f"not floating-point numbers: .*{NORM}"),
    "config, null": (_write("config.json", "null"), "config.json must hold a dictionary of fields"),
    "config, list": (_write("config.json", "[1]"), "config.json must hold a dictionary of fields"),
    "config, deep": (_write("config.json", '{"a":' * 100_000), "config.json is not a valid JSON file|damaged"),
    "hidden_size": (_config(hidden_size=10**9), "hidden_size must be at most 16777216, got 1000000000"),
    "vocab_size": (_config(vocab_size=10**9), "vocab_size must be at most 268435456, got 1000000000"),
    "intermediate": (_config(intermediate_size=10**9), "intermediate_size must be at most"),
    "layers": (_config(num_hidden_layers=10**9), "num_hidden_layers must be at most 10000, got 1000000000"),
    "both large": (_config(hidden_size=2**20, vocab_size=2**20), "do not fit config.json: vocab_size=1048576 times"),
    "heads": (
        _config(mixer_options={"gated_delta_net": {"num_heads": 10**12}, "attention": {"num_heads": 2}}),
        "num_heads|memory|fit",
    ),
    "pickle, code": (_pickled(pickle.dumps(Hostile())), "cannot be read|cannot be loaded"),
    "pickle, cut": (_pickled(b"\x80\x02"), "cannot be read|cannot be loaded"),
    "pickle, text": (_pickled(b"hello"), "cannot be read|cannot be loaded"),
    "header, huge": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 8 + b"{}"), "damaged or cut short"),
    "header, deep": (
        lambda f: (f / WEIGHTS).write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        "damaged or cut short",
    ),
}


@pytest.fixture
def folder(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_loaded(checkpoint):
    HybridForCausalLM.from_pretrained(checkpoint)


def refused(call, capsys):
    """Run a command that must fail; return its message."""
    capsys.readouterr()
    begun = time.process_time()
    assert main(call) == 2
    assert time.process_time() - begun < 5, "it took long, also on a busy machine"
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "code of the file ran" not in said.out
    last = said.err.strip().splitlines()[-1]
    assert last.startswith(f"tokenmix {call[0]}: error: ")
    assert len(last) < 900
    return last


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_model_folder(kind, folder, capsys):
    spoil, told = FOLDERS[kind]
    spoil(folder)
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(refused(["generate", str(folder), "--prompt", "x"], capsys))
    with pytest.raises(ValueError, match=r"\w"):
        HybridForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", [kind for kind in FOLDERS if kind.startswith("config") or "size" in kind])
def test_a_model_folder_that_info_describes(kind, folder, capsys):
    spoil, told = FOLDERS[kind]
    spoil(folder)
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(refused(["info", str(folder)], capsys))


MAMBA = {
    "model_type": "mamba2",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 264,
    "num_heads": 4,
    "head_dim": 16,
}
CONVERSIONS = {
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, None, "quantization_config='gptq' cannot be conv"),
    "quantized oddly": ({"quantization_config": 3}, None, "quantization_config=3 cannot be converted"),
    "large": ({"hidden_size": 10**9}, None, "hidden_size must be at most"),
    "outside": ({}, _index("../x.safetensors"), "which lies outside its folder"),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_folder_to_convert(kind, folder, tmp_path, capsys):
    changes, spoil, told = CONVERSIONS[kind]
    (folder / "config.json").write_text(json.dumps(MAMBA | changes))
    if spoil is not None:
        spoil(folder)
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(refused(["convert", str(folder), "--out", str(tmp_path / "out")], capsys))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "null", "3", "{}", '{"model": {"type": "no"}}'])
def test_a_tokenizer_file(content, folder, tmp_path, capsys):
    (folder / "tokenizer.json").write_text(content)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    assert "holds no tokenizer that can be loaded" in refused(["generate", str(folder), "--prompt", "x"], capsys)
    (tmp_path / "in.txt").write_text("text")
    call = ["data", "prepare", str(tmp_path / "in.txt"), str(tmp_path / "out"), "--tokenizer", str(folder)]
    capsys.readouterr()
    assert main(call) == 2
    said = capsys.readouterr().err
    assert "could not be loaded" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("text", ["9**999999999", "10**64", "0**99", "9" * 5000, "2**-1", "1e400", "2**2**2", "**"])
def test_a_number_of_tokens(text):
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"expected a number of tokens such as 524288, 2\*\*19, 0.5M or 15B"):
        Tokens(text)
    assert time.process_time() - begun < 0.5
    assert Tokens("2**62") == 2**62


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"])
def test_a_size_of_a_recipe(name):
    from tokenmix_core.training import tiny

    begun = time.process_time()
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        overridden(tiny(), [f"--model.{name}", "1000000000"])
    assert time.process_time() - begun < 5


def test_too_little_memory_is_told_in_a_sentence(capsys, monkeypatch):
    from tokenmix_core.cli import commands

    def fail(*args):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(commands, "bench", fail)
    assert "there is not enough memory for these sizes: [enforce fail]" in refused(["bench", "tiny"], capsys)


def test_an_index_of_files_in_its_folder_is_read(folder):
    shutil.copy(folder / WEIGHTS, folder / "part.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"a": "part.safetensors"}}')
    assert index_parts(folder / INDEX) == {"a": "part.safetensors"}
