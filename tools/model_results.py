"""Make tables and figures of documents from the results in `docs/results`; `tools/tables.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import result_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
MEASURED = ROOT / "packages" / "core" / "benchmarks" / "results"
PAIRS = ("linear → linear", "attention → linear", "linear → attention", "attention → attention")
SWITCHES = ("attention → linear", "linear → attention")
AFTER = ("0-16", "16-64", "64-128")
# models in NHA's results that its table leaves out, because the arena compares mixers
OTHERS = ("GDN", "Transformer++")


def tables() -> dict[str, dict[str, str]]:
    """Return, for each document, the tables by the names of their marks."""
    oryx, search = _read("oryx-demo"), _read("search-nha-100m")
    return {
        "oryx.md": {
            "recall by chunks": _recall(oryx["demo-tm"], oryx["demo-tg"]),
            "recall by sequences": _recall(oryx["demo-tm-sequence"], oryx["demo-tg-sequence"]),
            "switches": _switches(oryx),
        },
        "speed.md": {
            "tokens": tokens_table(_read("tokens")),
            "prompts": _prompts(result_tables.rows_in(RESULTS / "prompts")),
            "flashinfer": _forwards(_read("flashinfer")),
            "passes": _passes(result_tables.rows_in(MEASURED / "passes")),
            "decode": _decode(result_tables.rows_in(MEASURED / "decode")),
        },
        "nha.md": {
            "small": _accuracy(_read("recall-nha-small")),
            "search": _search(search["rows"]),
        },
    }


def draw_plots() -> None:
    """Draw the figures of documents from the data in `docs/results`."""
    # import here, because these modules import models, which the tables do not need
    from tokenmix_core.evaluation.report import draw
    from tokenmix_nha.search import plot_of

    settings = _read("search-nha-100m")["settings"]
    chosen, tried = json.loads(settings["chosen"]), json.loads(settings["tried"])
    plot = plot_of(
        "accuracy, mean over 4, 16 and 64 pairs",
        [(choice["pattern"], len(choice["full"]), choice["score"]) for choice in tried],
        (len(chosen["full layers"]), chosen["score"]),
    )
    draw(plot, ROOT / "packages" / "nha" / "figures" / "search-100m.png")


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _share(value: float) -> str:
    """Return a fraction with three digits, without the zero before the point."""
    return f"{value:.3f}".removeprefix("0")


def _signed(value: float) -> str:
    return f"{value:.4f}".replace("-", "−")


def _recall(tm: Any, tg: Any) -> str:
    """Return the table of accuracy by number of pairs, TM / TG, for each mode of the pairs and of the queries."""
    found = [
        {(row["modes"], row["pairs"]): row["accuracy"] for row in run["cross-mode-mqar"]["rows"]} for run in (tm, tg)
    ]
    rows = [
        [str(pairs), *(" / ".join(_share(run[modes, pairs]) for run in found) for modes in PAIRS)]
        for pairs in sorted({pairs for _, pairs in found[0]})
    ]
    return _table(["pairs", *PAIRS], rows)


def _switches(runs: Any) -> str:
    """Return the table of each mode's loss alone, and of the mean excess loss after a switch."""
    rows = []
    for name, run in runs.items():
        family, _, assignment = name.removeprefix("demo-").partition("-")
        found = {row["modes"]: row for row in run["switch-perplexity"]["rows"]}
        cells = [f"{found[f'{mode} alone']['loss']:.3f}" for mode in ("linear", "attention")]
        for switch in SWITCHES:
            once = [row for modes, row in found.items() if modes.startswith(f"{switch} at ")]
            cells += [_signed(mean(row[f"excess, {after} tokens after"] for row in once)) for after in AFTER]
        rows.append([f"{family.upper()}, {assignment or 'chunk'}s", *cells])
    heads = [f"{switch}, {after} tokens after" for switch in SWITCHES for after in AFTER]
    return _table(["", "linear alone", "attention alone", *heads], rows)


def _accuracy(runs: Any) -> str:
    """Return the table of accuracy by pairs of NHA and its parts, with the last loss and the mean over pairs."""
    pairs = [str(pairs) for pairs, _ in next(iter(runs.values()))["accuracy"]]
    rows = []
    for name, run in runs.items():
        if name in OTHERS:
            continue
        # four digits are stored: restore the exact fraction of the queries in 128 rows before rounding to three digits
        values = [round(value * 128 * n) / (128 * n) for n, value in run["accuracy"]]
        shown = map(_share, (*values, mean(values)))
        rows.append([name, f"{run['parameters']:,}", f"{run['loss'][-1][1]:.3f}", *shown])
    return _table(["", "parameters", "last loss", *(f"{n} pairs" for n in pairs), "mean"], rows)


def _search(found: Any) -> str:
    """Return the table of patterns, each with the best placement of its full-attention layers and its accuracy."""
    score = next(key for key in found[0] if key.startswith("mqar:"))
    rows = [[row["pattern"], row["which"] or "none", _share(row[score])] for row in found]
    return _table(["pattern", "full layers, from 0", "accuracy"], rows)


def tokens_table(found: Any) -> str:
    """Return the table of the time of a decoded token and the time to read its bytes."""
    rows = [
        [
            f"{row['model']} {row['size']}"
            + (f", {row['note'].replace('far keys', 'retained keys')}" if row["note"] else ""),
            str(row["batch"]),
            f"{row['after']:,}",
            f"{row['step_ms']:.2f}",
            f"{1e3 * row['batch'] / row['step_ms']:,.0f}",
            f"{row['floor_ms']:.2f}",
            f"{row['held_mib']:,.0f}",
            f"{row['prompt_s']:.3g}" if "prompt_s" in row else "–",
            row["environment"]["device"].split()[1],
            row["environment"]["commit"],
        ]
        for row in found
    ]
    columns = ["model", "sequences", "after tokens", "a token, ms", "tokens/s", "its bytes, ms", "state, MiB"]
    columns += ["prompt, s", "GPU", "commit"]
    return _table(columns, rows)


def _prompts(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of the time to read a prompt, for our models and baselines."""
    rows = [
        [
            row["op"].rpartition(", ")[2],
            row["shape"],
            row["impl"],
            f"{row['ms']:.1f}",
            f"{row['thousand_tokens_s']:.0f}",
            f"{row['peak_gib']:.2f}",
            *(row["environment"][name] for name in ("device", "triton", "commit")),
        ]
        for row in found
    ]
    columns = ["model", "prompt", "implementation", "ms", "thousand tokens/s", "peak beside weights, GiB", "GPU"]
    return _table([*columns, "Triton", "commit"], rows)


def _passes(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of attention's forward and backward times by implementation, one row per shape."""
    impls = dict.fromkeys(row["impl"] for row in found)
    times = {(row["op"], row["shape"], row["impl"]): row for row in found}

    def cells(call: tuple[str, str]) -> list[str]:
        rows = [times.get((*call, impl)) for impl in impls]
        return ["–" if row is None else f"{row[key]:.3f}" for key in ("fwd_ms", "bwd_ms") for row in rows]

    columns = [f"{name}, {impl}" for name in ("forward", "gradients") for impl in impls]
    calls = dict.fromkeys((row["op"], row["shape"]) for row in found)
    return _table(
        ["call", "shape", *columns],
        [[op.removeprefix("attention, "), shape, *cells((op, shape))] for op, shape in calls],
    )


def _decode(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of a decoded token of the Transformer++ and of a Llama of equal sizes, if one GPU timed both."""
    models: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in found:
        if row["op"].startswith("decoding"):
            name = row["op"].removeprefix("decoding, ")
            models.setdefault((name, row["shape"], row["environment"]["device"]), {})[row["impl"]] = row
    rows = []
    for call, impls in models.items():
        baseline = impls.get("transformers Llama, static cache, compiled")
        if baseline is not None and "tokenmix" in impls:
            ours = impls["tokenmix"]
            times = [f"{row[key]:.2f}" for key in ("fwd_ms", "first_ms") for row in (ours, baseline)]
            rows.append([*call, *times, f"{ours['floor_ms']:.2f}", ours["environment"]["commit"]])
    columns = ["a token, ms", "of Llama", "prompt and first token, ms", "of Llama", "its bytes, ms", "commit"]
    return _table(["model", "shape", "GPU", *columns], rows)


def _forwards(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of the gated delta rule's forward times by implementation, one column per shape."""
    shapes = list(dict.fromkeys(row["shape"] for row in found))
    times = {(row["impl"], row["shape"]): f"{row['median_ms']:.3f}" for row in found}
    impls = dict.fromkeys(row["impl"] for row in found)
    return _table(["implementation", *shapes], [[impl, *(times.get((impl, x), "–") for x in shapes)] for impl in impls])
