"""Models around token mixers, compatible with transformers: configuration, cache, backbone, causal language model."""

from typing import TYPE_CHECKING

from tokenmix_core._utils.lazy_imports import lazily
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

if TYPE_CHECKING:
    from tokenmix_core.modeling.attn_implementation import ChoosesAttention as ChoosesAttention
    from tokenmix_core.modeling.attn_implementation import choose_attention as choose_attention
    from tokenmix_core.modeling.auxiliary import collected_losses as collected_losses
    from tokenmix_core.modeling.cache_name import CACHE as CACHE
    from tokenmix_core.modeling.cache_name import take_cache as take_cache
    from tokenmix_core.modeling.cache_name import takes_either_name as takes_either_name
    from tokenmix_core.modeling.checkpoint import CheckedLoading as CheckedLoading
    from tokenmix_core.modeling.checkpoint import copy_companions as copy_companions
    from tokenmix_core.modeling.config import check_depth as check_depth
    from tokenmix_core.modeling.generation import GeneratesInSteps as GeneratesInSteps
    from tokenmix_core.modeling.generation import stepping_forward as stepping_forward
    from tokenmix_core.modeling.packing import begin_call as begin_call
    from tokenmix_core.modeling.packing import read_padding_flag as read_padding_flag
    from tokenmix_core.modeling.packing import rolls_back as rolls_back
    from tokenmix_core.modeling.pretrained import FAMILIES as FAMILIES
    from tokenmix_core.modeling.pretrained import attention_options as attention_options
    from tokenmix_core.modeling.pretrained import own_fields as own_fields
    from tokenmix_core.modeling.pretrained import own_state as own_state
    from tokenmix_core.modeling.rows import PacksRows as PacksRows
    from tokenmix_core.modeling.rows import keeps_rows as keeps_rows
    from tokenmix_core.modeling.split_rows import split_prefill as split_prefill

__getattr__ = lazily(__name__)
