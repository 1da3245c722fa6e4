"""Operations of learned token eviction."""

from tokenmix_lte.ops.scorer.api import retention_logits

__all__ = ["retention_logits"]
