"""Registration of our models with transformers' auto classes."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from tokenmix_core.modeling.backbone import HybridModel
from tokenmix_core.modeling.causal_lm import HybridForCausalLM
from tokenmix_core.modeling.config import HybridConfig
from tokenmix_core.modeling.heads import register_heads


def register_model(config: type[HybridConfig], model: type[HybridModel], causal_lm: type[HybridForCausalLM]) -> None:
    """Register a family with transformers' auto classes, those of classification included, by its `model_type`.

    Raises:
        ValueError: another family has this model type.
    """
    kind = config.model_type
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] is not config:
        raise ValueError(f"register_model: {kind!r} is already {CONFIG_MAPPING[kind].__qualname__}")
    AutoConfig.register(kind, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    register_heads(config, model)


register_model(HybridConfig, HybridModel, HybridForCausalLM)
