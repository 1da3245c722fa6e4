"""LTE, NSA and TOVA layers work in one model with each other and with core's layers."""

from typing import ClassVar

from tokenmix_core.testing.interleaving import InterleavingContract
from tokenmix_lte.model import LteConfig, LteForCausalLM

MIXERS = {
    "lte": {"num_heads": 4, "num_kv_heads": 2, "window": 8, "cap": 5, "sinks": 2, "scorer": "mlp", "dropout": 0.0},
    "nsa": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block": 4, "blocks": 3, "window": 6},
    "tova": {"num_heads": 4, "num_kv_heads": 2, "held": 9},
}


class TestLte(InterleavingContract):
    mixers: ClassVar = MIXERS
    configs: ClassVar = {"all": (LteConfig, LteForCausalLM)}
