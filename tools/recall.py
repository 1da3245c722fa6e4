"""Store in `docs/results/recall-SIZE.json` what recall runs have logged, then plot all such files.

Without arguments, only plot.

usage: python tools/recall.py SIZE NAME=RUN ...     where RUN is the folder of `tokenmix train recall-*`
"""

import json
import sys
from pathlib import Path
from statistics import median

from tokenmix_core.evaluation.report import draw
from tokenmix_core.training.callbacks import read_metrics

DOCS = Path(__file__).parents[1] / "docs"
# title of the plot of each size
TITLES = {"340m": "340M parameters", "nha-100m": "86M parameters", "nha-small": "two layers", "small": "two layers"}


def summary(run: Path) -> dict:
    """Return size, speed, loss by step and accuracy by pairs of a run."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    manifest = json.loads((run / "run.json").read_text())
    rows = json.loads((run / "evaluation" / "mqar.json").read_text())["rows"]
    kept = {
        "parameters": manifest["parameters"],
        "device": manifest["device"],
        "versions": manifest["versions"],
        "tokens per step": manifest["values"]["batch_tokens"],
        "loss": [[line["step"], round(line["loss"], 4)] for line in lines],
        "accuracy": [[row["pairs"], round(row["accuracy"], 4)] for row in rows],
    }
    for name in ("tokens_per_second", "model_flops_utilisation"):
        if values := [line[name] for line in lines if name in line]:
            # leave out the first half, which has short examples
            kept[name.replace("_", " ")] = median(values[len(values) // 2 :])
    return kept


def plot(path: Path) -> None:
    runs = json.loads(path.read_text())
    accuracy = {name: ([x for x, _ in run["accuracy"]], [y for _, y in run["accuracy"]]) for name, run in runs.items()}
    loss = {
        name: ([step * run["tokens per step"] / 1e6 for step, _ in run["loss"]], [value for _, value in run["loss"]])
        for name, run in runs.items()
    }
    size = path.stem.removeprefix("recall-")
    title = f"Associative recall, {TITLES.get(size, size)}"
    plots = DOCS / "plots"
    draw(
        {
            "title": title,
            "x": "pairs",
            "y": "accuracy (share of pairs)",
            "log_x": True,
            "shares": True,
            "series": accuracy,
        },
        plots / f"{path.stem}.png",
    )
    draw(
        {"title": title, "x": "million tokens", "y": "loss (nats an answer)", "series": loss},
        plots / f"{path.stem}-loss.png",
    )


def main(arguments: list[str]) -> None:
    if arguments:
        size, *runs = arguments
        found = {name: summary(Path(run)) for name, _, run in (part.partition("=") for part in runs)}
        path = DOCS / "results" / f"recall-{size}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found) + "\n")
    for path in sorted((DOCS / "results").glob("recall-*.json")):
        plot(path)


if __name__ == "__main__":
    main(sys.argv[1:])
