"""A small model with one layer of each kind of state."""

import pytest
import torch

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=53,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        mixers=["gated_delta_net", "window", "mamba2", "attention"],
        mixer_options={
            "gated_delta_net": {"num_heads": 1, "head_dim": 16},
            "window": {"type": "attention", "num_heads": 2, "window": 4},
            "mamba2": {"head_dim": 16, "state_size": 16},
            "attention": {"num_heads": 2},
        },
        initializer_range=0.2,
        pad_token_id=0,
    )
    return HybridForCausalLM(config).eval()
