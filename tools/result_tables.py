"""Make tables and plots of the committed results of benchmarks, for the READMEs and docs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenmix_core.testing.results import OURS

# titles of the columns of a README's table, by key of a row
_COLUMNS = {
    "op": "operation",
    "shape": "shape",
    "impl": "implementation",
    "fwd_ms": "forward, ms",
    "fwdbwd_ms": "forward + backward, ms",
    "peak_mb": "peak, MiB",
    "first_call_s": "first call, s",
}
_TIMES = ("fwd_ms", "fwdbwd_ms")
_LABELS = {
    "fwd_ms": "forward",
    "fwdbwd_ms": "forward + backward",
    "eager_ms": "forward + backward, eager",
    "peak_mb": "peak memory",
}


def rows_in(folder: Path) -> list[dict]:
    """Return the rows of all JSON files in a folder."""
    return [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]


def beside(rows: Iterable[dict]) -> list[dict]:
    """Return one row per operation and shape measured for us and a baseline: our row and the best baseline values.

    `<key>_baseline` is the pair of the baseline's value and its name, or None if no baseline has that value.
    """
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["shape"]), []).append({**row, "eager_ms": _eager(row)})
    out = []
    for group in groups.values():
        ours = next((row for row in group if row["impl"] == OURS), None)
        baselines = [row for row in group if not row["impl"].startswith(OURS) and "failed" not in row]
        if ours is not None and baselines:
            best = {}
            for key in (*_TIMES, "eager_ms", "peak_mb", "first_call_s"):
                known = [(row[key], row["impl"]) for row in baselines if row.get(key) is not None]
                best[f"{key}_baseline"] = min(known, default=None)
            out.append({**ours, **best})
    return out


def markdown(rows: Sequence[dict]) -> str:
    """Return Markdown: the devices, a table of ours against the best baseline, of other rows, and of failures."""
    pairs = beside(rows)
    paired = {(row["op"], row["shape"]) for row in pairs}
    failed = [row for row in rows if "failed" in row]
    others = [row for row in rows if (row["op"], row["shape"]) not in paired and row not in failed]
    blocks = [devices(rows)]
    if pairs:
        values = [key for key in (*_TIMES, "peak_mb") if any(row.get(key) is not None for row in pairs)]
        columns = {key: _COLUMNS[key] for key in ("op", "shape", *values)}
        cells = [{**row, **{key: _beside_baseline(row, key) for key in values}} for row in pairs]
        blocks.append("Cells: ours / the best baseline (its name).\n\n" + _markdown_table(columns, cells))
    if others:
        columns = {key: name for key, name in _COLUMNS.items() if any(row.get(key) is not None for row in others)}
        blocks.append(_markdown_table(columns, others))
    if failed:
        columns = {key: _COLUMNS[key] for key in ("op", "shape", "impl")} | {"failed": "failed"}
        cells = [{**row, "failed": row["failed"].replace("|", "\\|")} for row in failed]
        blocks.append("Baselines that failed:\n\n" + _markdown_table(columns, cells))
    return "\n\n".join(blocks)


def _beside_baseline(row: dict, key: str) -> str:
    """Return a table cell with our value, the best baseline's value and the baseline's name."""
    best = row[f"{key}_baseline"]
    ours = _cell(row.get(key))
    return ours if best is None else f"{ours} / {_cell(best[0])} ({best[1]})"


def by_version(rows: Sequence[dict]) -> str:
    """Return a Markdown table of `measure_forms` rows: one line per shape, one column per form and Triton version."""
    forms = sorted({row["impl"] for row in rows}, key=lambda form: (form.partition(",")[0], _version(form)))
    cells: dict[tuple[str, str], dict] = {}
    for row in rows:
        line = cells.setdefault((row["op"], row["shape"]), {"op": row["op"], "shape": row["shape"]})
        if "failed" not in row:
            line[row["impl"]] = f"{row['fwd_ms']:.3f} / {row['fwdbwd_ms']:.3f}"
    columns = {"op": "operation", "shape": "shape"} | {form: form for form in forms}
    return f"{devices(rows)}\n\n{_markdown_table(columns, cells.values())}"


def _version(form: str) -> tuple[int, ...]:
    return tuple(int(part) for part in form.rpartition(" ")[2].split("."))


def slower(rows: Iterable[dict], bound: float) -> list[tuple[dict, str]]:
    """Return the rows of `beside` with a time above `bound` × the best baseline's, each with the key of that time."""
    pairs = beside(rows)
    return [(row, key) for row in pairs for key in _TIMES if (share := _share(row, key)) is not None and share > bound]


def plot(rows: Sequence[dict], path: Path, *, bound: float | None = None) -> None:
    """Draw the ratio of our time to the best baseline's, one line per shape; a ratio below 1 means that ours is faster.

    With `bound`, the plot marks this ratio, counts the shapes below it in the title and names each shape's fastest
    baseline. A second panel shows peak memory and the time of an eager forward and backward pass (the greater of CPU
    and device time).
    """
    from matplotlib.figure import Figure

    pairs = beside(rows)
    labels = [f"{row['op']} · {row['shape']}" for row in pairs]
    if bound is not None:
        fastest = [row["fwdbwd_ms_baseline"] or row["fwd_ms_baseline"] for row in pairs]
        labels = [f"{label} · {baseline[1]}" for label, baseline in zip(labels, fastest, strict=True)]
    panels = [_TIMES] if bound is None else [_TIMES, ("eager_ms", "peak_mb")]
    figure = Figure(figsize=(9 + 3 * (len(panels) - 1), 1.2 + 0.24 * len(pairs)), layout="constrained")
    for axes, keys in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        axes.axvline(1.0, color="black", linewidth=1)
        if bound is not None:
            axes.axvline(bound, color="tab:red", linewidth=1, linestyle="--")
        for key, marker in zip(keys, ("o", "s"), strict=True):
            shares = [(i, share) for i, row in enumerate(pairs) if (share := _share(row, key)) is not None]
            axes.plot([share for _, share in shares], [i for i, _ in shares], marker, label=_LABELS[key])
        axes.set_yticks(range(len(pairs)), labels, fontsize=7)
        axes.set_xscale("log")
        ticks = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.minorticks_off()
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("share of the best baseline's in the same run")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    title = _environments(pairs)
    if bound is not None:
        late = {(row["op"], row["shape"]) for row, _ in slower(rows, bound)}
        kept = len(pairs) - len(late)
        title.append(f"{kept} of {len(pairs)} shapes at most {bound:g} times the best baseline's time")
    figure.suptitle("\n".join(title), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def fill(readme: Path, table: str, mark: str = "speed") -> bool:
    """Replace the text between `<!-- mark -->` and `<!-- /mark -->` in a README; return whether the README changed."""
    text = readme.read_text()
    new, marks = re.subn(
        rf"(?s)(<!-- {re.escape(mark)} -->\n).*?(<!-- /{re.escape(mark)} -->)", lambda m: f"{m[1]}{table}\n{m[2]}", text
    )
    if marks != 1:
        raise ValueError(f"{readme} must hold the marks <!-- {mark} --> and <!-- /{mark} --> once, found {marks}")
    if new != text:
        readme.write_text(new)
    return new != text


def _eager(row: dict) -> float | None:
    """Return the milliseconds of an eager forward and backward pass: the greater of CPU and device time."""
    device, host = row.get("fwdbwd_ms"), row.get("host_us")
    return None if device is None or host is None else max(device, host / 1e3)


def _share(pair: dict, key: str) -> float | None:
    """Return our value divided by the best baseline's; None if one of them is unknown."""
    ours, baseline = pair.get(key), pair[f"{key}_baseline"]
    return None if ours is None or baseline is None else ours / baseline[0]


def devices(rows: Iterable[dict]) -> str:
    """Return a sentence that names the devices and versions of the rows."""
    return "Measured on " + "; ".join(_environments(rows)) + "."


def _environments(rows: Iterable[dict]) -> list[str]:
    """Return one line for each device and set of versions that the rows were measured with, with the commits."""
    commits: dict[str, set[str]] = {}
    for where in (row["environment"] for row in rows):
        machine = f"one {where['device']}, torch {where['torch']}, Triton {where['triton']}"
        commits.setdefault(machine, set()).add(where["commit"])
    return [f"{machine}, commit {', '.join(sorted(commits[machine]))}" for machine in sorted(commits)]


def _markdown_table(columns: dict[str, str], rows: Iterable[dict]) -> str:
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, tuple):
        return f"{_cell(value[0])} ({value[1]})"
    return (
        f"{value:.3f}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
