"""Make the tables of docs/choose.md: the state of a sequence in a layer of each mixer (see `tables.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch

PACKAGES = [f"tokenmix_{path.parent.name}" for path in Path(__file__).parents[1].glob("packages/*/pyproject.toml")]
CONTEXTS = (1024, 16384, 131072)


def tables(models: bool = True) -> dict[str, str]:
    """Return the tables by their marks; nothing without `models` or if a package is not installed."""
    if not models or any(importlib.util.find_spec(package) is None for package in PACKAGES):
        return {}
    columns = ["mixer", "parameters", *(f"{length:,} tokens, KiB" for length in CONTEXTS)]
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    parts = ["| mixer | constant: part, KiB | growing: part, bytes per token |", "|---|---|---|"]
    for name, mixer in mixers().items():
        layer = _layer(name, mixer)
        cells = [name, f"{sum(p.numel() for p in layer.parameters()):,}"]
        for length in CONTEXTS:
            bounds = layer.state_bounds(length, 1, torch.bfloat16)
            least, most = (f"{size / 1024:,.0f}" for size in (bounds.least, bounds.most))
            cells.append(least if least == most else f"{least} to {most}")
        lines.append(f"| {' | '.join(cells)} |")
        constant, growing = _parts(layer)
        parts.append(f"| {name} | {', '.join(constant) or '–'} | {', '.join(growing) or '–'} |")
    return {"states": "\n".join(lines), "parts": "\n".join(parts)}


def _parts(layer: Any) -> tuple[list[str], list[str]]:
    """Return name and size of the parts of a layer's state: those of constant size, then those that grow."""
    short, long = CONTEXTS[0], CONTEXTS[-1]
    constant, growing = [], []
    for name, part in layer.make_state().parts.items():
        before, after = (part.bounds(length, 1, torch.bfloat16) for length in (short, long))
        if before == after:
            constant.append(f"{name} {after.most / 1024:,.{0 if after.most >= 1024 else 3}f}")
        else:
            least, most = ((y - x) / (long - short) for x, y in zip(before, after, strict=True))
            growing.append(f"{name} {most:,.0f}" if least == most else f"{name} {least:,.0f} to {most:,.0f}")
    return constant, growing


def mixers() -> dict[str, type]:
    """Return every registered mixer of all packages by name."""
    from tokenmix_core.nn.registry import find_mixer, known_mixers

    for package in PACKAGES:
        for part in ("model", "recipes"):
            if importlib.util.find_spec(f"{package}.{part}"):
                importlib.import_module(f"{package}.{part}")
    return {name: find_mixer(name) for name in known_mixers()}


def _layer(name: str, mixer: type) -> Any:
    """Return a layer with its defaults on the meta device, of 16 heads if it has no default number of heads."""
    from tokenmix_core.modeling import HybridConfig

    heads = inspect.signature(mixer).parameters.get("num_heads")
    options = {"num_heads": 16} if heads is not None and heads.default is inspect.Parameter.empty else {}
    with torch.device("meta"):
        config = HybridConfig(hidden_size=1024, num_hidden_layers=1, mixers=[name], mixer_options={name: options})
        return mixer.from_config(config, 0, **options)  # type: ignore[attr-defined]
