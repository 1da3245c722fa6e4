"""Operations of this package: attention for chosen queries."""

from tokenmix_oryx.ops.selected_attention.api import selected_attention

__all__ = ["selected_attention"]
