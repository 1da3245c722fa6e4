"""The command: `python -m arena COMMAND`; see `--help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0; 75 where time was up before all was done; 1 where a piece failed; 2 for what was asked for and cannot be.
    """
    # before torch is loaded: OpenMP's threads sleep at barriers instead of spinning
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"arena: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from arena import report, runner, store
    from arena.pieces import Comparison
    from arena.sizes import SIZES

    if args.size not in SIZES:
        raise ValueError(f"there is no size {args.size!r}; choose from {', '.join(SIZES)}")
    comparison = Comparison(SIZES[args.size], args.results, args.divisions, args.contestants, args.tasks)
    if args.command == "plan":
        print(report.plan(comparison))
        return 0
    if args.command == "report":
        print(report.write(comparison))
        return 0
    if args.command == "convert":
        print(f"{store.convert(comparison.folder)} results moved to {comparison.folder / store.RUNS}")
        return 0
    commit = args.commit or _commit()
    deadline = float("inf") if args.minutes is None else time.time() + 60 * args.minutes
    gpus, ended = args.gpus or (), []
    if args.command in ("run", "all"):
        ended.append(runner.run(comparison, args.work, commit=commit, deadline=deadline, jobs=args.jobs, gpus=gpus))
    if args.command in ("costs", "all"):
        ended.append(runner.measure(comparison, commit=commit, deadline=deadline, gpus=gpus))
    if args.command == "all":
        print(report.write(comparison))
    if failed := sum(len(each.failed) for each in ended):
        print(f"arena: {failed} failed; what was said of each is above, and the next call tries again", file=sys.stderr)
        return 1
    return 0 if all(each.done for each in ended) else 75


def _commit() -> str:
    """The commit of this checkout.

    Raises:
        ValueError: it is no checkout, so that the commit has to be named.
    """
    call = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise ValueError("this folder is no checkout of git; name the commit of the code by --commit")
    changed = subprocess.run(
        [*call[:3], "status", "--porcelain", "--untracked-files=no"], capture_output=True, check=False
    )
    return f"{found}, changed" if changed.stdout.strip() else found


def _names(text: str) -> tuple[str, ...]:
    # each once
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m arena", description="Every mixer under one rule; see README.md.")
    parser.add_argument(
        "command",
        choices=("plan", "run", "costs", "report", "all", "convert"),
        help="plan: the models and what is left to run; run: train and measure; costs: speed and memory, alone on a "
        "GPU; report: tables and pictures of what is there; all: run, costs and report; "
        "convert: move results of the old form, one JSON file per run, to runs.jsonl",
    )
    parser.add_argument("--size", default="smoke", help="smoke, compact, small or medium (default: smoke)")
    parser.add_argument(
        "--divisions", type=_names, metavar="A,B", default=(), help="parameters, state (default: the size's)"
    )
    parser.add_argument("--contestants", type=_names, metavar="A,B", default=(), help="by name (default: the size's)")
    parser.add_argument("--tasks", type=_names, metavar="A,B", default=(), help="by name (default: the size's)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so many, and go on in the next call")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pieces side by side (default: 1)")
    parser.add_argument("--gpus", type=_names, metavar="0,1", help="GPUs to spread them over (default: all visible)")
    parser.add_argument("--commit", metavar="C", help="of the code, where git cannot say it")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="default: arena/results")
    parser.add_argument("--work", type=Path, default=Path("runs/arena"), metavar="DIR", help="default: runs/arena")
    return parser


if __name__ == "__main__":
    sys.exit(main())
