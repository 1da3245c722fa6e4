"""Softmax attention over local keys (a window or the query's chunk) and the retained ones among all earlier keys."""

from tokenmix_core.ops.sparse_attention.api import kept_attention
from tokenmix_core.ops.sparse_attention.reference import kept_attention_reference

__all__ = ["kept_attention", "kept_attention_reference"]
