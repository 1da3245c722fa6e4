"""Softmax attention with a choice of backends, which also return the log-sum-exp of the scores."""

from tokenmix_core.ops.softmax_attention.api import (
    attention,
    attention_decode,
    merge_attention,
    paged_attention_decode,
)
from tokenmix_core.ops.softmax_attention.backends import choose_impl
from tokenmix_core.ops.softmax_attention.reference import attention_reference

__all__ = [
    "attention",
    "attention_decode",
    "attention_reference",
    "choose_impl",
    "merge_attention",
    "paged_attention_decode",
]
