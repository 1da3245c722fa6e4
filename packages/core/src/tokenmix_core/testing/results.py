"""Measured rows as committed JSON, one file a device, and as the tables of the READMEs."""

from __future__ import annotations

import json
import platform
import re
import runpy
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tokenmix_core.testing.benchmarking import table

# the columns of a README's table, by key of a row
_COLUMNS = {
    "op": "operation",
    "shape": "shape",
    "impl": "implementation",
    "fwd_ms": "forward, ms",
    "fwdbwd_ms": "forward + backward, ms",
    "peak_mb": "peak, MiB",
    "first_call_s": "first call, s",
}


def environment() -> dict[str, Any]:
    """Where and with what a measurement is made: device, versions, commit."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if cuda
        else f"CPU, {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit or None,
    }


def save(rows: Iterable[dict], folder: Path) -> Path:
    """Write rows to `folder/<device>.json`; an older row of the same operation, shape and implementation gives way."""
    where = environment()
    name = "cpu" if not torch.cuda.is_available() else re.sub(r"[^a-z0-9]+", "-", where["device"].lower()).strip("-")
    path = folder / f"{name}.json"
    kept = {_key(row): row for row in json.loads(path.read_text())} if path.exists() else {}
    kept |= {_key(row): {**row, "environment": where} for row in rows}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n")
    return path


def run_benchmark(path: Path, benchmark: Any, capsys: Any) -> None:
    """Run the `rows` of one `bench_*.py` under pytest-benchmark, print them, and keep those of a GPU in `results/`."""
    measure = runpy.run_path(str(path))["rows"]
    rows = benchmark.pedantic(measure, args=("cuda" if torch.cuda.is_available() else "cpu",), rounds=1)
    assert rows, f"{path.name} measured nothing"
    benchmark.extra_info["rows"] = rows
    # a CPU's times are for the one who runs it; a GPU's are kept
    if torch.cuda.is_available():
        save(rows, path.parent / "results")
    with capsys.disabled():
        print("\n" + table(rows))


def markdown(path: Path) -> str:
    """The rows of a results file as a markdown table, under a line that says where they were measured."""
    rows = json.loads(path.read_text())
    places = sorted({_place(row["environment"]) for row in rows})
    columns = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
    lines = ["Measured on " + "; ".join(places) + ".", ""]
    lines.append("| " + " | ".join(_COLUMNS[key] for key in columns) + " |")
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(_cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def fill(readme: Path, table: str) -> bool:
    """Put a table between the marks `<!-- speed -->` and `<!-- /speed -->` of a README; return whether it changed."""
    text = readme.read_text()
    new, marks = re.subn(r"(?s)(<!-- speed -->\n).*?(<!-- /speed -->)", lambda m: f"{m[1]}{table}\n{m[2]}", text)
    if marks != 1:
        raise ValueError(f"{readme} must hold the marks <!-- speed --> and <!-- /speed --> once, found {marks}")
    if new != text:
        readme.write_text(new)
    return new != text


def _key(row: dict) -> tuple[str, str, str]:
    return row["op"], row["shape"], row["impl"]


def _place(where: dict) -> str:
    return f"one {where['device']}, torch {where['torch']}, Triton {where['triton']}, commit {where['commit']}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return (
        f"{value:.3f}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
