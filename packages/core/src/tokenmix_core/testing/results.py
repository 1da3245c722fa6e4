"""Results of benchmarks: JSON files in the repository, one for each device."""

from __future__ import annotations

import json
import platform
import re
import runpy
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.testing.benchmarking import table

OURS = "tokenmix"


def environment() -> dict[str, Any]:
    """Return the environment of a measurement: device, software versions and commit."""
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
    """Write rows to `folder/<device>.json`; they replace older rows of the same operation, shape and implementation."""
    where = environment()
    name = "cpu" if not torch.cuda.is_available() else re.sub(r"[^a-z0-9]+", "-", where["device"].lower()).strip("-")
    path = folder / f"{name}.json"
    kept = {_key(row): row for row in json.loads(path.read_text())} if path.exists() else {}
    kept |= {_key(row): {**row, "environment": where} for row in rows}
    write_atomically(path, json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n")
    return path


def kept(rows: Iterable[dict], folder: Path) -> Iterator[dict]:
    """Yield `rows`; print each one and, on a GPU, save it at once, so that an interrupted run keeps its rows."""
    header: list[str] = []
    for row in rows:
        # print the header if the columns differ from those of the previous row
        print(table([row]).splitlines()[1] if list(row) == header else "\n" + table([row]), flush=True)
        header = list(row)
        # times measured on a CPU are printed but not saved
        if torch.cuda.is_available():
            save([row], folder)
        yield row


def run_benchmark(path: Path, benchmark: Any, capsys: Any, *, function: str = "rows") -> None:
    """Run a function of a `bench_*.py` by pytest-benchmark; print its rows and, on a GPU, save them.

    Each row is saved as soon as it is measured: rows of the function `rows` in `results/`, or in the module's `FOLDER`
    below it; rows of another function in `results/<function>/`.
    """
    with capsys.disabled():
        # import the libraries here: they keep sys.stderr for their logs, and pytest closes its own sys.stderr after the
        # test
        script = runpy.run_path(str(path))
    measure = script[function]
    folder = path.parent / "results" / (script.get("FOLDER", "") if function == "rows" else function)
    rows: list[dict] = []

    def run() -> None:
        with capsys.disabled():
            rows.extend(kept(measure("cuda" if torch.cuda.is_available() else "cpu"), folder))

    benchmark.pedantic(run, rounds=1)
    assert rows, f"{path.name} measured nothing"
    benchmark.extra_info["rows"] = rows
    with capsys.disabled():
        print("\n" + table(rows))


def _key(row: dict) -> tuple[str, str, str]:
    return row["op"], row["shape"], row["impl"]
