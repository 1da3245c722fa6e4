"""Registration of this package's operations with core's `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmix_core.ops import Tensors, register_operation
from tokenmix_nha.ops.slot_window.api import slot_window_attention, slot_window_attention_step
from tokenmix_nha.ops.slot_window.plan import GLUON, limit, plan
from tokenmix_nha.ops.slot_window.tuning import slot_tile

# window of the example call, in tokens
_WINDOW = 32


def _tile(tensors: Tensors) -> int:
    q, f = tensors["q"], tensors["f"]
    return slot_tile(f.shape[3], q.dtype, False, q.shape[2] // f.shape[2])


def _kernels(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    chosen = plan(_tile(tensors), _WINDOW, impl, *tensors.values())
    return {f"outputs with a window of {_WINDOW}": chosen.forward, "gradients": chosen.backward}


register_operation(
    slot_window_attention, {"q": "B T HQ K", "k": "B T H K", "v": "B T H V", "f": "B T H M"},
    {"B": 8, "T": 4096, "HQ": 16, "H": 16, "K": 128, "V": 128, "M": 32}, kernels=_kernels, gluon=GLUON,
    limit=lambda x: limit(_tile(x), x["k"].shape[3], x["v"].shape[3]),
)  # fmt: skip
register_operation(
    slot_window_attention_step, {"q": "B HQ K", "k": "B H K", "v": "B H V", "f": "B H M"},
    {"B": 8, "HQ": 16, "H": 16, "K": 128, "V": 128, "M": 32},
)  # fmt: skip
