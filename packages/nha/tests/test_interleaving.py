"""NHA, GLA and GSA layers work in one model with each other and with core's."""

from typing import ClassVar

# this import registers the baselines
import tokenmix_nha.gla
import tokenmix_nha.gsa  # noqa: F401
from tokenmix_core.testing.interleaving import InterleavingContract
from tokenmix_nha.model import NhaConfig, NhaForCausalLM

MIXERS = {
    "nha": {"num_heads": 4, "num_kv_heads": 2, "slots": 5, "window": 6},
    "gla": {"num_heads": 2},
    "gated_slot_attention": {"num_heads": 2, "slots": 5},
}


class TestNha(InterleavingContract):
    mixers: ClassVar = MIXERS
    configs: ClassVar = {"all": (NhaConfig, NhaForCausalLM)}
