"""Registration of this package's operations with core's `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmix_core.ops import WHOLE, Tensors, register_operation
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
    k = tensors["k"]
    return {WHOLE: "gluon" if takes_gluon(impl, k.device, k.dtype, *_channels(tensors)) else "triton"}


register_operation(
    retention_logits, {"k": "B T H K", "v": "B T H K"}, {"B": 8, "T": 4096, "H": 8, "K": 64}, kernels=_scorer_impl,
    gluon=GLUON, limit=lambda x: hopper_limit(*_channels(x)),
)  # fmt: skip
register_operation(evict_step, {"k": "N H K"}, {"N": 32, "H": 8, "K": 64})
register_operation(
    select_blocks, {"q": "B T HQ K", "pooled": "B U H K"}, {"B": 8, "T": 4096, "U": 64, "HQ": 32, "H": 2, "K": 64}
)
register_operation(
    block_attention, {"q": "B T HQ K", "k": "B T H K", "v": "B T H K"}, {"B": 8, "T": 4096, "HQ": 32, "H": 2, "K": 64}
)
register_operation(
    gated_sum, dict.fromkeys(("compressed", "selected", "window"), "B T HQ V"), {"B": 8, "T": 4096, "HQ": 32, "V": 64}
)
