"""The transformers-compatible shell around token mixers: configuration, cache, backbone and causal language model."""

from tokenmix_core.modeling.backbone import HybridModel, HybridOutput
from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.causal_lm import HybridCausalLMOutput, HybridForCausalLM
from tokenmix_core.modeling.config import HybridConfig
from tokenmix_core.modeling.register import register_model
from tokenmix_core.nn.mixer import Mixer, MixerOutput
from tokenmix_core.nn.registry import find_mixer, known_mixers, register_mixer
from tokenmix_core.nn.state import KVState, LayerState, Span, TensorState

__all__ = [
    "HybridCache",
    "HybridCausalLMOutput",
    "HybridConfig",
    "HybridForCausalLM",
    "HybridModel",
    "HybridOutput",
    "KVState",
    "LayerState",
    "Mixer",
    "MixerOutput",
    "Span",
    "TensorState",
    "find_mixer",
    "known_mixers",
    "register_mixer",
    "register_model",
]
