"""Valid values of an Oryx layer's options, and the defaults of each model family."""

from __future__ import annotations

from typing import Any, Literal

MAMBA2, GDN = "mamba2", "gated_delta_net"
LinearMixer = Literal["mamba2", "gated_delta_net"]
Activation = Literal["silu", "none"]
Rotated = Literal["both", "attention"]
Normalised = Literal["none", "key", "query_key"]

# the defaults of each family, from appendix C.2
FAMILIES: dict[str, dict[str, Any]] = {
    MAMBA2: {
        "grouped_norm": False,
        "rope": "both",
        "kv_activation": "none",
        "attention_query_activation": "none",
        "linear_query_activation": "none",
    },
    GDN: {
        "grouped_norm": True,
        "rope": "attention",
        "kv_activation": "silu",
        "attention_query_activation": "silu",
        "linear_query_activation": "silu",
    },
}
