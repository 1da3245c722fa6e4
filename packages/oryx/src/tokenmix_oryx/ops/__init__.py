"""Operations of this package: attention for selected queries, and a fused layer for tokens in both modes."""

# this import registers the operations with `explain`
import tokenmix_oryx.ops.registry  # noqa: F401
from tokenmix_oryx.ops.mixing.api import MixOptions, mix
from tokenmix_oryx.ops.selected_queries.api import selected_attention

__all__ = ["MixOptions", "mix", "selected_attention"]
