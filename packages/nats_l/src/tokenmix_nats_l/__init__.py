"""Neural Attention Search Linear: softmax attention or the gated delta rule, chosen for every chunk of tokens.

Importing this package is quick, touches no device and needs neither Triton nor a GPU. The import registers the model
family with transformers' auto classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmix_core import announce, lazily

if TYPE_CHECKING:
    from tokenmix_nats_l.mixer import NatsL

    # with its model, which registers both
    from tokenmix_nats_l.model import NatsLConfig, NatsLForCausalLM, NatsLModel

__version__ = "0.1.0"
__all__ = ["NatsL", "NatsLConfig", "NatsLForCausalLM", "NatsLModel"]

announce({"tokenmix_nats_l": "tokenmix_nats_l.model"}, {"nats_l": "tokenmix_nats_l.config"})

__getattr__ = lazily(__name__)
