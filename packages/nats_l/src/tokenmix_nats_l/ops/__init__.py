"""Operations of NAtS-L."""

# what explain knows
import tokenmix_nats_l.ops.registry  # noqa: F401
from tokenmix_nats_l.ops.merge.api import merge_operations

__all__ = ["merge_operations"]
