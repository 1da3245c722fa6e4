"""Measure the seconds of ten training steps on two cores, alone and with other processes that keep these cores busy.

`python shared_cores.py` runs `tokenmix train tiny` as users do, with OpenMP's threads asleep at barriers
(`OMP_WAIT_POLICY=PASSIVE`, which the commands set), and `--active` with threads that spin there. A median beside two
busy processes should be at most 1.6 times the median alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

STEPS, STEP_TOKENS = 10, 2048
BUSY = [sys.executable, "-c", "while True: pass"]


def train_seconds(environment: dict[str, str]) -> float:
    """Run ten steps of the recipe `tiny`, and return the seconds that these take."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tokenmix_core.cli", "train", "tiny", "--no-eval", "--out", f"{folder}/run"]
        fields = ["--total_tokens", str((1 + STEPS) * STEP_TOKENS), "--warmup_tokens", "0", "--logging_steps", "1"]
        subprocess.run([*command, *fields], env=environment, capture_output=True, check=True)
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
    # the first step, which allocates and compiles, has no speed
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    assert len(speeds) == STEPS, f"expected {STEPS} logged steps, got {len(speeds)}"
    return sum(STEP_TOKENS / speed for speed in speeds)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the seconds."""
    parser = argparse.ArgumentParser(description="measure training beside busy processes")
    parser.add_argument("--active", action="store_true", help="let threads spin at barriers")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median counts")
    given = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"OMP_WAIT_POLICY": "ACTIVE" if given.active else "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    train_seconds(environment)
    alone = 0.0
    for count in range(3):
        with ExitStack() as stack:
            for _ in range(count):
                process = stack.enter_context(subprocess.Popen(BUSY))
                stack.callback(process.kill)
            seconds = statistics.median(train_seconds(environment) for _ in range(given.repeats))
        alone = alone or seconds
        print(f"beside {count} busy processes: {seconds:.2f} s, {seconds / alone:.2f} times alone", flush=True)


if __name__ == "__main__":
    main()
