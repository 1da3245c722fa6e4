"""The model family: contracts of every family, and the paper's sizes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tokenmix_core.testing.models import ModelContract
from tokenmix_nats_l.config import NatsLConfig
from tokenmix_nats_l.model import NatsLForCausalLM, NatsLModel

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
OPTIONS = {"num_heads": 2, "head_dim": 8, "num_softmax_heads": 4}


class TestNatsLModel(ModelContract):
    configs: ClassVar[dict[str, dict[str, Any]]] = {
        "pure": {**SIZES, "mixer_options": {"nats_l": {**OPTIONS, "rope": True}}},
        "hybrid": {
            **SIZES,
            "mixers": ["gated_delta_net", "nats_l"],
            "mixer_options": {"nats_l": OPTIONS, "gated_delta_net": {"num_heads": 2, "head_dim": 8}},
        },
    }
    traced: ClassVar[dict[str, dict[str, Any]]] = {"pure": configs["pure"] | {"num_hidden_layers": 1}}
    config_class = NatsLConfig
    model_class = NatsLModel
    causal_lm_class = NatsLForCausalLM
    # a chunk and more, so that the first one's type shows
    tokens = 75


def test_the_share_of_softmax_chunks_is_among_the_outputs():
    model = NatsLForCausalLM(NatsLConfig(**TestNatsLModel.configs["pure"]))
    out = model(torch.randint(0, 61, (2, 140)), use_cache=False)
    assert out.auxiliary["softmax_share"].shape == (2, 2)
