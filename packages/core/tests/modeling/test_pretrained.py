"""Test that the backbone's Transformer is that of Llama, Qwen2 and Qwen3: with their weights it has their logits."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.models import left_padded

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}, {"qkv_bias": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}, {"qk_norm": True, "head_dim": 12}),
}


def renamed(name: str) -> str:
    for old, new in (
        ("input_layernorm", "mixer_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn", "mixer"),
    ):
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_weights_of_transformers_give_the_same_logits(family):
    config_class, model_class, fields, options = FAMILIES[family]
    torch.manual_seed(0)
    theirs = model_class(
        config_class(
            vocab_size=71,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            **fields,
        )
    ).eval()
    for name, p in theirs.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.uniform_(p, 0.5, 1.5)
    ours = HybridForCausalLM(
        HybridConfig(
            vocab_size=71,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            mixer_options={"attention": {"num_heads": 4, "num_kv_heads": 2, **options}},
            norm_eps=theirs.config.rms_norm_eps,
            rope_parameters=theirs.config.rope_parameters,
            max_position_embeddings=64,
            tie_word_embeddings=theirs.config.tie_word_embeddings,
        )
    ).eval()
    ours.load_state_dict({renamed(name): x for name, x in theirs.state_dict().items()})
    ids, mask = torch.randint(0, 71, (2, 13)), left_padded([13, 8], 13)
    assert relative_error(ours(ids).logits, theirs(ids).logits) < 2e-6
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = theirs(ids, attention_mask=mask, position_ids=positions).logits
    for given in (None, positions):
        assert relative_error(ours(ids, attention_mask=mask, position_ids=given).logits[1, 5:], padded[1, 5:]) < 2e-6
