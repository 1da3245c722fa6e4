"""Our kernels in vLLM's own models: tokens equal those of transformers. `nox -s vllm` runs these tests."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: nox -s vllm")

from transformers import AutoConfig, AutoModelForCausalLM

from served_by_vllm import check_served
from tokenmix_core.integrations.vllm import third_party

SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
MODELS = {
    "qwen3_next": {"head_dim": 64, **EXPERTS},
    "qwen3_5_text": {"head_dim": 64},
}


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_equal_those_of_transformers(kind, tmp_path, monkeypatch):
    calls = dict.fromkeys(("gated_delta_rule_prefill", "gated_delta_rule_step"), 0)

    def counted(name):
        run = getattr(third_party, name)

        def call(*args, **options):
            calls[name] += 1
            return run(*args, **options)

        return call

    for name in calls:
        monkeypatch.setattr(third_party, name, counted(name))
    third_party.register_layers()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **MODELS[kind]))
    check_served(model, tmp_path)
    assert all(calls.values()), calls
