"""Neural Attention Search Linear: softmax attention or the gated delta rule, chosen for every chunk of tokens.

Importing this package is quick, touches no device and needs neither Triton nor a GPU. Importing `tokenmix_nats_l.model`
registers the family with transformers' auto classes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmix_nats_l.config import NatsLConfig
    from tokenmix_nats_l.mixer import NatsL
    from tokenmix_nats_l.model import NatsLForCausalLM, NatsLModel

__version__ = "0.1.0"
__all__ = ["NatsL", "NatsLConfig", "NatsLForCausalLM", "NatsLModel"]

_HOMES = {"NatsL": "mixer", "NatsLConfig": "config", "NatsLForCausalLM": "model", "NatsLModel": "model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
