"""Oryx: one set of weights for softmax attention and a linear recurrence, selected per token.

Importing this package registers it with transformers' auto classes, is fast, and needs neither Triton nor a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmix_core import announce, lazily

if TYPE_CHECKING:
    from tokenmix_oryx.mixer import OryxMixer

    # with its model, which registers both
    from tokenmix_oryx.model import OryxConfig, OryxForCausalLM, OryxModel
    from tokenmix_oryx.modes import draw_modes

__version__ = "0.1.0"
__all__ = ["OryxConfig", "OryxForCausalLM", "OryxMixer", "OryxModel", "draw_modes"]

announce(
    {"tokenmix_oryx": "tokenmix_oryx.model"},
    {"oryx": "tokenmix_oryx.mixer", "normed_attention": "tokenmix_oryx.attention"},
)

__getattr__ = lazily(__name__)
