"""Make the table of docs/integrations.md: transformers' models on our kernels and on others (see `tables.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import result_tables

FOLDER = Path(__file__).parents[1] / "packages" / "core" / "benchmarks" / "results" / "field"
OURS, TORCH = result_tables.OURS, "transformers, torch"


def tables() -> dict[str, str]:
    """Return the table by its mark; empty if there are no measurements."""
    rows = result_tables.rows_in(FOLDER)
    return {"speed": _table(rows)} if rows else {}


def _table(rows: list[dict[str, Any]]) -> str:
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        found.setdefault((row["op"], row["shape"]), {})[row["impl"]] = row
    lines = [result_tables.devices(rows), ""]
    lines.append("| what | shape | ours | transformers with kernels | of these | transformers, torch |")
    lines.append("|---|---|---|---|---|---|")
    for (what, shape), forms in sorted(found.items(), key=lambda item: _order(*item[0])):
        kernels = [name for name in forms if name not in (OURS, TORCH)]
        named = f" ({kernels[0].partition(' with ')[2].partition(',')[0]})" if kernels else ""
        beside = forms[kernels[0]] if kernels else None
        lines.append(
            f"| {what} | {shape} | {_times(forms.get(OURS))} | {_times(beside)}{named} | "
            f"{_share(forms.get(OURS), beside)} | {_times(forms.get(TORCH))} |"
        )
    return "\n".join(lines)


def _order(what: str, shape: str) -> tuple[int, str, int]:
    """Return a sorting key: layers, models, then tokens; by family; larger batches first."""
    kind, _, family = what.partition(" of ")
    return ["layer", "model", "one token"].index(kind), family, -int(shape[1:].split()[0])


def _times(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return " / ".join(f"{row[key]:.2f}" for key in ("fwd_ms", "fwdbwd_ms") if row[key] is not None) or "failed"


def _share(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    if ours is None or theirs is None:
        return "–"
    keys = [key for key in ("fwd_ms", "fwdbwd_ms") if ours[key] is not None and theirs[key] is not None]
    return " / ".join(f"{ours[key] / theirs[key]:.2f}" for key in keys) or "–"
