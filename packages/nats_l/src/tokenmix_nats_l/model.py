"""The backbone and the causal language model with NAtS-L layers."""

from __future__ import annotations

from typing import ClassVar

from tokenmix_core.modeling import HybridForCausalLM, HybridModel, register_model
from tokenmix_nats_l.config import NatsLConfig as NatsLConfig


class NatsLModel(HybridModel):
    """The backbone whose layers are NAtS-L by default."""

    config: NatsLConfig
    config_class = NatsLConfig


class NatsLForCausalLM(HybridForCausalLM):
    """The causal language model whose layers are NAtS-L by default."""

    config: NatsLConfig
    config_class = NatsLConfig
    model_class: ClassVar[type[HybridModel]] = NatsLModel


register_model(NatsLConfig, NatsLModel, NatsLForCausalLM)
