"""Command-line interface: `python -m arena COMMAND`; see `--help`."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arena.sizes import SIZES
from arena.workers import GRACE, Terminated

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"
# exit code if runs remain at the time limit (EX_TEMPFAIL of sysexits)
UNFINISHED = 75


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    The code is 0 on success, 1 if a run has failed, 75 if runs remain at the time limit and none has failed, 2 for an
    invalid request, a file error or a missing package, and 130 or 143 after SIGINT or SIGTERM.
    """
    start = time.time()
    # set before torch is imported: OpenMP's threads then sleep at barriers instead of spinning
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = _parser().parse_args(arguments)
    # stop jobs GRACE seconds before the time limit, at which they are killed: they then have time to write a
    # checkpoint
    deadline = math.inf if args.minutes is None else start + 60 * args.minutes - GRACE
    try:
        with _sigterm_raises():
            return _run(args, deadline)
    except (Terminated, KeyboardInterrupt) as stop:
        print("arena: stopped; the next call resumes", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except (ValueError, OSError, ImportError) as error:
        print(f"arena: {error}", file=sys.stderr)
        return 2


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def handle(number: int, frame: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _corpus(args: argparse.Namespace) -> int:
    """Build the corpus, pack it into parts, or unpack parts."""
    from arena import corpus, parts

    if args.unpack is not None:
        missing = parts.unpack(args.unpack, args.out)
        print(f"{len(missing)} parts are missing: {', '.join(missing)}" if missing else f"{args.out} is whole")
        return UNFINISHED if missing else 0
    manifest = corpus.build(args.out, args.packages)
    print(corpus.described(manifest))
    if args.pack is not None:
        names = [*manifest["sha256"], corpus.MANIFEST]
        print(f"{len(parts.pack(args.out, names, args.pack))} parts in {args.pack}")
    return 0


def _run(args: argparse.Namespace, deadline: float) -> int:
    if args.command == "corpus":
        return _corpus(args)
    from arena.comparison import Comparison
    from arena.corpus import DEFAULT_FOLDER, FOLDER

    if unknown := [name for name in args.size if name not in SIZES]:
        raise ValueError(f"there is no size {unknown[0]!r}; choose from {', '.join(SIZES)}")
    # an environment variable, because the processes that execute runs also need the folder
    os.environ[FOLDER] = str((args.corpus or Path(os.environ.get(FOLDER) or DEFAULT_FOLDER)).absolute())
    if args.device is not None:
        _choose_device(args.device)
    codes = []
    for name in args.size:
        comparison = Comparison(SIZES[name], args.results, args.divisions, args.contestants, args.tasks)
        codes.append(_compare(args, comparison, deadline))
    # the exit code is that of a failed run, if there is one, even if other runs remain
    return next((code for code in (1, UNFINISHED) if code in codes), 0)


def _choose_device(device: str) -> None:
    """For "cpu", hide the GPUs from all processes; for "cuda", raise a ValueError if there is no GPU."""
    import torch

    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU")


def _compare(args: argparse.Namespace, comparison: Any, deadline: float) -> int:
    """Run one command (plan, report, run, costs or all) for one size; return its exit code."""
    from arena import report, runner
    from arena.schedule import Schedule
    from tokenmix_core._utils.versions import commit_of

    if args.command == "plan":
        print(report.plan(comparison))
        print(f"\n{Schedule(comparison).plan(len(args.gpus or ()) or 1)}")
        return 0
    if args.command == "report":
        print(report.write(comparison))
        return 0
    if (commit := args.commit or commit_of(Path(__file__))) is None:
        raise ValueError("this folder is not a git checkout; name the commit of the code with --commit")
    gpus, summaries = args.gpus or (), []
    if args.command in ("run", "all"):
        jobs = args.jobs or len(gpus) or 1
        options = {"commit": commit, "deadline": deadline, "jobs": jobs, "gpus": gpus, "whole": args.whole}
        summaries.append(runner.run(comparison, args.work, **options))
    if args.command in ("costs", "all"):
        summaries.append(runner.measure(comparison, commit=commit, deadline=deadline, gpus=gpus))
    if args.command == "all":
        print(report.write(comparison))
    if failed := sum(len(summary.failed) for summary in summaries):
        print(f"arena: {failed} failed, see the errors above; the next call tries again", file=sys.stderr)
        return 1
    if all(summary.done for summary in summaries):
        return 0
    print("arena: runs remain; the next call resumes", file=sys.stderr)
    return UNFINISHED


def _names(text: str) -> tuple[str, ...]:
    # drop duplicates, keep the order
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m arena", description="Compare all mixers under one rule.")
    parser.add_argument(
        "command",
        choices=("plan", "run", "costs", "report", "all", "corpus"),
        help="plan: list the models, the remaining runs and their expected hours; run: train and evaluate; costs: "
        "measure speed and memory on an otherwise idle GPU; report: write tables and plots of the stored results; all: "
        "run, costs and report; corpus: build "
        "the corpus of the text sizes from Debian packages, or carry it to another machine in parts",
    )
    parser.add_argument(
        "--size",
        type=_names,
        default=("smoke",),
        metavar="A,B",
        help=f"one or several, in order: {', '.join(SIZES)} (default: smoke)",
    )
    parser.add_argument(
        "--divisions", type=_names, metavar="A,B", default=(), help="parameters, state (default: those of the size)"
    )
    parser.add_argument(
        "--contestants", type=_names, metavar="A,B", default=(), help="names (default: those of the size)"
    )
    parser.add_argument("--tasks", type=_names, metavar="A,B", default=(), help="names (default: those of the size)")
    parser.add_argument("--minutes", type=float, metavar="M", help="time limit of this call; the next one resumes")
    parser.add_argument("--jobs", type=int, metavar="N", help="number of concurrent runs (default: one per named GPU)")
    parser.add_argument(
        "--whole", action="store_true", help="start only runs that are expected to end within the minutes"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda: fail without a GPU (default: a GPU if there is one)"
    )
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="corpus of the text sizes (default: runs/corpus)")
    parser.add_argument("--gpus", type=_names, metavar="0,1", help="GPUs to use (default: all visible)")
    parser.add_argument("--commit", metavar="C", help="commit of the code, if this folder is not a git checkout")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="folder of results (default: arena/results)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/arena"), metavar="DIR", help="unfinished runs (default: runs/arena)"
    )
    corpus = parser.add_argument_group("corpus")
    corpus.add_argument(
        "--out", type=Path, default=Path("runs/corpus"), metavar="DIR", help="the corpus (default: runs/corpus)"
    )
    corpus.add_argument(
        "--packages", type=Path, metavar="DIR", help="folder of .deb files (default: download them with apt-get)"
    )
    corpus.add_argument("--pack", type=Path, metavar="DIR", help="write the corpus as parts of at most 60 MiB, too")
    corpus.add_argument("--unpack", type=Path, metavar="DIR", help="add the parts in a folder to the corpus instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
