"""Windows as options of layers: checks, patterns with full-attention layers, and the fields of a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FULL = "full"
# default window of a layer, in tokens
WINDOW = 32
# a number of tokens (with 0, queries see only slots), or "full"
Window = int | str


def check_window(window: Any, slots: int = 1) -> Window:
    """Return the window unchanged, if it is valid.

    Raises:
        ValueError: `window` is neither an integer ≥ 0 nor "full", or it is 0 without slots: queries would see no key.
    """
    if window == FULL:
        return window
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ValueError(f"a window must be an integer of at least 0 or {FULL!r}, got {window!r}")
    if window == 0 and slots == 0:
        raise ValueError("a window of 0 needs slots: with slots=0 a token would see nothing")
    return window


def check_windows(windows: Window | Sequence[Window], layers: int, slots: int = 1) -> list[Window]:
    """Return one window per layer, from a single window or from a pattern whose length divides the number of layers.

    Raises:
        ValueError: a window is invalid, or the pattern's length does not divide `layers`.
    """
    pattern = list(windows) if isinstance(windows, list | tuple) else [windows]
    if not pattern or layers % len(pattern):
        raise ValueError(
            f"window: expected one for each of the {layers} layers, or a pattern whose length divides them, "
            f"got {len(pattern)}"
        )
    return [check_window(window, slots) for window in pattern] * (layers // len(pattern))


def hybrid_windows(layers: int, window: Window, full_layers: Sequence[int]) -> list[Window]:
    """Return one window per layer: "full" for the indices `full_layers`, `window` for all other layers.

    Raises:
        ValueError: `full_layers` contains an index that no layer has.
    """
    for i in full_layers:
        if not 0 <= i < layers:
            raise ValueError(f"full layers must lie from 0 to {layers - 1}, got {i}")
    return [FULL if i in full_layers else window for i in range(layers)]


def nha_layers(windows: Window | Sequence[Window], **options: Any) -> dict[str, Any]:
    """Return the fields `mixers` and `mixer_options` of a configuration whose layers are NHA with the given windows.

    Args:
        windows: one window for all layers, or a pattern that is repeated.
        options: options of every layer, which `NhaMixer` documents.

    Raises:
        ValueError: a window is invalid.
    """
    pattern: list[Any] = list(windows) if isinstance(windows, list | tuple) else [windows]
    check_windows(pattern, len(pattern), options.get("slots", 1))
    if len(set(pattern)) == 1:
        return {"mixers": ["nha"], "mixer_options": {"nha": {**options, "window": pattern[0]}}}
    labels = [f"nha-{window}" for window in pattern]
    made = {label: {"type": "nha", **options, "window": w} for label, w in zip(labels, pattern, strict=True)}
    return {"mixers": labels, "mixer_options": made}


def layers_with_windows(config: Any, windows: Sequence[Window]) -> dict[str, Any]:
    """Return the configuration fields that give each NHA layer its window and change nothing else."""
    if hasattr(config, "window"):
        # a converted model has only NHA layers, and stores their windows in one field
        return {"window": list(windows)}
    labels, made, rest = [], dict(config.mixer_options), iter(windows)
    for i, label in enumerate(config.labels):
        if config.mixer_type(i) == "nha":
            options = made.get(label, {})
            before, window = options.get("window", WINDOW), next(rest)
            if window != before:
                options = {**options, "type": "nha", "window": window}
                label = f"{label.removesuffix(f'-{before}')}-{window}"
                # another label may already belong to layers with other options: find a label that is free or has equal
                # options
                while made.setdefault(label, options) != options:
                    label += "'"
        labels.append(label)
    return {"mixers": labels, "mixer_options": {label: made[label] for label in dict.fromkeys(labels) if label in made}}
