"""Make those sentences of READMEs and docs that state measurements, from committed rows; `tools/tables.py` writes them.

Prose that repeats a table by hand differs from the table after the next measurement. A sentence with measurements
therefore stands between marks, as tables do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import model_results
import result_tables

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]


def sentences() -> dict[tuple[Path, str], str]:
    """Return, by page and mark, the sentences and tables that repeat measurements of other pages."""
    tokens = _rows(model_results.RESULTS / "tokens.json")
    nha = [row for row in tokens if row["model"].startswith("NHA")]
    lte = [row for row in tokens if row["size"] == "1.4B"]
    return {
        (ROOT / "README.md", "measured"): "\n".join([_steps(), _slots(), _constant(lte), _layers()]),
        (ROOT / "packages" / "nha" / "README.md", "gsa"): _gsa(),
        (ROOT / "packages" / "nha" / "README.md", "decoding"): _decoded(nha),
        (ROOT / "docs" / "nha.md", "decoding"): model_results.tokens_table(nha),
        (ROOT / "docs" / "lte.md", "decoding"): model_results.tokens_table(lte),
    }


def _rows(path: Path) -> list[Row]:
    return json.loads(path.read_text())


def _of_package(name: str) -> list[Row]:
    return result_tables.rows_in(ROOT / "packages" / name / "benchmarks" / "results")


def _time(rows: Sequence[Row], **wanted: Any) -> Row:
    """Return the only row that has these values."""
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return found


def _device(row: Row) -> str:
    return f"one {row['environment']['device'].removeprefix('NVIDIA ').split()[0]}"


def _pair(low: float, high: float, digits: int = 2) -> str:
    return f"{min(low, high):.{digits}f} to {max(low, high):.{digits}f}"


def _steps() -> str:
    """Return a sentence with the throughput of whole training steps, ours and FLA's."""
    rows = _rows(ROOT / "packages" / "core" / "benchmarks" / "results" / "step" / "nvidia-h100-80gb-hbm3.json")
    parts = []
    for model, recipe in (("Gated DeltaNet", "gdn-380m"), ("Transformer++", "transformer-380m")):
        op = f"training step, tokenmix_nats_l.recipes:{recipe}"
        ours, fla = (
            _time(rows, op=op, shape="B8 T4096", impl=impl)["thousand_tokens_s"]
            for impl in ("tokenmix eager", "FLA eager")
        )
        parts.append(f"{model} {ours:.0f} thousand tokens/s, FLA's {fla:.0f}")
    return (
        f"- A training step of 380M parameters on 8 × 4,096 tokens, forward, backward and update: {'; '.join(parts)} "
        f"({_device(rows[0])}; [table](docs/step_time.md))."
    )


def _slots() -> str:
    """Return a sentence with the times of the slot-window operation and of FLA's `chunk_gsa`."""
    rows, shapes = _of_package("nha"), [f"B8 T4096 H16 D128 M{slots} w0" for slots in (32, 64)]
    ours, gsa = (
        [_time(rows, shape=shape, impl=impl)["fwdbwd_ms"] for shape in shapes] for impl in ("tokenmix", "FLA chunk_gsa")
    )
    return (
        f"- NHA's operation without a window, forward and backward of 8 × 4,096 tokens, 32 and 64 slots: "
        f"{ours[0]:.2f} and {ours[1]:.2f} ms; FLA's `chunk_gsa` {gsa[0]:.2f} and {gsa[1]:.2f} ms "
        f"({_device(_time(rows, shape=shapes[0], impl='tokenmix'))})."
    )


def _gsa() -> str:
    """Return a sentence with the time of FLA's `chunk_gsa`."""
    rows = _of_package("nha")
    found = [_time(rows, shape=f"B8 T4096 H16 D128 M{slots} w0", impl="FLA chunk_gsa") for slots in (32, 64)]
    times = [f"{row['fwd_ms']:.3f} / {row['fwdbwd_ms']:.3f} ms" for row in found]
    return (
        f"`chunk_gsa` takes {times[0]} forward / forward and backward with 32 slots and {times[1]} with 64, without a "
        f"window, at B8 T4096 H16 D128."
    )


def _decoded(rows: Sequence[Row]) -> str:
    """Return a sentence with the time of one decoded token of one sequence, after short and after long contexts."""
    alone = sorted((row for row in rows if row["batch"] == 1), key=lambda row: row["after"])
    (first, *_, last), model = alone, f"{alone[0]['model'].removeprefix('NHA, ')} {alone[0]['size']}"
    return (
        f"A decoded token of {model}, all layers, one sequence: {first['step_ms']:.2f} ms after {first['after']:,} "
        f"tokens and {last['step_ms']:.2f} ms after {last['after']:,} ({_device(first)})."
    )


def _constant(rows: Sequence[Row]) -> str:
    """Return a sentence with the time of one decoded token of laLTE, after short and after long contexts."""
    long = max((row for row in rows if row["model"] == "laLTE"), key=lambda row: row["after"])
    same = {"model": "laLTE", "batch": long["batch"], "note": long["note"]}
    short = min(
        (row for row in rows if _device(row) == _device(long) and same.items() <= row.items()),
        key=lambda row: row["after"],
    )
    return (
        f"- A decoded token of laLTE at 1.4B, {long['batch']} sequences: {short['step_ms']:.2f} ms after "
        f"{short['after']:,} tokens, {long['step_ms']:.2f} ms after {long['after']:,} ({_device(long)})."
    )


def _layers() -> str:
    """Return a sentence that compares the time of layers of transformers' families on our and on other kernels."""
    rows = _rows(ROOT / "packages" / "core" / "benchmarks" / "results" / "field" / "nvidia-h200.json")
    layers = [row for row in rows if row["op"].startswith("layer of")]
    ours = {(row["op"], row["shape"]): row["fwdbwd_ms"] for row in layers if row["impl"] == "tokenmix"}
    shares = [
        ours[row["op"], row["shape"]] / row["fwdbwd_ms"]
        for row in layers
        if row["impl"].startswith("transformers with")
    ]
    return (
        f"- Layers of transformers' hybrid families on our kernels, forward and backward: "
        f"{_pair(min(shares), max(shares))} of the time with FLA's and mamba_ssm's "
        f"({_device(layers[0])}; [table](docs/integrations.md))."
    )
