"""Make the table of goals, which were set before the work, and of the committed measurements."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import result_tables

# at any shape of a sweep, our time may be at most this many times the best baseline's
BOUND = 1.1
# the allocator rounds peaks: a difference of at most this many MiB counts as none
_MEBIBYTE = 1.0


@dataclass(frozen=True)
class Goal:
    """Maximum milliseconds of the forward pass, and of both passes; None stands for no goal.

    With `of_baseline`, these are maximum ratios to the best baseline's time.
    """

    op: str
    shape: str
    forward: float | None
    both: float | None
    of_baseline: bool = False


GOALS = (
    Goal("gated_delta_rule", "B8 T4096 H16 K128 V128", 0.28, 1.03),
    Goal("gated_delta_rule", "B1 T32768 H16 K128 V128", None, 1.13),
    Goal("gated_delta_rule", "B1 T32768 H2/8 K128 V128", 0.20, None),
    Goal("gated_delta_rule", "B1 T32768 H2/8 K128 V128", None, 0.85, of_baseline=True),
    Goal("gated_delta_rule", "B1 T65536 H16 K128 V128, 32 sequences", 0.85, 0.85, of_baseline=True),
    Goal("SSD", "B8 T4096 G16 HV16 K128 V128", 0.25, 0.95),
    Goal("SSD", "B8 T4096 G1 HV64 K128 V64", 0.5, 0.5, of_baseline=True),
    Goal("attention, window 1024", "B8 T4096 H16 K128", 0.66, 2.3),
    Goal("gated_delta_rule_step", "B1 H16 K128 V128, CUDA graph", 0.012, None),
    Goal("gated_delta_rule_step", "B32 H16 K128 V128, CUDA graph", 0.022, None),
    Goal("gated_delta_rule_step", "B128 H16 K128 V128, CUDA graph", 0.075, None),
    Goal("slot-window attention", "B8 T4096 H16 D128 M32 w32", 0.45, 1.5),
    Goal("slot-window attention", "B8 T4096 H16 D128 M64 w32", 0.60, 2.0),
)


def of(rows: Iterable[dict]) -> list[dict]:
    """Return the rows of the shapes that have a goal."""
    shapes = {(goal.op, goal.shape) for goal in GOALS}
    return [row for row in rows if (row["op"], row["shape"]) in shapes]


def table(rows: Sequence[dict], sweep: Sequence[dict]) -> str:
    """Return a table of each goal with our time, the best baseline's time and the verdict.

    Below it follow the shapes at which we need more memory than a baseline, and those of `sweep` at which ours is slow.
    """
    pairs = {(row["op"], row["shape"]): row for row in result_tables.beside(rows)}
    lines = ["| operation | shape | pass | goal, ms | now, ms | best baseline, ms | verdict | Triton, commit |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for goal in GOALS:
        row = pairs.get((goal.op, goal.shape), {})
        for name, key, bound in (("forward", "fwd_ms", goal.forward), ("both", "fwdbwd_ms", goal.both)):
            if bound is not None:
                lines.append(_line(goal, name, row, key, bound))
    return "\n\n".join(["\n".join(lines), _memory(pairs.values()), _sweep(sweep)])


def _line(goal: Goal, name: str, row: dict, key: str, bound: float) -> str:
    ours, baseline = row.get(key), row.get(f"{key}_baseline")
    limit = bound if not goal.of_baseline else bound * baseline[0] if baseline else None
    asked = f"{bound:.3f}" if not goal.of_baseline else f"{limit:.3f}, {bound:g} of the baseline's" if limit else "–"
    if ours is None or limit is None:
        verdict = "not measured"
    else:
        verdict = "met" if ours <= limit else f"missed by {ours / limit - 1:.1%}"
    where = row.get("environment")
    build = f"{where['triton']}, {where['commit']}" if where else "–"
    now = "–" if ours is None else f"{ours:.3f}"
    beside = f"{baseline[0]:.3f} ({baseline[1]})" if baseline else "–"
    return f"| {goal.op} | {goal.shape} | {name} | {asked} | {now} | {beside} | {verdict} | {build} |"


def _memory(pairs: Iterable[dict]) -> str:
    # leave out causal attention, a baseline of slot-window attention that computes something else
    known = [row for row in pairs if row["peak_mb"] is not None and row["peak_mb_baseline"]]
    known = [row for row in known if row["peak_mb_baseline"][1] != "causal attention"]
    more = [row for row in known if row["peak_mb"] > row["peak_mb_baseline"][0] + _MEBIBYTE]
    lines = [f"Peak memory is at most the best baseline's at {len(known) - len(more)} of {len(known)} shapes."]
    if more:
        lines += ["", "| more than a baseline's | shape | MiB | baseline, MiB |", "|---|---|---|---|"]
    for row in more:
        peak, name = row["peak_mb_baseline"]
        lines.append(f"| {row['op']} | {row['shape']} | {row['peak_mb']:.0f} | {peak:.0f} ({name}) |")
    return "\n".join(lines)


def _sweep(rows: Sequence[dict]) -> str:
    pairs, late = result_tables.beside(rows), result_tables.slower(rows, BOUND)
    shapes = {(row["op"], row["shape"]) for row, _ in late}
    lines = [
        f"Shapes outside the tables ([plot](plots/sweep.png)) take at most {BOUND:g} times the best baseline's time at "
        f"{len(pairs) - len(shapes)} of {len(pairs)}."
    ]
    if late:
        lines += ["", "| slower than a baseline | shape | pass | ms | baseline, ms |", "|---|---|---|---|---|"]
    for row, key in late:
        time, name = row[f"{key}_baseline"]
        label = "forward" if key == "fwd_ms" else "both"
        lines.append(f"| {row['op']} | {row['shape']} | {label} | {row[key]:.3f} | {time:.3f} ({name}) |")
    return "\n".join(lines)
