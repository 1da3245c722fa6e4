"""Native Hybrid Attention (Du et al.): memory slots and a sliding window under one softmax.

Importing this package is fast, uses no device, and works without Triton and without a GPU. The import announces to
transformers' auto classes the models of `tokenmix_nha.model`, and those of `tokenmix_nha.hybridized`, which are models
of transformers converted to this attention. It announces to core the mixers "nha", "gla" and "gated_slot_attention".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmix_core import announce, lazily

if TYPE_CHECKING:
    from tokenmix_nha.conversion import convert
    from tokenmix_nha.mixer import NhaMixer

    # importing the model's module registers the configuration and the model with transformers
    from tokenmix_nha.model import NhaConfig, NhaForCausalLM, NhaModel
    from tokenmix_nha.model_windows import set_windows, using_windows
    from tokenmix_nha.windows import nha_layers

__version__ = "0.1.0"
__all__ = [
    "NhaConfig",
    "NhaForCausalLM",
    "NhaMixer",
    "NhaModel",
    "convert",
    "nha_layers",
    "set_windows",
    "using_windows",
]

_CONVERTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
announce({f"tokenmix_nha_{kind}": "tokenmix_nha.hybridized" for kind in _CONVERTED})
announce(
    {"tokenmix_nha": "tokenmix_nha.model"},
    {
        "nha": "tokenmix_nha.mixer",
        "gla": "tokenmix_nha.gla",
        "gated_slot_attention": "tokenmix_nha.gsa",
    },
)

__getattr__ = lazily(__name__)
