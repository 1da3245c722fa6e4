"""Operations of this package: attention for chosen queries, and a mixed call of the layer as a whole."""

# what explain knows
import tokenmix_oryx.ops.registry  # noqa: F401
from tokenmix_oryx.ops.mixing.api import MixOptions, mix
from tokenmix_oryx.ops.selected_queries.api import selected_attention

__all__ = ["MixOptions", "mix", "selected_attention"]
