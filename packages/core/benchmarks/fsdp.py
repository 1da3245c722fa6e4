"""Tokens/s of a recipe on one GPU, and by DDP and FSDP2 on several, each in processes of its own.

    python packages/core/benchmarks/fsdp.py --ranks 1 2 4 --recipe gated_delta_net-380m

Prints one JSON line for each run: the mean tokens/s of the steps after the first third, and its share of `ranks` times
that of one GPU. A run that exceeds `--limit` seconds is ended with all processes of its session, and its line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import harmonic_mean

WAYS = {
    "DDP": [],
    "FSDP2, kept": ["--fsdp", "true", "--fsdp_reshard", "never"],
    "FSDP2, resharded": ["--fsdp", "true", "--fsdp_reshard", "always"],
}


def train(ranks: int, flags: list[str], limit: float) -> tuple[float | None, str]:
    """Return the tokens/s of a run, or None and why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launcher, "-m", "tokenmix_core.cli", "train", *flags, "--out", str(out)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            said, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
            return None, f"not done after {limit:g} s: {said.decode()[-500:]}"
        if child.returncode:
            return None, said.decode()[-500:]
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        return harmonic_mean(rates[len(rates) // 3 :]), ""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="gated_delta_net-380m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-tokens", type=int, default=262144)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--limit", type=float, default=180, help="seconds of one run")
    args = parser.parse_args()
    sizes = {
        "sources": "stdlib",
        "tokenizer": "bytes",
        "batch_tokens": args.batch_tokens,
        "micro_batch_tokens": args.micro_batch_tokens,
        "total_tokens": args.steps * args.batch_tokens,
        "warmup_tokens": args.batch_tokens,
        "logging_steps": 1,
        "save_steps": 10**6,
    }
    flags = [args.recipe, "--no-eval", *(word for name, x in sizes.items() for word in (f"--{name}", str(x)))]
    alone = None
    for ranks in args.ranks:
        for way in WAYS if ranks > 1 else ["DDP"]:
            rate, why = train(ranks, [*flags, *WAYS[way]], args.limit)
            alone = rate if ranks == 1 else alone
            share = round(rate / (ranks * alone), 3) if rate and alone else None
            row = {"ranks": ranks, "way": way, "tokens_per_second": rate and round(rate), "of_alone": share}
            print(json.dumps(row | ({"failed": why} if why else {})), flush=True)


if __name__ == "__main__":
    main()
