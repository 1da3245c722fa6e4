"""Registration of this package's operations with core's `explain`."""

from __future__ import annotations

from tokenmix_core.ops import register_operation
from tokenmix_nats_l.ops.merge.api import merge_operations

register_operation(
    merge_operations, {"linear": "B T H V", "softmax": "B T H V", "gate": "B T E"},
    {"B": 8, "T": 4096, "H": 12, "V": 128, "E": 1536},
)  # fmt: skip
