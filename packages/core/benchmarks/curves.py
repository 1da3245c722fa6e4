"""Check whether a change of the sources changes training: `python curves.py RECIPE --before CHECKOUT [options]`.

A recipe's model, with weights from one seed, reads the same rows of the built-in text in three processes: with the
sources of another checkout of this workspace, with these sources, and with these sources and the rows of each batch in
reverse order. The last two differ only in the order of sums, so their distance is the effect of rounding on a loss
curve of this length. A change that only rounds differently moves the curve by about this distance at most.

A step is like that of recipes: bfloat16 autocast on a GPU, clipping, AdamW, float32 weights. The results are, for two
curves, the greatest distance between their moving averages over a tenth of the run, and the distance between the means
of their last tenths.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]
BEFORE, AFTER, TURNED = "before", "after", "after, rows reversed"
WARMUP = 20


def rows_of_text(steps: int, rows: int, length: int, vocab: int) -> torch.Tensor:
    """Return bytes of the built-in text, `[steps, rows, length]`, repeated if too few; bytes ≥ `vocab` become 0."""
    from tokenmix_core.data.sources import stdlib_source

    text = torch.frombuffer(bytearray("".join(stdlib_source().documents()), "utf-8"), dtype=torch.uint8)
    wanted = steps * rows * length
    text = text.repeat(-(-wanted // len(text)))[:wanted].long()
    return torch.where(text < vocab, text, 0).view(steps, rows, length)


def prepare(recipe: str, folder: Path, *, steps: int, rows: int, length: int) -> None:
    """Write the model and the rows with which all processes begin."""
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(HERE.parent))
    import step

    config = step.recipe_named(recipe).model_config()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    torch.save(rows_of_text(steps, rows, length, config.vocab_size), folder / "rows.pt")


def train(folder: Path, package: str, rate: float, rotated: bool, device: torch.device) -> list[float]:
    """Return the losses of training on the folder's rows, in reverse order inside each batch if `rotated`.

    The training loop is this file's, so that only the model comes from the compared sources.
    """
    from transformers import AutoModelForCausalLM

    importlib.import_module(package)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device).train()
    data = torch.load(folder / "rows.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    losses = []
    for i, ids in enumerate(data):
        ids = (ids.flip(0) if rotated else ids).to(device)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (i + 1) / WARMUP)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def distances(curves: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return two rows: the distance between the curves before and after the change, and that due to rounding."""
    told = []
    for one, other in ((BEFORE, AFTER), (TURNED, AFTER)):
        a, b = (torch.tensor(curves[name], dtype=torch.float64) for name in (one, other))
        width = max(1, len(a) // 10)
        smooth = (a - b).unfold(0, width, 1).mean(1)
        told.append(
            {
                "curve": one,
                "beside": other,
                "steps": len(a),
                "first loss": a[0].item(),
                "last loss": a[-width:].mean().item(),
                "greatest distance": f"{smooth.abs().max().item():.2g}",
                "distance at the end": f"{smooth[-1].item():.2g}",
            }
        )
    return told


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train three times, print the distances, and write them with the curves to the file `--out`."""
    parser = argparse.ArgumentParser(description="compare training by these sources with training by others")
    parser.add_argument("recipe", help="of core, or module:name")
    parser.add_argument("--before", type=Path, required=True, help="another checkout of this workspace")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a JSON file")
    given = parser.parse_args(arguments)
    if not (given.before / "packages" / "core" / "src").is_dir():
        parser.error(f"{given.before} is no checkout of this workspace")
    from tokenmix_core._utils.atomic_io import write_atomically
    from tokenmix_core.testing.benchmarking import table
    from tokenmix_core.testing.results import environment

    package = (given.recipe.rpartition(":")[0] or "tokenmix_core.training.baselines").partition(".")[0]
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(given.recipe, folder, steps=given.steps, rows=given.rows, length=given.length)
        for name, checkout in ((BEFORE, given.before), (AFTER, ROOT), (TURNED, ROOT)):
            print(f"training {name}", file=sys.stderr, flush=True)
            sources = [str(path.resolve()) for path in sorted(checkout.glob("packages/*/src"))]
            run = [str(checkout.resolve()), str(folder), package, str(given.rate), name, given.device]
            # the checkout's sources precede installed packages
            path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
            code = f"import runpy; runpy.run_path({str(HERE)!r})['child']()"
            subprocess.run([sys.executable, "-c", code, *run], check=True, env={**os.environ, "PYTHONPATH": path})
            curves[name] = json.loads((folder / "losses.json").read_text())
    told = distances(curves)
    print(table(told))
    if given.out is not None:
        kept = {"recipe": given.recipe, "curves": curves, "distances": told, "environment": environment()}
        write_atomically(given.out, json.dumps(kept) + "\n")
    return told


def child() -> None:
    """Train in a process of its own, with the arguments of the command line."""
    checkout, folder, package, rate, name, device = sys.argv[1:]
    where = importlib.import_module(package).__file__ or ""
    if not Path(where).resolve().is_relative_to(checkout):
        raise RuntimeError(f"curves.py: {package} was to be of {checkout}, and is {where}")
    losses = train(Path(folder), package, float(rate), name == TURNED, torch.device(device))
    (Path(folder) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
