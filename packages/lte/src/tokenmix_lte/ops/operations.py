"""This package's operations as core's `explain` knows them."""

from __future__ import annotations

from tokenmix_core.ops.explain import Operation, register_operation
from tokenmix_core.ops.operations import whole
from tokenmix_lte.ops.eviction.api import evict_step
from tokenmix_lte.ops.scorer.api import retention_logits

register_operation(
    Operation(
        retention_logits,
        {"k": "B T H K", "v": "B T H K"},
        {"B": 8, "T": 4096, "H": 8, "K": 64},
        lambda x, impl: whole("retention_logits", x, impl),
    )
)
register_operation(
    Operation(
        evict_step,
        {"k": "N H K"},
        {"N": 32, "H": 8, "K": 64},
        lambda x, impl: whole("evict_step", x, impl),
    )
)
