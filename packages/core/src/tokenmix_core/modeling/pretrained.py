"""Conversion of pretrained Llama, Mistral, Qwen2 and Qwen3 models to the backbone of this package.

These models' blocks equal the backbone's blocks: RMS norms, softmax attention with rotary positions, SwiGLU. A
conversion therefore only makes a configuration and renames the weights; any layer's attention may then be replaced by
another mixer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tokenmix_core.modeling.config import HybridConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# the first component of a weight's name inside its layer: transformers' and ours
_NAMES = {
    "self_attn": "mixer",
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp": "mlp",
}
_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


def attention_options(config: Any) -> list[dict[str, Any]]:
    """Return, for each layer of a transformers configuration, the options of this package's attention.

    Raises:
        ValueError: an unsupported model type, or attention that this package does not have.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"expected a model of type {', '.join(FAMILIES)}, got {config.model_type!r}")
    if getattr(config, "attention_dropout", 0):
        raise ValueError(f"attention_dropout must be 0, got {config.attention_dropout!r}")
    # in Llama and Qwen3, attention_bias also means a bias of the output projection
    if getattr(config, "attention_bias", False):
        raise ValueError("attention_bias must be False: the output projection has no bias here")
    heads = config.num_attention_heads
    shared = {
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "qk_norm": config.model_type == "qwen3",
        "qkv_bias": config.model_type == "qwen2",
    }
    window = getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None)
        or ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    )
    return [shared | {"window": window if kind == "sliding_attention" else None} for kind in kinds]


def own_fields(config: Any) -> dict[str, Any]:
    """Return the `HybridConfig` fields, except the mixers, for a configuration of transformers or of this package.

    Raises:
        ValueError: an MLP that this package does not have.
    """
    if isinstance(config, HybridConfig):
        names = [field.name for field in dataclasses.fields(HybridConfig) if field.name in HybridConfig.__annotations__]
        return {name: getattr(config, name) for name in names if name not in ("mixers", "mixer_options")}
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
        raise ValueError(
            f"expected an MLP with silu and without biases, got {config.hidden_act!r} and "
            f"mlp_bias={getattr(config, 'mlp_bias', False)}"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "rope_parameters": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        **{name: getattr(config, name) for name in _IDS},
    }


def own_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a transformers language model's weights, not copied, under the names that this package uses.

    Raises:
        ValueError: a model without its output layer.
    """
    if not hasattr(model, "lm_head"):
        raise ValueError(f"expected a language model with its output layer, got {type(model).__name__}")
    state = {}
    for name, weight in model.state_dict().items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            parts[3] = _NAMES[parts[3]]
        state[".".join(parts)] = weight
    return state
