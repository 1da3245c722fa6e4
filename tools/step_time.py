"""Make the tables of docs/step_time.md: floors and measurements of training steps (see `tables.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import result_tables
import torch

BENCHMARKS = Path(__file__).parents[1] / "packages" / "core" / "benchmarks"
GPUS = Path(__file__).parents[1] / "docs" / "results" / "gpus.json"
ROWS, LENGTH = 8, 4096
# for each kind of model, by title, the recipe of one size
MODELS = {
    "Transformer++": "tokenmix_nats_l.recipes:transformer-380m",
    "Gated DeltaNet": "tokenmix_nats_l.recipes:gdn-380m",
    "Gated DeltaNet and attention": "tokenmix_nats_l.recipes:gdn-hybrid-380m",
    "Mamba-2": "tokenmix_nats_l.recipes:mamba2-380m",
    "NHA": "tokenmix_nha.recipes:nha-340m",
    "Oryx-TM": "tokenmix_oryx.recipes:tm-380m",
    "Oryx-TG": "tokenmix_oryx.recipes:tg-380m",
    "NAtS-L Hybrid": "tokenmix_nats_l.recipes:nats-l-hybrid-380m",
    "laLTE": "tokenmix_lte.recipes:lalte-0.4b",
    "laNSA": "tokenmix_lte.recipes:lansa-0.4b",
}


def tables(models: bool = True) -> dict[str, str]:
    """Return the tables by mark; floors need all packages, and `models`, since they are counted from the models."""
    measured = result_tables.rows_in(BENCHMARKS / "results" / "step")
    found = {"measured": _measured(measured), "gpus": _gpus(json.loads(GPUS.read_text()))}
    if not models:
        return found
    packages = {name.partition(".")[0] for name in MODELS.values()}
    if missing := sorted(name for name in packages if importlib.util.find_spec(name) is None):
        print(f"docs/step_time.md: floors are left as they are without {', '.join(missing)}", file=sys.stderr)
        return found
    return found | {"floors": _floors()}


def _floors() -> str:
    from transformers import AutoModelForCausalLM

    lines = ["| model | matmuls | mixing | activations | loss | weights | floor, ms | thousand tokens/s |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    # `step_floor.py` is a file of the benchmarks, not of a package
    sys.path.insert(0, str(BENCHMARKS))
    from step_floor import floor

    for title, name in MODELS.items():
        module, _, recipe = name.partition(":")
        config = importlib.import_module(module).RECIPES[recipe]().model_config()
        # only shapes are needed
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        parts = floor(model, ROWS, LENGTH)
        cells = " | ".join(f"{ms:.1f}" for ms in parts.values())
        lines.append(f"| {title}, `{name.partition(':')[2]}` | {cells} | {ROWS * LENGTH / parts['all']:.0f} |")
    return "\n".join(lines)


def _measured(rows: list[dict[str, Any]]) -> str:
    """Return a table of steps and baselines for each GPU, or a sentence if nothing was measured."""
    if not rows:
        return "None of these steps was measured yet with the kernels between matmuls."
    devices = list(dict.fromkeys(row["environment"]["device"] for row in rows))
    return "\n\n".join(
        _on(device, [row for row in rows if row["environment"]["device"] == device]) for device in devices
    )


def _on(device: str, rows: list[dict[str, Any]]) -> str:
    columns = ["model", "implementation", "step, ms", "thousand tokens/s", "of the floor", "as run", "peak, GiB"]
    columns += ["first step, s", "Triton, commit"]
    lines = [f"One {device}:", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        where, as_run = row["environment"], row.get("share_as_run")
        model = row["op"].rpartition(", ")[2]
        cells = [
            model if row["shape"] == f"B{ROWS} T{LENGTH}" else f"{model}, {row['shape']}",
            row["impl"].replace("between products", "between matmuls"),
            f"{row['step_ms']:.1f}",
            f"{row['thousand_tokens_s']:.1f}",
            f"{row['share_of_floor']:.0%}",
            f"{as_run:.0%}" if as_run else "–",
            f"{row['peak_gib']:.1f}",
            f"{row['first_step_s']:.0f}",
            f"{where['triton']}, {where['commit']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gpus(rows: list[dict[str, Any]]) -> str:
    """Return a table of a model's speed on one and on several GPUs, relative to as many times one GPU's speed."""
    rates = {row["form"]: statistics.median(row["tokens_per_second"]) for row in rows}
    one = next(rates[row["form"]] for row in rows if row["gpus"] == 1)
    lines = ["| model | on | thousand tokens/s, median of steps | slowest, fastest step | of as many GPUs alone |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        least, most = (f"{1e-3 * f(row['tokens_per_second']):.1f}" for f in (min, max))
        rate = rates[row["form"]]
        share = f"{rate / (row['gpus'] * one):.0%}"
        lines.append(f"| {row['model']} | {row['form']} | {1e-3 * rate:.1f} | {least}, {most} | {share} |")
    return "\n".join(lines)
