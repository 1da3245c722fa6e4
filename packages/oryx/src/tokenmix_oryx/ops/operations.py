"""What core's `explain` knows of this package's operations."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmix_core.ops.attention.backends import Mask
from tokenmix_core.ops.attention.plan import GLUON, limit, plan
from tokenmix_core.ops.explain import WHOLE, Operation, Tensors, register_operation
from tokenmix_core.ops.operations import whole
from tokenmix_oryx.ops.mixing.api import mix
from tokenmix_oryx.ops.selected_attention.api import selected_attention


def _selected(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    found = whole("selected_attention", tensors, impl, GLUON)
    if found[WHOLE] == "reference":
        return found
    q, k, v = (tensors[name] for name in "qkv")
    steps = "outputs", "gradients of queries", "gradients of keys and values"
    chosen = plan(q, k, v, Mask(True, None, 0), False, impl, v)
    return {name: "gluon" if tile is None else "triton" for name, tile in zip(steps, chosen, strict=True)}


def _mixed(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    found = whole("mix", tensors, impl, GLUON)
    if found[WHOLE] == "reference":
        return found
    return {"what is around the mixers": "triton", "attention and the linear mixer": "as for each by itself"}


register_operation(
    Operation(
        selected_attention,
        {"q": "B T HQ K", "k": "B T H K", "v": "B T H V"},
        {"B": 8, "T": 4096, "HQ": 16, "H": 16, "K": 128, "V": 128},
        _selected,
        GLUON,
        lambda x: limit(x["q"], x["k"], x["v"]),
    )
)
register_operation(
    Operation(mix, {"rows": "N E", "shared": "B T C"}, {"B": 8, "T": 4096, "N": 32768, "E": 2048, "C": 6208}, _mixed)
)
