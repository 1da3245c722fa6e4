"""Checks of the options of an NHA layer."""

from __future__ import annotations

from typing import Any, Literal

from tokenmix_core import check_value
from tokenmix_nha.windows import check_window

Positions = Literal["window", "both", "none", "learned"]
Fusion = Literal["softmax", "fixed", "learned"]


def check_choices(
    *, slots: Any, window: Any, positions: Any, fusion: Any, token_shift: Any, long_weight: Any, gate_normalizer: Any
) -> None:
    """Raise a ValueError if an option has an invalid value, or if two options contradict each other."""
    check_value("slots", slots, int)
    check_value("positions", positions, Positions)
    check_value("fusion", fusion, Fusion)
    check_value("token_shift", token_shift, bool)
    if slots < 0:
        raise ValueError(f"slots must be at least 0, got {slots!r}")
    check_window(window, slots)
    if not 0 <= long_weight <= 1:
        raise ValueError(f"long_weight must be from 0 to 1, got {long_weight!r}")
    if not gate_normalizer > 0:
        raise ValueError(f"gate_normalizer must be positive, got {gate_normalizer!r}")
