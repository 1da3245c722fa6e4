"""Learned token eviction: softmax attention to a window and to far keys that each head learns to keep.

Importing this package is quick, touches no device and needs neither Triton nor a GPU; transformers' auto classes then
know its family.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenmix_core.families import announce

if TYPE_CHECKING:
    from tokenmix_lte.config import LteConfig
    from tokenmix_lte.mixer import Lte
    from tokenmix_lte.model import LteForCausalLM, LteModel

__version__ = "0.1.0"
__all__ = ["Lte", "LteConfig", "LteForCausalLM", "LteModel"]

_HOMES = {"Lte": "mixer", "LteConfig": "config", "LteForCausalLM": "model", "LteModel": "model"}

announce({"tokenmix_lte": "tokenmix_lte.model"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
