"""Eviction without training: TOVA token by token, and whole models from the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.nn.attention import Attention
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.rotary import RotaryEmbedding, apply_rotary
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.mixers import MixerContract, run_in_parts, run_mixer
from tokenmix_core.testing.models import ModelContract
from tokenmix_lte.cli import main
from tokenmix_lte.model import LteConfig, LteForCausalLM, LteModel
from tokenmix_lte.tova import Tova
from tokenmix_lte.training_free import in_constant_memory

SMALL = partial(Tova, 32, num_heads=4, num_kv_heads=2, head_dim=8, held=7)


class TestTova(MixerContract):
    cases: ClassVar[dict[str, Callable[[], Mixer]]] = {
        "grouped": SMALL,
        "one": partial(SMALL, held=1),
        "normed": partial(SMALL, qk_norm=True, qkv_bias=True, rope=False),
    }


class TestModelWithTova(ModelContract):
    configs: ClassVar = {
        "hybrid": {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "mixers": ["gated_delta_net", "tova"],
            "mixer_options": {"tova": {"num_heads": 2, "held": 6}, "gated_delta_net": {"num_heads": 2, "head_dim": 8}},
        }
    }
    config_class = LteConfig
    model_class = LteModel
    causal_lm_class = LteForCausalLM


@torch.no_grad()
def test_the_token_with_the_least_attention_is_evicted():
    torch.manual_seed(0)
    layer = SMALL()
    for module in layer.modules():
        init_weights_(module, 0.3)
    layer = layer.double().eval()
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    rotary = RotaryEmbedding(8, {"rope_theta": 10_000.0})(torch.arange(40).unsqueeze(0))
    q, k, v = (f(x)[0].unflatten(-1, (-1, 8)) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = apply_rotary(q.unsqueeze(0), rotary)[0], apply_rotary(k.unsqueeze(0), rotary)[0]
    held, out = [], torch.zeros_like(q)
    for i in range(40):
        held.append(i)
        weights = torch.stack([(k[held, a // 2] @ q[i, a] * 8**-0.5).softmax(0) for a in range(4)])
        out[i] = torch.stack([weights[a] @ v[held, a // 2] for a in range(4)])
        if len(held) > 7:
            held.pop(int(weights.mean(0).argmin()))
    assert relative_error(run_mixer(layer, x)[0], layer.o_proj(out.flatten(1))) < 1e-11
    assert held != list(range(33, 40))


@pytest.mark.parametrize("held", [30, 64, 100, 150])
@torch.no_grad()
def test_evictions_do_not_depend_on_the_ends_of_calls_and_blocks(held):
    torch.manual_seed(0)
    layer = SMALL(held=held)
    for module in layer.modules():
        init_weights_(module, 0.3)
    layer = layer.double().eval()
    x = torch.randn(2, 170, 32, dtype=torch.float64)
    whole = run_mixer(layer, x)
    for lengths in ([170], [1] * 170, [63, 2, 64, 41], [held + 1, 169 - held]):
        assert relative_error(run_in_parts(layer, x, lengths)[0], whole) < 1e-11


@torch.no_grad()
def test_it_is_attention_in_training_and_if_all_tokens_are_held():
    torch.manual_seed(0)
    layer, attention = SMALL(), Attention(32, num_heads=4, num_kv_heads=2, head_dim=8)
    attention.load_state_dict(layer.state_dict())
    x = torch.randn(2, 20, 32)
    whole = run_mixer(attention, x)
    assert relative_error(run_mixer(layer.train(), x), whole) < 1e-6
    assert relative_error(run_mixer(layer.eval(), x), whole) > 1e-3
    layer.held = 20
    assert relative_error(run_mixer(layer, x), whole) < 1e-5
    assert relative_error(run_in_parts(layer, x, [9, 1, 10])[0], whole) < 1e-5


def trained(**attention) -> HybridForCausalLM:
    torch.manual_seed(0)
    options = {"gated_delta_net": {"num_heads": 2, "head_dim": 16}, "attention": {"num_heads": 4, **attention}}
    fields = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    config = HybridConfig(
        **fields, mixers=["gated_delta_net", "attention"], mixer_options=options, initializer_range=0.2
    )
    return HybridForCausalLM(config).eval()


@pytest.mark.parametrize("method", ["tova", "uniform"])
@torch.no_grad()
def test_a_model_that_holds_all_tokens_agrees_with_the_original(method):
    model, ids = trained(num_kv_heads=2), torch.randint(0, 264, (2, 40))
    logits = model(ids, use_cache=False).logits
    # if 64 tokens are held, the window alone has 48
    all_held, few = (in_constant_memory(model, method, held=held)(ids, use_cache=False).logits for held in (64, 12))
    assert relative_error(all_held, logits) < 1e-5
    assert relative_error(few[:, :9], logits[:, :9]) < 1e-5
    assert relative_error(few, logits) > 1e-3


def test_the_command_writes_a_model_that_loads_as_such(tmp_path, capsys):
    trained().bfloat16().save_pretrained(tmp_path / "trained")
    byte_tokenizer().save_pretrained(tmp_path / "trained")
    command = ["evict", str(tmp_path / "trained"), "--method", "tova", "--held", "8", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, LteForCausalLM)
    assert isinstance(model.model.mixers[1], Tova)
    assert model.model.mixers[1].held == 8
    assert model.dtype == torch.bfloat16, "as the checkpoint has it"
    assert main(command) != 0
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("attention", "method", "held", "words"),
    [
        ({}, "h2o", 64, "method must be one of"),
        ({}, "tova", 3, "held must be at least 4"),
        ({"window": 8}, "tova", 64, "no full attention layer"),
        ({"rope": False}, "uniform", 64, "rope=True"),
    ],
)
def test_unsupported_options_are_refused(attention, method, held, words):
    with pytest.raises(ValueError, match=words):
        in_constant_memory(trained(**attention), method, held=held)
    with pytest.raises(ValueError, match="held"):
        SMALL(held=0)
