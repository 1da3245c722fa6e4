"""Operations of NAtS-L."""

# registers the operations for `explain`
import tokenmix_nats_l.ops.registry  # noqa: F401
from tokenmix_nats_l.ops.merge.api import merge_operations

__all__ = ["merge_operations"]
