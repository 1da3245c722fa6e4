"""Core's mixers stand in one model with each other."""

from typing import ClassVar

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.interleaving import CORE, InterleavingContract


class TestCore(InterleavingContract):
    mixers: ClassVar = CORE
    configs: ClassVar = {"all": (HybridConfig, HybridForCausalLM)}
