"""Test that errors of malformed calls of every public function name the given and the expected values.

Such calls have no lasting effect.
"""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenmix_core import ops
from tokenmix_core.cli.app import main
from tokenmix_core.data.prepare import prepare
from tokenmix_core.data.sources import open_source
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import load_tokenizer
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.modeling import (
    HybridConfig,
    HybridForCausalLM,
    HybridModel,
    find_mixer,
    register_mixer,
    register_model,
)
from tokenmix_core.ops.types import AttentionOutput
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GDN = {"mixers": ["gated_delta_net"], "mixer_options": {"gated_delta_net": {"num_heads": 1, "head_dim": 16}}}


def z(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def boundaries(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


SHAPE = r"{} must have shape \[.*got \[{}\]"


MERGES = [
    ([], "at least one result, got none"),
    ([AttentionOutput(z(1, 2, 3, 4), z(1, 2))], SHAPE.format(r"lse\[0\]", "1, 2")),
    ([AttentionOutput(z(1, 2, 3, 4), z(1, 2, 3)), AttentionOutput(z(1, 2, 3, 5), z(1, 2, 3))], r"got \[1, 2, 3, 5\]"),
]


@pytest.mark.parametrize(("outputs", "said"), MERGES)
def test_merging(outputs, said):
    with pytest.raises(ValueError, match=said):
        ops.merge_attention(outputs)


CONFIGS = [
    ({"hiden_size": 32}, "unknown key 'hiden_size'; known are .*hidden_size"),
    ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
    ({"hidden_size": "32"}, "hidden_size .*got '32'"),
    ({"vocab_size": -1}, "vocab_size .*got -1"),
    ({"intermediate_size": -1}, "intermediate_size .*got -1"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers .*got 2.0"),
    ({"num_hidden_layers": 3, "mixers": ["gated_delta_net"] * 2}, "3 layers.*got 2 labels"),
    ({"mixers": []}, "got 0 labels"),
    ({"mixers": ["attentoin"], "mixer_options": {}}, "unknown mixer type 'attentoin'; known are attention"),
    ({"mixer_options": {"attention": {"num_heads": 2}}}, "no layer has the label 'attention'"),
    ({"mixer_options": {"gated_delta_net": {"heads": 2}}}, "unknown option 'heads'; GatedDeltaNet has num_heads"),
    ({"mixer_options": {"gated_delta_net": {"type": "gdn"}}}, "unknown mixer type 'gdn'"),
    ({"norm_eps": 0.0}, "norm_eps must be positive, got 0.0"),
    ({"loss_impl": "fused"}, "loss_impl must be .*got 'fused'"),
    ({"eos_token_id": 264}, "vocabulary of 264, got 264"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type must be one of .*got 'dynamic'"),
]


@pytest.mark.parametrize(("changed", "said"), CONFIGS)
def test_configs(changed, said):
    HybridConfig(**SIZES, **GDN)
    with pytest.raises(ValueError, match=said):
        HybridConfig(**{**SIZES, **GDN, **changed})


MODELS = [
    ("attention", {"num_heads": 5}, "num_heads must divide hidden_size, got 5 and 32"),
    ("attention", {"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads, got 4 and 3"),
    ("attention", {"num_heads": 2, "window": 0}, "window .*got 0"),
    ("attention", {"num_heads": 2, "sinks": 2}, "sinks go with a window.*sinks=2"),
    ("attention", {"num_heads": 2, "head_dim": 7}, "even head_dim, got 7"),
    ("gated_delta_net", {"num_heads": 2, "num_v_heads": 3, "head_dim": 16}, "num_heads, got 3 and 2"),
    ("gated_delta_net", {"num_heads": 1, "head_dim": 15, "expand_v": 1.5}, "head_dim=15, expand_v=1.5"),
    ("mamba2", {"head_dim": 24}, "head_dim=24"),
    ("mamba2", {"head_dim": 16, "num_groups": 3}, "num_groups=3"),
]


@pytest.mark.parametrize(("mixer", "options", "said"), MODELS)
def test_models(mixer, options, said):
    with pytest.raises(ValueError, match=said):
        HybridForCausalLM(HybridConfig(**SIZES, mixers=[mixer], mixer_options={mixer: options}))


def test_registering_no_mixer():
    with pytest.raises(ValueError, match="expected a subclass of Mixer for 'x'"):
        register_mixer("x", torch.nn.Linear)
    with pytest.raises(ValueError, match="'attention' is already Attention"):
        register_mixer("attention", find_mixer("mamba2"))


def test_registering_a_model_type_of_another_family():
    config = type("OtherConfig", (HybridConfig,), {"model_type": "llama"})
    with pytest.raises(ValueError, match="'llama' is already LlamaConfig"):
        register_model(config, HybridModel, HybridForCausalLM)


FORWARDS = [
    ({}, "exactly one of input_ids and inputs_embeds"),
    ({"input_ids": boundaries(1, 2, 3)}, r"input_ids must have shape \[B, T\].*got \[3\]"),
    ({"input_ids": z(1, 0, dtype=torch.long)}, r"at least 1, got \[1, 0\]"),
    ({"input_ids": z(2, 4, dtype=torch.long), "attention_mask": z(2, 3)}, r"\[2, 4\].*got \[2, 3\]"),
    ({"input_ids": z(2, 4, dtype=torch.long), "labels": z(2, 3, dtype=torch.long)}, r"labels .*\[2, 4\], got \[2, 3\]"),
    ({"input_ids": z(1, 4, dtype=torch.long), "cu_seqlens": boundaries(0, 4), "use_cache": True}, "exclude each other"),
    ({"input_ids": z(1, 4, dtype=torch.long), "past_key_values": {}}, "must be a HybridCache.*got dict"),
    ({"input_ids": z(1, 4, dtype=torch.long), "colour": 1}, "unknown input 'colour'"),
    ({"input_ids": z(1, 4, dtype=torch.long), "output_attentions": True}, "output_attentions=True"),
    ({"input_ids": z(2, 4, dtype=torch.long), "position_ids": z(3, 4)}, r"\[2, 4\].*got \[3, 4\]"),
]


@pytest.mark.parametrize(("inputs", "said"), FORWARDS)
def test_forward(inputs, said, checkpoint):
    model = HybridForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match=said):
        model(**inputs)


def recipe(**changed):
    batch = Tokens(128)
    parts = {
        "name": "nano",
        "description": "for tests",
        "model": {**SIZES, **GDN},
        "data": DataRecipe(seq_len=32),
        "optimizer": OptimizerRecipe(total_tokens=Tokens(512), batch_tokens=batch, micro_batch_tokens=batch),
    }
    return Recipe(**{**parts, **changed})


RECIPES = [
    (lambda: DataRecipe(seq_len=1), "seq_len must be at least 2, got 1"),
    (lambda: DataRecipe(sources=[]), "at least one source"),
    (lambda: DataRecipe(sources=["stdlib", "mqar"], weights=[1.0]), r"one for each of the sources .*got \[1.0\]"),
    (lambda: DataRecipe(weights=[0.0]), r"weights must be positive.*got \[0.0\]"),
    (lambda: DataRecipe(mqar_ramp=-0.1), "mqar_ramp must be from 0 to 1, got -0.1"),
    (lambda: DataRecipe(documents="mixed"), "one of 'separate', 'joined', got 'mixed'"),
    (lambda: DataRecipe(data_seed=-1), "data_seed .*got -1"),
    (lambda: Tokens("15X"), "a number of tokens such as .*got '15X'"),
    (lambda: Tokens("0.3"), "got '0.3'"),
    (lambda: OptimizerRecipe(learning_rate=-1.0), "learning_rate .*got -1.0"),
    (lambda: OptimizerRecipe(min_learning_rate=1.0), "min_learning_rate must be from 0 to 0.0003, got 1.0"),
    (lambda: OptimizerRecipe(adam_beta2=1.5), "adam_beta2 must be from 0 to 1, got 1.5"),
    (lambda: OptimizerRecipe(warmup_tokens=Tokens("2B")), "warmup_tokens must be below total_tokens=1000000000"),
    (lambda: OptimizerRecipe(weight_decay=True), "weight_decay .*got True"),
    (lambda: OptimizerRecipe(batch_tokens=Tokens(100)).split(32, 1), "multiple of seq_len .*32 × 1, got 100"),
    (lambda: RunRecipe(precision="fp8"), "precision must be .*got 'fp8'"),
    (lambda: RunRecipe(save_steps=0), "save_steps must be at least 1, got 0"),
    (lambda: replace(recipe(), model_type="gpt9").model_config(), "model_type 'gpt9' is not registered"),
    (
        lambda: overridden(recipe(), ["--learning_rat", "1"]),
        "unknown field --learning_rat; the nearest is 'learning_rate'",
    ),
    (lambda: overridden(recipe(), ["--model.hiden_size", "3"]), "unknown field --model.hiden_size.*'hidden_size'"),
    (lambda: overridden(recipe(), ["--model.hidden_size"]), "--model.hidden_size needs a value"),
    (lambda: overridden(recipe(), ["--seq_len", "many"]), "seq_len"),
    (lambda: overridden(recipe(), ["--total_tokens", "1Q"]), "total_tokens|1Q"),
    (lambda: overridden(recipe(), ["stray"]), "unexpected argument 'stray'"),
    (lambda: overridden(recipe(), config="/no/such/file.yaml"), "/no/such/file.yaml cannot be read"),
]


@pytest.mark.parametrize(("call", "said"), RECIPES)
def test_recipes(call, said):
    recipe().model_config()
    with pytest.raises(ValueError, match=said):
        call()


YAMLS = [
    ("seq_len: [1", "not valid YAML"),
    ("- 1\n- 2", "must hold `field: value` lines, got list"),
    ("learning_rates: 1", "'learning_rates' in .*nearest is 'learning_rate'"),
    ("model: 3", "model must hold"),
]


@pytest.mark.parametrize(("content", "said"), YAMLS)
def test_recipe_files(content, said, tmp_path):
    (tmp_path / "file.yaml").write_text(content)
    with pytest.raises(ValueError, match=said):
        overridden(recipe(), config=tmp_path / "file.yaml")


OPTIONS = [
    ({"limit": 0}, "limit must be at least 1, got 0"),
    ({"limit": 2.5}, "limit .*got 2.5"),
    ({"batch_size": True}, "batch_size .*got True"),
    ({"max_length": -5}, "max_length .*got -5"),
    ({"vocab_size": "all"}, "vocab_size .*got 'all'"),
    ({"lengths": ()}, r"lengths .*got \(\)"),
    ({"lengths": (16, 1)}, r"from 2 on, got \(16, 1\)"),
    ({"lengths": (16, 16)}, r"differ from each other, got \(16, 16\)"),
    ({"seed": -1}, "seed .*got -1"),
    ({"tasks": ()}, "at least one task"),
]


@pytest.mark.parametrize(("fields", "said"), OPTIONS)
def test_evaluation_options(fields, said):
    with pytest.raises(ValueError, match=said):
        EvalOptions(**fields)


def _edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def _rename_weight(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.stranger.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no model: expected config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "cut weights": (lambda f: _cut(f / "model.safetensors", 5000), "damaged or cut short"),
    "empty weights": (lambda f: _cut(f / "model.safetensors", 0), "damaged or cut short"),
    "garbled header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 4096), "damaged or cut short"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON file|cannot be loaded"),
    "foreign type": (lambda f: _edit_config(f, model_type="gpt9"), "gpt9"),
    "unknown key": (lambda f: _edit_config(f, widht=3), "unknown key 'widht'"),
    "unknown dtype": (lambda f: _edit_config(f, dtype="float7"), "float7"),
    "other width": (lambda f: _edit_config(f, hidden_size=64), "do not fit"),
    "more layers": (
        lambda f: _edit_config(f, num_hidden_layers=4, mixers=["gated_delta_net", "attention"] * 2),
        "do not fit|missing",
    ),
    "foreign weight": (_rename_weight, r"1 missing \(model.norm.weight\); 1 unknown \(model.stranger.weight\)"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "holds no tokenizer"),
    "tokenizer is not JSON": (lambda f: (f / "tokenizer.json").write_text("{]"), "holds no tokenizer"),
}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder, check that it fails as it should, and return its message."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def run(*argv):
        before = sorted(tmp_path.rglob("*"))
        assert main(list(map(str, argv)), recipes={"nano": recipe}) == 2
        said = capsys.readouterr()
        last = said.err.strip().splitlines()[-1]
        assert last.startswith("tokenmix"), said.err
        assert "Traceback" not in said.err
        assert sorted(tmp_path.rglob("*")) == before
        return last

    return run


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoints(damage, checkpoint, tmp_path, call):
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    spoil, said = DAMAGES[damage]
    spoil(folder)
    message = call("generate", folder, "--prompt", "x")
    assert str(folder) in message or "gpt9" in message or "unknown key" in message
    with pytest.raises(ValueError, match=said):
        raise ValueError(message)


COMMANDS = [
    ((), "COMMAND"),
    (("trian",), "invalid choice: 'trian'"),
    (("train",), "RECIPE"),
    (("train", "huge"), "no recipe 'huge'; the nearest are .*nano"),
    (("train", "nano", "--total_token", "1M"), "unknown field --total_token; the nearest is 'total_tokens'"),
    (("train", "nano", "--learning_rate"), "learning_rate"),
    (("train", "nano", "--config", "none.yaml"), "none.yaml cannot be read"),
    (("train", "nano", "--evaluations", "mqra"), "no suite 'mqra'; choose from .*mqar"),
    (("train", "nano", "--report_to", "no_such_logger"), "no_such_logger is no logger that is installed here"),
    (("train", "nano", "--sources", "no/such/tokens"), "no/such/tokens is no token file"),
    (("train", "nano", "--batch_tokens", "100"), "got 100"),
    (("eval", "CHECKPOINT"), "name what to run: --suite NAME, or --tasks A,B"),
    (("eval", "CHECKPOINT", "--suite", "lm-eval"), "suite lm-eval runs the tasks that --tasks names, got none"),
    (("eval", "CHECKPOINT", "--tasks", "ruler_vt"), "ruler_vt needs context lengths; run it by: --suite ruler"),
    (("eval", "CHECKPOINT", "--suite", "foo"), "no suite 'foo'; choose from commonsense"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--tasks", "mqar-7"), "no task 'mqar-7'; it has mqar-64-4"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--limit", "0"), "limit must be at least 1, got 0"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--limit", "few"), "invalid int value: 'few'"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--lengths", "64,x"), "separated by commas, got '64,x'"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--lengths", "64,64"), "differ from each other"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--vocab-size", "9999"), "vocabulary of 264"),
    (("eval", "CHECKPOINT", "--suite", "niah", "--lengths", "100", "--tasks", "s-niah-1"), "max_tokens=100"),
    (("eval", "CHECKPOINT", "--suite", "niah", "--text", "no.txt"), "'no.txt' does not exist"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--device", "gpu"), "--device must be cpu, cuda or cuda:N, got 'gpu'"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--device", "cuda:77"), "cuda:77 is not here: this machine has"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--dtype", "int8"), "--dtype must be one of .*got 'int8'"),
    (("eval", "CHECKPOINT", "--suite", "mqar", "--verbose"), "unexpected argument '--verbose'"),
    (("eval", "no/such/folder", "--suite", "mqar"), "'no/such/folder' must be a folder with a model"),
    (("eval", ".", "--suite", "mqar"), "holds no model: expected config.json"),
    (("generate", "CHECKPOINT"), "--prompt"),
    (("generate", "CHECKPOINT", "--prompt", "x", "--temperature", "-1"), "--temperature must be at least 0, got -1"),
    (("generate", "CHECKPOINT", "--prompt", "x", "--top-p", "0"), "--top-p in .*got 0 and 0.0"),
    (("generate", "CHECKPOINT", "--prompt", "x", "--max-new-tokens", "0"), "at least 1, got 0"),
    (("bench", "unknown"), "no recipe 'unknown'; the nearest are .*nano"),
    (("bench", "CHECKPOINT", "--repeats", "0"), "--repeats must be at least 1, got 0"),
    (("bench", "nano", "--lengths", "0"), "positive integers separated by commas, got '0'"),
    (("data",), "COMMAND"),
    (("data", "prepare", "stdlib"), "DIR"),
    (("data", "prepare", "no.jsonl", "out"), "'no.jsonl' does not exist"),
    (("data", "prepare", "stdlib", "out", "--held-out", "2"), "held_out must be a share .*got 2.0"),
    (("data", "prepare", "stdlib", "out", "--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
    (("train", "nano", "--output_dir", "x"), "unknown field --output_dir; `info RECIPE --fields` shows all"),
    (("info", ".", "--fields"), "--fields shows those of a recipe, got '.'"),
    (("info", "nothing"), "no recipe 'nothing'; the nearest are .*nano"),
    (("info", "."), "holds no model: expected a folder with config.json"),
]


@pytest.mark.parametrize(("argv", "said"), COMMANDS, ids=[" ".join(argv) or "nothing" for argv, _ in COMMANDS])
def test_commands(argv, said, checkpoint, call):
    message = call(*(checkpoint if word == "CHECKPOINT" else word for word in argv))
    with pytest.raises(ValueError, match=said):
        raise ValueError(message)


def _write(path, content):
    path.write_text(content) if isinstance(content, str) else path.write_bytes(content)
    return str(path)


CORPORA = [
    (
        lambda d: prepare(_write(d / "a.jsonl", '{"text": 3}'), d / "out", progress=False),
        "field 'text' must be text, got int",
    ),
    (
        lambda d: prepare(_write(d / "a.jsonl", '{"body": ""}'), d / "out", progress=False),
        "no field 'text'; it has body",
    ),
    (lambda d: prepare(_write(d / "a.jsonl", "{"), d / "out", progress=False), "line 1: not valid JSON"),
    (lambda d: prepare(_write(d / "a.txt", b"\xff\xfe"), d / "out", progress=False), "not UTF-8"),
    (lambda d: prepare(_write(d / "a.txt", ""), d / "out", progress=False), "has no text"),
    (lambda d: prepare(str(d), d / "out", progress=False), "nothing to read: expected files that end in"),
    (lambda d: open_source(str(d / "none.txt")), "does not exist"),
    (lambda d: load_tokenizer(str(d)), "could not be loaded .*expected 'bytes'"),
    (lambda d: TokenFile(d), "no complete token file: it lacks meta.json"),
    (lambda d: TokenFile(d / "none"), "expected a folder"),
    (lambda d: TokenFile(d, "test"), "'train', 'held_out' or 'all', got 'test'"),
]


@pytest.mark.parametrize(("make", "said"), CORPORA)
def test_corpora(make, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        make(tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


TOKEN_FILES = {
    "cut": (lambda d: _cut(d / "tokens.bin", 100), "tokens.bin is truncated: expected .* got 100"),
    "changed": (lambda d: (d / "tokens.bin").write_bytes(b"x" * (d / "tokens.bin").stat().st_size), "sha256"),
    "meta": (lambda d: (d / "meta.json").write_text('{"format": "other"}'), "must have format .*got 'other'"),
    "offsets": (lambda d: np.save(d / "documents.npy", np.arange(3)), "does not belong to|sha256"),
}


@pytest.mark.parametrize("damage", TOKEN_FILES)
def test_token_files(damage, token_file, tmp_path):
    folder = tmp_path / "tokens"
    shutil.copytree(token_file, folder)
    spoil, said = TOKEN_FILES[damage]
    spoil(folder)
    with pytest.raises(ValueError, match=said):
        TokenFile(folder)


def test_there_are_at_least_a_hundred():
    tables = (MERGES, CONFIGS, MODELS, FORWARDS, RECIPES, YAMLS, OPTIONS, DAMAGES, COMMANDS, CORPORA, TOKEN_FILES)
    assert sum(map(len, tables)) >= 100
