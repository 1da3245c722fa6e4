"""NAtS-L layers combine with core's in one model."""

from typing import ClassVar

from tokenmix_core.testing.interleaving import InterleavingContract
from tokenmix_nats_l.model import NatsLConfig, NatsLForCausalLM

MIXERS = {"nats_l": {"num_heads": 2, "head_dim": 16, "num_softmax_heads": 2, "expand_v": 1.0}}


class TestNatsL(InterleavingContract):
    mixers: ClassVar = MIXERS
    configs: ClassVar = {"all": (NatsLConfig, NatsLForCausalLM)}
    # a chunk and the beginning of the next
    tokens: ClassVar = 70
