"""Test the baselines by the contract of models, in every interleaving of their mixers."""

from typing import ClassVar

from tokenmix_core.testing.models import ModelContract

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
OPTIONS = {
    "gated_delta_net": {"num_heads": 1, "head_dim": 16},
    "mamba2": {"head_dim": 16, "state_size": 16},
    "attention": {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "window": {"type": "attention", "num_heads": 2, "window": 5},
    "sinks": {"type": "attention", "num_heads": 2, "window": 4, "sinks": 2, "rope": False},
}


def fields(*mixers: str, **others) -> dict:
    return {**SIZES, "mixers": list(mixers), "mixer_options": {m: OPTIONS[m] for m in mixers}, **others}


class TestBaselines(ModelContract):
    configs: ClassVar = {
        "transformer": fields("attention", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        "all linear": fields("gated_delta_net", "mamba2", tie_word_embeddings=False),
        "mamba2 without mlp": fields("mamba2", intermediate_size=0),
        "window only": fields("window"),
        "window first": fields("window", "gated_delta_net", "attention", num_hidden_layers=3),
        "all kinds": fields("gated_delta_net", "sinks", "mamba2", "attention", "window", num_hidden_layers=5),
    }
    traced: ClassVar = {"all kinds": fields("gated_delta_net", "mamba2", "attention", num_hidden_layers=3)}
