"""The backbone and the causal language model with learned token eviction."""

from __future__ import annotations

from typing import ClassVar

from tokenmix_core.modeling import HybridForCausalLM, HybridModel, register_model
from tokenmix_lte.config import LteConfig as LteConfig


class LteModel(HybridModel):
    """The backbone whose layers have learned token eviction by default."""

    config: LteConfig
    config_class = LteConfig


class LteForCausalLM(HybridForCausalLM):
    """The causal language model whose layers have learned token eviction by default."""

    config: LteConfig
    config_class = LteConfig
    model_class: ClassVar[type[HybridModel]] = LteModel


register_model(LteConfig, LteModel, LteForCausalLM)
