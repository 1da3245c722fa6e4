"""Registration of this package's operations with core's `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmix_core.ops import WHOLE, Operation, Tensors, register_operation, whole
from tokenmix_lte.ops.branches.api import gated_sum
from tokenmix_lte.ops.eviction.api import evict_step
from tokenmix_lte.ops.scorer.api import retention_logits
from tokenmix_lte.ops.scorer.plan import GLUON, hopper_limit, takes_gluon
from tokenmix_lte.ops.scorer.sizes import channels_of_layers
from tokenmix_lte.ops.selected_blocks.api import block_attention, select_blocks


def _channels(tensors: Tensors) -> tuple[int, list[int]]:
    """Return the number of key channels, and the number of output channels of each layer of the default scorer."""
    K = tensors["k"].shape[3]
    return K, channels_of_layers(2 * K)[1:]


def _scorer_impl(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    found, k = whole("retention_logits", tensors, impl, GLUON), tensors["k"]
    if found[WHOLE] == "reference":
        return found
    return {WHOLE: "gluon" if takes_gluon(impl, k.device, k.dtype, *_channels(tensors)) else "triton"}


register_operation(
    Operation(
        retention_logits,
        {"k": "B T H K", "v": "B T H K"},
        {"B": 8, "T": 4096, "H": 8, "K": 64},
        _scorer_impl,
        GLUON,
        lambda x: hopper_limit(*_channels(x)),
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
register_operation(
    Operation(
        select_blocks,
        {"q": "B T HQ K", "pooled": "B U H K"},
        {"B": 8, "T": 4096, "U": 64, "HQ": 32, "H": 2, "K": 64},
        lambda x, impl: whole("select_blocks", x, impl),
    )
)
register_operation(
    Operation(
        block_attention,
        {"q": "B T HQ K", "k": "B T H K", "v": "B T H K"},
        {"B": 8, "T": 4096, "HQ": 32, "H": 2, "K": 64},
        lambda x, impl: whole("block_attention", x, impl),
    )
)
register_operation(
    Operation(
        gated_sum,
        {"compressed": "B T HQ V", "selected": "B T HQ V", "window": "B T HQ V"},
        {"B": 8, "T": 4096, "HQ": 32, "V": 64},
        lambda x, impl: whole("gated_sum", x, impl),
    )
)
