"""Operations of learned token eviction and native sparse attention."""

# this import registers the operations with `explain`
import tokenmix_lte.ops.registry  # noqa: F401
from tokenmix_lte.ops.branches.api import gated_sum
from tokenmix_lte.ops.eviction.api import evict_step
from tokenmix_lte.ops.scorer.api import retention_logits
from tokenmix_lte.ops.selected_blocks.api import block_attention, select_blocks

__all__ = ["block_attention", "evict_step", "gated_sum", "retention_logits", "select_blocks"]
