"""Test that Oryx layers combine with their baseline attention and core's mixers in one model."""

from typing import ClassVar

# this import registers `normed_attention`, the attention of Table 5
import tokenmix_oryx.attention  # noqa: F401
from tokenmix_core.testing.interleaving import InterleavingContract
from tokenmix_oryx.model import OryxConfig, OryxForCausalLM

MIXERS = {"oryx": {"head_dim": 16}, "normed_attention": {"num_heads": 2, "conv_size": 4, "output_gate": True}}


class TestOryx(InterleavingContract):
    mixers: ClassVar = MIXERS
    configs: ClassVar = {"all": (OryxConfig, OryxForCausalLM)}
