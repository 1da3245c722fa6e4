"""Fixtures: small models of two kinds."""

import pytest
import torch

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=1024))


def _hybrid():
    from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

    options = {"gated_delta_net": {"num_heads": 1, "head_dim": 64, "expand_v": 1.0}, "attention": {"num_heads": 2}}
    return HybridForCausalLM(HybridConfig(**SIZES, mixers=["gated_delta_net", "attention"], mixer_options=options))


@pytest.fixture(scope="session", params=[_llama, _hybrid], ids=["llama", "hybrid"])
def model(request):
    """Return a model of transformers and one of ours, with random weights, and so wide that logits differ."""
    torch.manual_seed(0)
    model = request.param().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    return model


@pytest.fixture(scope="session")
def llama():
    torch.manual_seed(0)
    return _llama().eval()
