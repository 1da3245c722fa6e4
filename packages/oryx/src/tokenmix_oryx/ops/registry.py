"""Registration of this package's operations with core's `explain`."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmix_core.ops import (
    GLUON,
    Tensors,
    attention_steps,
    delta_rule_steps,
    limit,
    register_operation,
    ssd_steps,
)
from tokenmix_oryx.ops.mixing.api import mix
from tokenmix_oryx.ops.selected_queries.api import selected_attention


def _mixed(tensors: Tensors, impl: str | None) -> Mapping[str, str]:
    rows, shared, rates = tensors.values()
    heads = rows[:1, :1].expand(*shared.shape[:2], len(rates), rows.shape[1] // len(rates))
    parts = {
        "attention": attention_steps(heads, heads, heads, impl),
        "with D, SSD": ssd_steps(heads, heads, impl),
        "without D, the delta rule": delta_rule_steps(heads, heads, impl),
    }
    named = {f"{part}: {step}": form for part, steps in parts.items() for step, form in steps.items()}
    return {"convolutions, rotation, rates, gate and norm": "triton", **named}


register_operation(
    selected_attention, {"q": "B T HQ K", "k": "B T H K", "v": "B T H V"},
    {"B": 8, "T": 4096, "HQ": 16, "H": 16, "K": 128, "V": 128},
    kernels=lambda x, impl: attention_steps(x["q"], x["k"], x["v"], impl), gluon=GLUON,
    limit=lambda x: limit(x["q"], x["k"], x["v"]),
)  # fmt: skip
register_operation(
    mix, {"rows": "N E", "shared": "B T C", "A_log": "H"},
    {"B": 8, "T": 4096, "N": 32768, "E": 2048, "C": 6208, "H": 16}, kernels=_mixed, gluon=GLUON,
)  # fmt: skip
