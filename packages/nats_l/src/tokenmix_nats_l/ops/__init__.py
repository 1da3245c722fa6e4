"""Operations of NAtS-L."""

# what explain knows
import tokenmix_nats_l.ops.registry  # noqa: F401
from tokenmix_nats_l.ops.merge.api import merge_operations
from tokenmix_nats_l.ops.merge.reference import merge_by_norms

__all__ = ["merge_by_norms", "merge_operations"]
