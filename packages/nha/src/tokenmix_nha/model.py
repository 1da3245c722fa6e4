"""The backbone and the causal language model with Native Hybrid Attention."""

from __future__ import annotations

from typing import ClassVar

from tokenmix_core.modeling import HybridForCausalLM, HybridModel, register_model
from tokenmix_nha.config import NhaConfig as NhaConfig


class NhaModel(HybridModel):
    """The backbone; functions of `tokenmix_nha.model_windows` can change the windows that its configuration sets."""

    config: NhaConfig
    config_class = NhaConfig


class NhaForCausalLM(HybridForCausalLM):
    """The causal language model; the functions `tokenmix_nha.set_windows` and `using_windows` change its windows."""

    config: NhaConfig
    config_class = NhaConfig
    model_class: ClassVar[type[HybridModel]] = NhaModel


register_model(NhaConfig, NhaModel, NhaForCausalLM)
