"""Draw the results of `bench_mixer.py` with the model of appendix E, and write the README's table: `python cost.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from bench_mixer import crossover_of

from tokenmix_oryx.flops import crossover, mixer_flops
from tokenmix_oryx.options import FAMILIES

FOLDER = Path(__file__).parent
README, FIGURE = FOLDER.parent / "README.md", FOLDER.parent / "figures" / "mixer-cost.png"
BEGIN, END = "<!-- cost -->\n", "<!-- /cost -->"
NAMES = dict(zip(FAMILIES, ("ORYX-TM", "ORYX-TG"), strict=True))
KINDS = {"mixer": "the layer", "mixing": "without the six large projections"}
# milliseconds by length, then by fraction of tokens in attention mode
Times = dict[int, dict[float, float]]


def measured(folder: Path = FOLDER / "results") -> dict[tuple[str, str], Times]:
    """Return the measurements in `folder` by kind and family."""
    found: dict[tuple[str, str], Times] = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text()):
            kind, _, family = row["op"].partition(", ")
            if kind in KINDS and family in FAMILIES:
                found[kind, family][row["tokens"]][row["attention_share"]] = row["fwdbwd_ms"]
    return found


def table(found: dict[tuple[str, str], Times]) -> str:
    """Return Markdown: milliseconds by length, and the lengths from which 1/4 attention beats attention alone."""
    lines = [
        "| | T | attention alone | 1/2 | 1/4 | linear | 1/4 : alone | by FLOPs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (kind, family), times in found.items():
        for tokens, ms in sorted(times.items()):
            flops = mixer_flops(tokens, 0.25).total / mixer_flops(tokens, 1.0).attention_output
            cells = [f"{NAMES[family]}, {KINDS[kind]}", str(tokens), *(f"{ms[s]:.2f}" for s in (1.0, 0.5, 0.25, 0.0))]
            lines.append(f"| {' | '.join(cells)} | {ms[0.25] / ms[1.0]:.2f} | {flops:.2f} |")
    lines += [
        "",
        f"A share of 1/4 is faster than attention alone from T = {crossover(0.25):.0f} on by FLOPs; measured, from",
    ]
    ends = [f"{NAMES[f]}, {KINDS[k]}: {crossover_of(t, 0.25) or f'above {max(t)}'}" for (k, f), t in found.items()]
    return "\n".join(lines) + " " + "; ".join(ends) + ".\n"


def plot(found: dict[tuple[str, str], Times], path: Path) -> None:
    """Draw times relative to attention alone: measured ones solid, FLOPs of appendix E dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, ((kind, family), times) in zip(panels, found.items(), strict=True):
        lengths = sorted(times)
        for color, share in zip(("C0", "C1", "C2"), (0.0, 0.25, 0.5), strict=True):
            ratio = [times[t][share] / times[t][1.0] for t in lengths]
            flops = [mixer_flops(t, share).total / mixer_flops(t, 1.0).attention_output for t in lengths]
            axes.plot(lengths, ratio, "o-", color=color, label=f"attention share {share:g}", markersize=3)
            axes.plot(lengths, flops, "--", color=color, linewidth=1)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("T (tokens)")
        axes.set_ylim(0, 2)
        axes.grid(alpha=0.3)
        axes.set_title(f"{NAMES[family]}, {KINDS[kind]}", fontsize=8)
    panels[0].set_ylabel("forward + backward : attention alone")
    panels[0].legend(fontsize=7, title="dashed: FLOPs of appendix E", title_fontsize=7)
    figure.savefig(path, dpi=90)


def filled(readme: str, found: dict[tuple[str, str], Times]) -> str:
    """Return the README with the table between its marks."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table(found) + END + rest.split(END)[1]


if __name__ == "__main__":
    results = measured()
    README.write_text(filled(README.read_text(), results))
    plot(results, FIGURE)
