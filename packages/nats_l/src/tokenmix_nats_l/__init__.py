"""Neural Attention Search Linear: for each chunk of tokens, either softmax attention or the gated delta rule.

Importing this package is fast, uses no device, and works without Triton and without a GPU. The import announces the
model family to transformers' auto classes, and the mixer "nats_l" to core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmix_core import announce, lazily

if TYPE_CHECKING:
    from tokenmix_nats_l.mixer import NatsL

    # importing the model's module registers the configuration and the model with transformers
    from tokenmix_nats_l.model import NatsLConfig, NatsLForCausalLM, NatsLModel

__version__ = "0.1.0"
__all__ = ["NatsL", "NatsLConfig", "NatsLForCausalLM", "NatsLModel"]

announce({"tokenmix_nats_l": "tokenmix_nats_l.model"}, {"nats_l": "tokenmix_nats_l.config"})

__getattr__ = lazily(__name__)
