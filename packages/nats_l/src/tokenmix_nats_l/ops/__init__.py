"""The operations of NAtS-L layers."""

# this import registers the operations with `explain`
import tokenmix_nats_l.ops.registry  # noqa: F401
from tokenmix_nats_l.ops.merge.api import merge_operations

__all__ = ["merge_operations"]
