"""Measure tokens/s of a recipe on one GPU, and by DDP and FSDP2 on several, each in processes of its own.

    python packages/core/benchmarks/fsdp.py --ranks 1 2 4 --recipe gated_delta_net-380m

Prints one JSON line as soon as a run ends: the mean tokens/s of the second half of its steps, the ratio of that to
`ranks` × one GPU's tokens/s, and the seconds until the first step (the first run compiles kernels) and in all. A run's
processes are killed after `--steps` steps, so that none writes a checkpoint, or after `--limit` seconds; the line then
has the rate of the steps until then. Kernels are compiled once: later runs find them in Triton's cache. All processes
are forked from one that has imported everything and has not touched CUDA; with `--start spawn` each one imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

FSDP = ["--fsdp", "true", "--fsdp_reshard"]
WAYS = {
    "DDP": [],
    "FSDP2, kept": [*FSDP, "never"],
    "FSDP2, resharded": [*FSDP, "always"],
    "FSDP2, kept, units of one layer": [*FSDP, "never", "--fsdp_unit_layers", "1"],
    "FSDP2, resharded, units of one layer": [*FSDP, "always", "--fsdp_unit_layers", "1"],
}


IMPORTS = ["tokenmix_core.cli.commands", "tokenmix_core.training.trainer", "tokenmix_core.modeling.causal_lm"]


def work(environment: dict[str, str], said: Path, arguments: list[str]) -> None:
    """Run the command line in this process, which leads a group of its own and writes to the file `said`."""
    os.setpgrp()
    multiprocessing.set_start_method("fork", force=True)
    with said.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    from tokenmix_core.cli.app import main as command_line

    command_line(arguments)


def logged(out: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's log."""
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"] if path.exists() else []


def train(ranks: int, flags: list[str], steps: int, limit: float, context: Any) -> dict[str, Any]:
    """Return the tokens/s of a run and its seconds, or the reason why there are none."""
    begun, first = time.monotonic(), None
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        world |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        out, said = Path(folder, "run"), Path(folder, "said")
        children = []
        for rank in range(ranks):
            own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            child = context.Process(target=work, args=(own, said, ["train", *flags, "--out", str(out)]))
            child.start()
            children.append(child)
        lines: list[dict[str, Any]] = []
        while len(lines) < steps and time.monotonic() - begun < limit and all(c.is_alive() for c in children):
            time.sleep(0.1)
            lines = [line for line in logged(out) if "loss" in line]
            first = first or (time.monotonic() - begun if lines else None)
        for child in children:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                child.kill()
            child.join()
        rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        row = {"tokens_per_second": round(harmonic_mean(rates[len(rates) // 2 :])) if rates else None}
        row |= {"loss": lines[-1]["loss"] if lines else None, "first_step": first and round(first, 1)}
        row |= {"seconds": round(time.monotonic() - begun, 1)}
        text = said.read_text(errors="replace") if said.exists() else ""
        missing = f"{len(lines)} of {steps} steps: {text[-500:]}"
        return row if len(lines) >= steps else {**row, "incomplete": missing}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="gated_delta_net-380m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:3])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=262144)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--limit", type=float, default=120, help="seconds of one run")
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    args = parser.parse_args()
    sizes = {
        "sources": "stdlib",
        "tokenizer": "bytes",
        "batch_tokens": args.batch_tokens,
        "micro_batch_tokens": args.micro_batch_tokens,
        # the processes are killed before the end, where they would write a checkpoint
        "total_tokens": 10 * args.steps * args.batch_tokens,
        "warmup_tokens": args.batch_tokens,
        "logging_steps": 1,
        "save_steps": 10**6,
    }
    # otherwise a test whether CUDA is available would initialise its driver, which a fork does not survive
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    context = multiprocessing.get_context("forkserver" if args.start == "fork" else "spawn")
    context.set_forkserver_preload(IMPORTS)
    flags = [args.recipe, "--no-eval", *(word for name, x in sizes.items() for word in (f"--{name}", str(x)))]
    alone = None
    for ranks in args.ranks:
        for way in args.ways if ranks > 1 else ["DDP"]:
            row = train(ranks, [*flags, *WAYS[way]], args.steps, args.limit, context)
            rate = row["tokens_per_second"]
            alone = rate if ranks == 1 else alone
            share = round(rate / (ranks * alone), 3) if rate and alone else None
            print(json.dumps({"ranks": ranks, "way": way, "of_alone": share, **row}), flush=True)


if __name__ == "__main__":
    main()
