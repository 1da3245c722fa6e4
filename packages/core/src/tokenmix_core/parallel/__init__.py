"""Training and scoring of sequences too long for one GPU, split over the ranks of a process group."""

from __future__ import annotations

from tokenmix_core.parallel.exchange import combined, gather_rows, receive, total
from tokenmix_core.parallel.heads import HeadExchange
from tokenmix_core.parallel.operations import (
    attention,
    chunk_gated_delta_rule,
    chunk_ssd,
    shift_tokens,
    short_conv,
    short_convs,
    tail_of,
)
from tokenmix_core.parallel.recurrence import compose_decays
from tokenmix_core.parallel.shard import (
    SequenceShard,
    Span,
    balanced_layout,
    current_shard,
    require_shard,
    sequence_shard,
)

__all__ = [
    "HeadExchange",
    "SequenceShard",
    "Span",
    "attention",
    "balanced_layout",
    "chunk_gated_delta_rule",
    "chunk_ssd",
    "combined",
    "compose_decays",
    "current_shard",
    "gather_rows",
    "receive",
    "require_shard",
    "sequence_shard",
    "shift_tokens",
    "short_conv",
    "short_convs",
    "tail_of",
    "total",
]
