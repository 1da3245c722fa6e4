"""Softmax attention over a local part and retained keys."""

from tokenmix_core.ops.sparse_attention.api import kept_attention
from tokenmix_core.ops.sparse_attention.reference import kept_attention_reference

__all__ = ["kept_attention", "kept_attention_reference"]
