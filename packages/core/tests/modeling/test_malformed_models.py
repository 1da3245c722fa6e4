"""Test that each malformed configuration, weight, cache or call of a model is answered by one sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmix_core.cli.app import main
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

SIZES = {"vocab_size": 59, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"mixer_options": {"attention": {"num_heads": 2}}}


def rope(kind="default", **parameters):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

CONFIGS = [
    ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
    ({"rope_theta": 0.0}, "rope_theta must be a positive number, got 0.0"),
    ({"rope_theta": "10000"}, "rope_theta must be a positive number, got '10000'"),
    (rope(rope_theta=float("nan")), "rope_theta must be a positive number, got nan"),
    (rope(rope_theta=True), "rope_theta must be a positive number, got True"),
    (rope("linear"), "rope_type 'linear' needs factor"),
    (rope("yarn"), "rope_type 'yarn' needs factor"),
    (rope("llama3"), "'llama3' needs factor, low_freq_factor, high_freq_factor"),
    (rope("llama3", factor=8.0, low_freq_factor=1.0), "'llama3' needs high_freq_factor"),
    (rope("linear", factor=0), "factor must be a positive number, got 0"),
    (rope("linear", factor=-2.0), "factor must be a positive number, got -2.0"),
    (rope("linear", factor="2"), "factor must be a positive number, got '2'"),
    (rope("linear", factor=None), "'linear' needs factor"),
    (rope("linear", factor=2.0, beta_fast=3), "'linear' has no 'beta_fast'; it has rope_theta, factor"),
    (
        rope("llama3", **LLAMA3 | {"low_freq_factor": 4.0}),
        "low_freq_factor must be below high_freq_factor, got 4.0 and",
    ),
    (rope("llama3", **LLAMA3, original_max_position_embeddings=0), "original_max_position_embeddings must be .*got 0"),
    (rope("yarn", factor=2.0, truncate=1), "truncate must be True or False, got 1"),
    (rope("yarn", factor=2.0, beta_slow=9.0, beta_fast=1.0), "beta_slow must be below beta_fast"),
    (rope("yarn", factor=2.0, attention_factor=-1.0), "attention_factor must be a positive number, got -1.0"),
    (rope("longrope", factor=2.0), "rope_type must be one of default, linear, llama3, yarn, got 'longrope'"),
    (rope(junk=1), "'default' has no 'junk'; it has rope_theta"),
    (rope(factor=2.0), "'default' has no 'factor'"),
    (rope(partial_rotary_factor=0.5), "whole heads are rotated, got partial_rotary_factor=0.5"),
    ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type must be .*got 'dynamic'"),
    ({"rope_scaling": [1]}, r"rope_scaling must be a dictionary, got \[1\]"),
    ({"rope_parameters": "yarn"}, "rope_parameters must be .*got 'yarn'"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000000"),
    ({"num_hidden_layers": 10_001}, "at most 10000, got 10001"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, got True"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, got 0"),
    ({"initializer_range": -0.1}, "initializer_range must be at least 0, got -0.1"),
    ({"norm_eps": float("inf")}, "norm_eps must be a number, got inf"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be True or False, got 'yes'"),
    ({"mixers": "attention"}, "mixers must be .*got 'attention'"),
    ({"mixers": [1, 2]}, r"mixers must be .*got \[1, 2\]"),
    ({"mixer_options": {"attention": 3}}, "mixer_options must be .*got"),
    ({"mixer_options": {"attention": {"num_heads": 2.0}}}, "num_heads must be an integer, got 2.0"),
    ({"mixer_options": {"attention": {"impl": "fast"}}}, "impl must be .*got 'fast'"),
]


@pytest.mark.parametrize(("changed", "said"), CONFIGS, ids=range(len(CONFIGS)))
def test_configs(changed, said):
    HybridConfig(**SIZES, **HEADS)
    with pytest.raises(ValueError, match=said):
        HybridConfig(**{**SIZES, **HEADS, **changed})


def test_right_rotary_parameters_pass():
    for right in (
        rope(),
        rope("linear", factor=2),
        rope("llama3", **LLAMA3, original_max_position_embeddings=64),
        rope("yarn", factor=2.0, truncate=False, beta_fast=32.0, beta_slow=1.0),
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
    ):
        HybridForCausalLM(HybridConfig(**SIZES, **HEADS, **right))


MIXERS = [
    ("attention", {"num_heads": 2, "head_dim": -2}, "head_dim must be at least 1, got -2"),
    ("attention", {"num_heads": 2, "head_dim": 0}, "head_dim must be at least 1, got 0"),
    ("attention", {"num_heads": 0}, "num_heads must be a multiple of num_kv_heads, got 0"),
    ("attention", {"num_heads": -2, "num_kv_heads": -2}, "got -2 and -2"),
    ("attention", {"num_heads": 2, "num_kv_heads": 0}, "got 2 and 0"),
    ("gated_delta_net", {"num_heads": 1, "head_dim": -16}, "head_dim=-16"),
    ("gated_delta_net", {"num_heads": 0, "head_dim": 16}, "got 0 and 0"),
    ("gated_delta_net", {"num_heads": 1, "head_dim": 16, "expand_v": -1.0}, "expand_v=-1.0"),
    ("gated_delta_net", {"num_heads": 1, "head_dim": 512}, "go up to 256, got 512"),
    ("gated_delta_net", {"num_heads": 1, "head_dim": 16, "conv_size": 9}, "from 2 to 8, got 9"),
    ("mamba2", {"head_dim": -16}, "head_dim=-16"),
    ("mamba2", {"head_dim": 16, "state_size": 0}, "state_size=0"),
    ("mamba2", {"head_dim": 16, "expand": -2.0}, "expand=-2.0"),
    ("mamba2", {"head_dim": 16, "conv_size": 1}, "from 2 to 8, got 1"),
]


@pytest.mark.parametrize(("mixer", "options", "said"), MIXERS, ids=range(len(MIXERS)))
def test_mixers(mixer, options, said):
    with pytest.raises(ValueError, match=said):
        HybridForCausalLM(HybridConfig(**SIZES, mixers=[mixer], mixer_options={mixer: options}))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    options = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 2}}
    config = HybridConfig(**SIZES, mixers=["gated_delta_net", "attention"], mixer_options=options)
    return HybridForCausalLM(config).eval()


def ints(*shape):
    return torch.zeros(shape, dtype=torch.long)


ROW, UP = ints(1, 4), torch.arange(4).unsqueeze(0)
AGAIN = torch.tensor([[0, 1, 0, 1]])
WHOLE, PARTS = torch.tensor([0, 4]), torch.tensor([0, 2, 4])

CALLS = [
    ({"input_ids": ROW, "position_ids": AGAIN, "use_cache": True}, "are documents, .*got B = 1, a cache"),
    ({"input_ids": ints(2, 4), "position_ids": AGAIN, "use_cache": False}, "are documents, .*got B = 2"),
    ({"input_ids": ints(2, 4), "position_ids": ints(2, 4)}, "are documents, .*got B = 2, a cache"),
    ({"input_ids": ROW, "position_ids": AGAIN, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, "got B = 1.*padding"),
    ({"input_ids": ROW, "position_ids": UP[:, :3]}, r"position_ids must have shape \[1, 4\].*got \[1, 3\]"),
    ({"input_ids": ROW, "cu_seqlens": WHOLE, "cu_seq_lens_q": WHOLE}, "two names of one argument: give one of them"),
    (
        {"input_ids": ROW, "cu_seq_lens_q": WHOLE, "cu_seq_lens_k": PARTS},
        r"same boundaries, .*got \[0, 4\] and \[0, 2, 4\]",
    ),
    (
        {"input_ids": ROW, "cu_seq_lens_q": PARTS, "cu_seq_lens_k": torch.tensor([0, 3, 4])},
        "must be the same boundaries",
    ),
    ({"input_ids": ROW, "cu_seq_lens_q": [0, 4]}, "cu_seq_lens_q must be a tensor, got list"),
    ({"input_ids": ints(2, 4), "cu_seq_lens_q": PARTS}, r"one row \(B = 1\), got B = 2"),
    ({"input_ids": ROW, "cu_seq_lens_q": PARTS, "use_cache": True}, "and a cache exclude each other"),
    ({"input_ids": ROW, "cu_seq_lens_q": PARTS, "attention_mask": ROW + 1}, "attention_mask exclude each other"),
    ({"input_ids": ROW, "cu_seq_lens_q": torch.tensor([0, 5])}, "rise from 0 to at most T = 4"),
    ({"input_ids": ints(2, 4), "seq_idx": ints(2, 4)}, r"seq_idx goes with one row \(B = 1\).*got B = 2"),
    ({"input_ids": ROW, "seq_idx": ROW, "use_cache": True}, "without a cache"),
    ({"input_ids": ROW, "seq_idx": ints(1, 3)}, r"seq_idx must have shape \[B, T\] = \[1, 4\], got \[1, 3\]"),
    ({"input_ids": ROW, "seq_idx": 3}, "seq_idx must be a tensor, got int"),
    ({"input_ids": ROW, "attention_mask": [1, 1, 1, 1]}, "attention_mask must be a tensor, got list"),
    ({"input_ids": ROW, "attention_mask": ints(1, 1, 4, 4)}, r"attention_mask must have shape .*got \[1, 1, 4, 4\]"),
    ({"input_ids": ROW, "inputs_embeds": torch.zeros(1, 4, 32)}, "exactly one of input_ids and inputs_embeds"),
    ({"inputs_embeds": torch.zeros(4, 32)}, r"inputs_embeds must have shape \[B, T, D\].*got \[4, 32\]"),
    ({"input_ids": ROW, "max_length": 4}, "unknown input 'max_length'"),
    ({"input_ids": ROW, "past_key_values": ((ROW, ROW),)}, "must be a HybridCache .*got tuple"),
]


@pytest.mark.parametrize(("inputs", "said"), CALLS, ids=range(len(CALLS)))
def test_calls(model, inputs, said):
    with pytest.raises(ValueError, match=said):
        model(**inputs)


def spoil(value):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][3] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def write(content):
    return lambda folder: (folder / "config.json").write_text(content)


def edit(**changes):
    def change(folder):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **changes}))

    return change


def lose(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


FOLDERS = {
    "NaN": (spoil(float("nan")), r"not finite: NaN or infinity in 1 tensors \(model.norm.weight\)"),
    "infinity": (spoil(float("inf")), r"not finite: .*\(model.norm.weight\)"),
    "minus infinity": (spoil(float("-inf")), r"not finite: .*\(model.norm.weight\)"),
    "lost": (lose, r"1 missing \(model.norm.weight\)"),
    "null": (write("null"), "config.json must hold a dictionary"),
    "list": (write("[]"), "config.json must hold a dictionary"),
    "number": (write("3"), "config.json must hold a dictionary"),
    "text": (write('"x"'), "config.json must hold a dictionary"),
    "layers": (edit(num_hidden_layers=10**9, mixers=None), "at most 10000, got 1000000000"),
    "theta": (edit(rope_parameters={"rope_type": "default", "rope_theta": -1}), "rope_theta must be .*got -1"),
    "no factor": (edit(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "'linear' needs factor"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders(kind, model, tmp_path, capsys):
    model.save_pretrained(tmp_path)
    change, said = FOLDERS[kind]
    change(tmp_path)
    with pytest.raises(ValueError, match=said):
        HybridForCausalLM.from_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("tokenmix generate: error: ")
    assert not any("Traceback" in line for line in lines)


def test_weights_that_are_not_finite_load_when_told(model, tmp_path):
    model.save_pretrained(tmp_path)
    spoil(float("nan"))(tmp_path)
    assert HybridForCausalLM.from_pretrained(tmp_path, strict=False).model.norm.weight.isnan().sum() == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [(lose, r"1 missing \(model.norm.weight\)"), (spoil(float("nan")), r"not finite: .*\(model.norm.weight\)")],
    ids=["lost", "NaN"],
)
@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("eval", "--suite", "mqar"), ("bench",)])
def test_other_peoples_models_are_held_to_what_ours_are(change, said, command, tmp_path, capsys):
    sizes = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    change(tmp_path)
    name, *options = command
    capsys.readouterr()
    assert main([name, str(tmp_path), *options]) == 2
    with pytest.raises(ValueError, match=said):
        raise ValueError(capsys.readouterr().err)


def test_there_are_at_least_eighty():
    assert sum(map(len, (CONFIGS, MIXERS, CALLS, FOLDERS))) >= 80
