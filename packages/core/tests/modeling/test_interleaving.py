"""Test that core's mixers combine in one model."""

from typing import ClassVar

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.interleaving import CORE, InterleavingContract


class TestCore(InterleavingContract):
    mixers: ClassVar = CORE
    configs: ClassVar = {"all": (HybridConfig, HybridForCausalLM)}
