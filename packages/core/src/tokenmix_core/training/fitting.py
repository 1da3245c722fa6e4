"""Adapt a recipe's mixers to a depth or width that a flag sets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from tokenmix_core.nn.registry import find_mixer


def fitted(model: Mapping[str, Any], given: Mapping[str, Sequence[Sequence[str]]]) -> tuple[dict[str, Any], list[str]]:
    """Return the model's fields with mixers adapted to the depth and heads to the width, and a line of text per change.

    Changes only fields that no flag sets, and only if they do not fit a `num_hidden_layers` or `hidden_size` that a
    flag sets. Options of mixers that the new depth leaves out are removed.

    Args:
        model: the fields after all flags were applied.
        given: for each field that flags set, the paths of the entries that were set inside it, such as
            `["gated_delta_net", "num_heads"]`; an empty path stands for the whole field.
    """
    model, lines = dict(model), []
    labels, options = model.get("mixers"), model.get("mixer_options") or {}
    layers, width = model.get("num_hidden_layers"), model.get("hidden_size")
    depth = layers if "num_hidden_layers" in given and "mixers" not in given and isinstance(layers, int) else 0
    if depth >= 1 and isinstance(labels, Sequence) and labels and depth % len(labels):
        model["mixers"] = labels = _labels(list(labels), depth)
        lines.append(f"mixers is {labels}, for {layers} layers; --model.mixers sets others")
        set_inside = {inside[0] for inside in given.get("mixer_options", ()) if inside}
        options = {label: x for label, x in options.items() if label in labels or label in set_inside}
    if "hidden_size" in given and isinstance(width, int) and width >= 1:
        for label in dict.fromkeys(labels or ()):
            own = options.get(label) or {}
            full = _defaults(label, own) | own
            x = _heads(full, width)
            for name in [name for name in x if x[name] != full[name]]:
                if [label, name] in [list(inside) for inside in given.get("mixer_options", ())]:
                    continue
                options = {**options, label: {**own, **options.get(label, {}), name: x[name]}}
                flag = f"--model.mixer_options.{label}.{name}"
                lines.append(f"{name} of {label!r} is {x[name]}, for hidden_size={width}; {flag} sets another")
    if options != (model.get("mixer_options") or {}):
        model["mixer_options"] = options
    return model, lines


def _labels(labels: list[str], layers: int) -> list[str]:
    """Return `layers` labels: repeat a shorter pattern; of a longer one take the section with most distinct labels."""
    if layers >= len(labels):
        return (labels * (layers // len(labels) + 1))[:layers]
    parts = [labels[i : i + layers] for i in range(len(labels) - layers + 1)]
    if layers < len(set(labels)):
        # no section has all labels: of the sections with the most, take the last one, because the pattern of a hybrid
        # recipe ends with the mixer that the recipe is about
        parts.reverse()
    return max(parts, key=lambda part: len(set(part)))


def _defaults(label: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default head size of a mixer that derives its head count from the head size; else an empty dict."""
    parameters = inspect.signature(find_mixer(options.get("type", label))).parameters
    heads, size = (parameters[name].default if name in parameters else 0 for name in ("num_heads", "head_dim"))
    return {"head_dim": size} if heads is None and "num_heads" not in options else {}


def _heads(options: Mapping[str, Any], width: int) -> Mapping[str, Any]:
    """Return the options with a head count, or head size, that divides the width.

    Head sizes remain multiples of 4, and the number of key heads remains a divisor of the head count.
    """
    heads, size, groups = (options.get(name) for name in ("num_heads", "head_dim", "num_kv_heads"))
    if isinstance(heads, int) and size is None and width % (4 * heads):
        heads = gcd(heads, max(1, width // 4))
        groups = {"num_kv_heads": gcd(groups, heads)} if isinstance(groups, int) else {}
        return {**options, "num_heads": heads, **groups}
    if heads is None and isinstance(size, int) and width % size:
        return {**options, "head_dim": gcd(size, width)}
    return options
