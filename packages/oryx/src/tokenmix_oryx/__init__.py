"""Oryx: one set of weights for softmax attention and for a linear recurrence; each token uses one of the two.

Importing this package is fast, works without Triton and without a GPU, and announces the models to transformers' auto
classes, and the mixers "oryx" and "normed_attention" to core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmix_core import announce, lazily

if TYPE_CHECKING:
    from tokenmix_oryx.mixer import OryxMixer

    # importing the model's module registers the configuration and the model with transformers
    from tokenmix_oryx.model import OryxConfig, OryxForCausalLM, OryxModel
    from tokenmix_oryx.modes import draw_modes

__version__ = "0.1.0"
__all__ = ["OryxConfig", "OryxForCausalLM", "OryxMixer", "OryxModel", "draw_modes"]

announce(
    {"tokenmix_oryx": "tokenmix_oryx.model"},
    {"oryx": "tokenmix_oryx.mixer", "normed_attention": "tokenmix_oryx.attention"},
)

__getattr__ = lazily(__name__)
