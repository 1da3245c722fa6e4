"""Learned token eviction (softmax attention to a window and to retained keys) and native sparse attention.

Importing this package is fast, uses no device, and works without Triton and without a GPU. The import announces the
model family to transformers' auto classes, and the mixers "lte", "nsa" and "tova" to core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmix_core import announce, lazily

if TYPE_CHECKING:
    from tokenmix_lte.mixer import Lte

    # importing the model's module registers the configuration and the model with transformers
    from tokenmix_lte.model import LteConfig, LteForCausalLM, LteModel
    from tokenmix_lte.nsa import Nsa

__version__ = "0.1.0"
__all__ = ["Lte", "LteConfig", "LteForCausalLM", "LteModel", "Nsa"]

announce({"tokenmix_lte": "tokenmix_lte.model"}, dict.fromkeys(("lte", "nsa", "tova"), "tokenmix_lte.config"))

__getattr__ = lazily(__name__)
