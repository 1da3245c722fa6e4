"""Conversion of pretrained transformers: equality with the original, copied weights, and unsupported models."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tokenmix_core.modeling.pretrained import attention_options
from tokenmix_core.testing.closeness import relative_error
from tokenmix_lte.cli import main
from tokenmix_lte.conversion import convert

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MIXED = {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}
ORIGINALS = {
    "llama3": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32})
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=20)),
    "qwen2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **MIXED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}
SMALL = {"window": 16, "cap": 24, "sinks": 2}


@pytest.fixture(params=list(ORIGINALS))
def original(request):
    torch.manual_seed(0)
    model = ORIGINALS[request.param]().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # change biases and norms from 0 and 1, so that a missing one is noticed
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
    return model


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(1, 61, (2, tokens), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_converted_model_computes_the_same_before_training(original):
    full = [i for i, layer in enumerate(attention_options(original.config)) if layer["window"] is None]
    # layers with a window of 20 agree up to 20 tokens, because LTE sees further back
    x = ids(40 if full else 20)
    converted = convert(original, layers=full or None, **SMALL)
    wanted = original(x).logits
    for training in (True, False):
        assert relative_error(converted.train(training)(x, use_cache=False).logits, wanted) < 1e-5
    assert relative_error(converted.train()(x).logits, wanted) < 1e-5
    generated = converted.eval().generate(x[:, :10], max_new_tokens=8, do_sample=False)
    assert torch.equal(generated, original.generate(x[:, :10], max_new_tokens=8, do_sample=False))


def test_all_parameters_of_a_converted_model_get_gradients(original):
    converted = convert(original, **SMALL).train()
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        converted(ids(40), labels=ids(40)).loss.backward()
        optimizer.step()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in converted.parameters())
    assert all(mixer.sparsity.weight.eq(torch.tensor(1e-9)).all() for mixer in converted.model.mixers)


def test_weights_are_the_original_s_and_the_state_does_not_grow(original, tmp_path):
    converted = convert(original, layers=[0, 2], **SMALL)
    assert [converted.config.mixer_type(i) for i in range(3)] == ["lte", "attention", "lte"]
    mine, theirs = converted.model.layers[2], original.model.layers[2]
    assert torch.equal(mine.mixer.k_proj.weight, theirs.self_attn.k_proj.weight)
    assert torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    assert converted.model.layers[1].mixer.window == attention_options(original.config)[1]["window"]
    converted.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(ids(60)).logits, converted.eval()(ids(60)).logits)
    layer = convert(original, **SMALL).model.mixers[0]
    assert layer.state_bytes(64) == layer.state_bytes(10**6)


def test_the_command_converts_a_folder(tmp_path, capsys):
    torch.manual_seed(0)
    source, out = tmp_path / "llama", tmp_path / "lte"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{}")
    arguments = ["convert", str(source), "--window", "16", "--cap", "8", "--out"]
    assert main([*arguments, str(out), "--layers", "0,2"]) == 0
    assert "2 of 3 layers evict" in capsys.readouterr().out
    assert (out / "tokenizer_config.json").exists()
    for wrong, message in (
        ([*arguments, str(out)], "is not empty"),
        ([*arguments, str(tmp_path / "b"), "--layers", "3"], "layers must be some of 0 to 2, got 3"),
        ([*arguments, str(tmp_path / "b"), "--layers", "x"], "expected layers"),
        ([*arguments, str(tmp_path / "b"), "--dtype", "int8"], "--dtype must be"),
        ([*arguments, str(tmp_path / "b"), "--window", "8"], "window must be at least 13"),
        (["convert", str(out), "--out", str(tmp_path / "b")], "expected a model of type llama"),
        (["convert", str(tmp_path / "none"), "--out", str(tmp_path / "b")], "holds no model"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rms_norm_eps", "x", "no config that can be read"),
        ("rope_parameters", {"rope_type": "nonsense", "rope_theta": 1.0}, "cannot be loaded"),
    ],
)
def test_a_config_that_transformers_cannot_read_is_refused_in_a_sentence(field, value, message, tmp_path, capsys):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_unsupported_models_are_refused():
    for model, words in (
        (GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), "got 'gpt2'"),
        (LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)), "attention_bias"),
        (LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)), "attention_dropout"),
        (LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")), "MLP with silu"),
        (LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True)), "mlp_bias=True"),
        (LlamaForCausalLM(LlamaConfig(**SIZES)).model, "output layer"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(model)
    with pytest.raises(ValueError, match="got none"):
        convert(LlamaForCausalLM(LlamaConfig(**SIZES)), layers=[])
