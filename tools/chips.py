"""Compile the portable kernels of all packages for other chips, without a GPU: `chips.py [--quick] [CHIP ...]`.

docs/chips.json holds, for each chip, how often each kernel was compiled, and its most shared memory and spilled bytes.
A kernel that fails, or that spills more than the file says, is an error; `--write` writes the file. `--quick` compiles
six calls, each for one chip.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from tokenmix_core.testing.compilation import CHIPS, compile_calls, compiled_by

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "chips.json"
PACKAGES = ("core", "lte", "nats_l", "nha")
B, T, HQ, H = 2, 2048, 8, 2
# calls that a process compiles if there are several processes
CALLS_PER_JOB = 4
# the calls of `--quick`, each with the chip that it is compiled for
QUICK = {
    "window and sinks, heads of 16, float16": "sm_89",
    "gated delta rule, heads of 64, float16": "gfx942",
    "SSD, heads of 16, float16": "sm_80",
    "decoding, heads of 256, float32": "sm_86",
    "core: norms": "sm_100",
    "lte: sum of branches": "sm_120",
}
# calls whose smallest tiles need more shared memory than some chips have; they raise a ValueError with the workaround
REFUSED = {"gated delta rule, heads of 256, float32", "lte: scorer in torch.float32"}


def both(op: Callable, *leaves: torch.Tensor, **options: object) -> None:
    """Run a forward and a backward pass over uninitialised tensors; only shapes and dtypes matter."""
    leaves = tuple(x.requires_grad_() for x in leaves)
    made = op(*leaves, impl="triton", **options)
    outputs = [made] if isinstance(made, torch.Tensor) else [y for y in made if isinstance(y, torch.Tensor)]
    torch.autograd.grad(outputs, leaves, [torch.empty_like(y) for y in outputs])


def window(K: int, dtype: torch.dtype) -> None:
    from tokenmix_core.ops import attention

    both(attention, *(torch.empty(B, T, h, K, dtype=dtype) for h in (HQ, H, H)), window=256, sinks=4)


def retained(K: int, dtype: torch.dtype, unit: int) -> None:
    from tokenmix_core.ops import kept_attention

    q, k, v = (torch.empty(B, T, h, K, dtype=dtype) for h in (HQ, H, H))
    both(partial(kept_attention, unit=unit, window=768), q, k, v, torch.empty(B, T // unit, H))


def decoding(K: int, dtype: torch.dtype) -> None:
    from tokenmix_core.ops import attention_decode

    cache = torch.empty(B, T, H, K, dtype=dtype)
    seen = torch.zeros(B, dtype=torch.int32)
    attention_decode(torch.empty(B, 1, HQ, K, dtype=dtype), cache, cache, seen, impl="triton")


def scan(op: str, gates: int, K: int, dtype: torch.dtype) -> None:
    from tokenmix_core import ops

    x = (torch.empty(B, T, h, K, dtype=dtype) for h in (H, H, HQ))
    both(getattr(ops, op), *x, *(torch.empty(B, T, HQ) for _ in range(gates)))


def slots(K: int, dtype: torch.dtype) -> None:
    from tokenmix_nha.ops import slot_window_attention

    x = (torch.empty(B, T, h, K, dtype=dtype) for h in (HQ, H, H))
    both(partial(slot_window_attention, window=64), *x, torch.empty(B, T, H, 32))


def selected(K: int, dtype: torch.dtype) -> None:
    from tokenmix_oryx.ops import selected_attention

    chosen = torch.zeros(B, T, dtype=torch.bool)
    both(partial(selected_attention, selected=chosen), *(torch.empty(B, T, h, K, dtype=dtype) for h in (HQ, H, H)))


def mixed(K: int, dtype: torch.dtype, delta: bool) -> None:
    from tokenmix_core.nn.rotary import RotaryEmbedding
    from tokenmix_oryx.ops import MixOptions, mix

    E, heads = HQ * K, partial(torch.empty, HQ)
    options = MixOptions(HQ, delta, delta, delta, not delta, not delta, 1, 1e-6)
    rotation = RotaryEmbedding(K, {"rope_theta": 1e4})(torch.arange(T)[None])
    x = {
        "rows": (B * T, E),
        "shared": (B, T, 3 * E + 2 * HQ),
        "k_weight": (E, 4),
        "v_weight": (E, 4),
        "norm_weight": (E,),
    }
    given = {name: torch.empty(shape, dtype=dtype).requires_grad_() for name, shape in x.items()}
    given |= {"A_log": heads(), "dt_bias": heads(), "D": None if delta else heads()}
    y = mix(**given, attends=torch.zeros(B, T, dtype=torch.bool), rotation=rotation, options=options, impl="triton")
    torch.autograd.grad(y, [given[name] for name in x], torch.empty_like(y))


# kinds of calls: a function of head size and dtype, and the head sizes to compile, which are those of tiles: heads of
# 96 and 192 are padded to 128 and 256
SIZES = (16, 64, 128, 256)
KINDS: dict[str, tuple[Callable[[int, torch.dtype], None], tuple[int, ...]]] = {
    "window and sinks": (window, SIZES),
    "retained keys": (partial(retained, unit=1), SIZES),
    "retained blocks": (partial(retained, unit=64), SIZES),
    "decoding": (decoding, SIZES),
    "gated delta rule": (partial(scan, "chunk_gated_delta_rule", 2), (64, 128, 256)),
    "SSD": (partial(scan, "chunk_ssd", 1), SIZES),
    "slots": (slots, (64, 128)),
    "selected queries": (selected, (64, 128)),
    "mixed modes with SSD": (partial(mixed, delta=False), (64, 128)),
    "mixed modes with the delta rule": (partial(mixed, delta=True), (64, 128)),
}


def calls() -> dict[str, Callable[[], object]]:
    """Return all calls by name: those of the packages' tests, then each kind by head size and dtype."""
    found: dict[str, Callable[[], object]] = {}
    for package in PACKAGES:
        path = ROOT / "packages" / package / "tests/ops/test_portable_compiles.py"
        spec = importlib.util.spec_from_file_location(f"portable_{package}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {f"{package}: {name}": call for name, call in module.CALLS.items()}
    # with tensors on a CPU, attention does not accept bfloat16
    for dtype in (torch.float16, torch.float32):
        for kind, (call, sizes) in KINDS.items():
            for K in sizes:
                found[f"{kind}, heads of {K}, {str(dtype).removeprefix('torch.')}"] = partial(call, K, dtype)
    return found


def faults(chip: str, kernels: list[dict], bounds: dict[str, dict]) -> Iterator[str]:
    """Yield a message for each kernel that did not compile, needs too much shared memory or spills above its bound."""
    for x in kernels:
        refused = x["call"] in REFUSED and "ValueError" in (x["error"] or "") and "impl='reference'" in x["error"]
        if x["error"] and not refused:
            yield f"{chip}: {x['kernel']} ({x['call']}): {x['error']}"
        elif not x["error"] and x["shared"] > CHIPS[chip]:
            yield f"{chip}: {x['kernel']} ({x['call']}) needs {x['shared']:,} bytes, a block has {CHIPS[chip]:,}"
        elif x["kernel"] in bounds and x["spilled"] > (most := bounds[x["kernel"]]["spilled"]):
            yield f"{chip}: {x['kernel']} ({x['call']}) spills {x['spilled']:,} bytes, at most {most:,} before"


def summary(kernels: list[dict]) -> dict[str, dict]:
    """Return how often each kernel was compiled and refused, and its most shared memory and spilled bytes."""
    found: dict[str, dict] = {}
    for x in kernels:
        row = found.setdefault(x["kernel"], {"compiled": 0, "refused": 0, "shared": 0, "spilled": 0})
        row["refused" if x["error"] else "compiled"] += 1
        row["shared"], row["spilled"] = max(row["shared"], x["shared"]), max(row["spilled"], x["spilled"])
    return found


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="*", help=f"among {', '.join(CHIPS)}; all by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="keep the results, and skip calls that have some")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further call after this time")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compile in N processes at a time")
    parser.add_argument("--calls", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.calls:
        packages = (f"tokenmix_{x}.ops" for x in (*PACKAGES, "oryx"))
        chosen = {x: call for x, call in calls().items() if x in given.calls}
        on = QUICK if given.quick else None
        compile_calls(chosen, *packages, portable=True, chips=on, seconds=given.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        folder = given.resume or Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return report(quick() if given.quick else swept(given.chips or CHIPS, folder, given.seconds, given.jobs), given)


def report(measured: Iterable[tuple[str, list[dict], int]], given: argparse.Namespace) -> int:
    """Print one line for each chip and fault, write the file if asked to, and return the exit code."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    wrong: list[str] = []
    for chip, kernels, missing in measured:
        found = summary(kernels)
        wrong += faults(chip, kernels, found if given.write else known.get(chip, {}))
        wrong += [f"{chip}: {missing} calls are not yet compiled"] * bool(missing)
        unknown = len(found.keys() - known.get(chip, {}).keys())
        compiled = sum(x["compiled"] for x in found.values())
        print(f"{chip}: {compiled} of {len(kernels)} kernels compiled, {unknown} without a bound of spills", flush=True)
        if given.write:
            known[chip] = known.get(chip, {}) | found if given.quick else found
            FILE.write_text(json.dumps(dict(sorted(known.items())), indent=1, sort_keys=True) + "\n")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


def quick() -> Iterator[tuple[str, list[dict], int]]:
    """Yield each chip of `QUICK`, its compiled kernels, and 0; one process compiles for all chips of a vendor."""
    for chips in ([x for x in CHIPS if x.startswith(maker)] for maker in ("sm", "gfx")):
        names = [name for name, on in QUICK.items() if on in chips]
        kernels = compiled_by(__file__, "--quick", "--calls", *names, chip=chips[0])
        for chip in chips:
            if found := [x for x in kernels if QUICK[x["call"]] == chip]:
                yield chip, found, 0


def swept(chips: Iterable[str], folder: Path, seconds: float, jobs: int) -> Iterator[tuple[str, list[dict], int]]:
    """Yield each chip, its compiled kernels (those in the folder's logs too), and the number of missing calls."""
    end, names = time.monotonic() + seconds, [*calls()]
    with ThreadPoolExecutor(jobs) as pool:
        started: dict[str, list[Future]] = {}
        for chip in chips:
            found = results(folder, chip)
            missing = [x for x in names if x not in found]
            parts = [missing[i : i + CALLS_PER_JOB] for i in range(0, len(missing), CALLS_PER_JOB)]
            parts = parts if jobs > 1 else [missing] * bool(missing)
            started[chip] = [pool.submit(compiled, part, chip, folder, end) for part in parts]
        for chip, running in started.items():
            for job in running:
                job.result()
            found = results(folder, chip)
            yield chip, [x for kernels in found.values() for x in kernels], len(names) - len(found)


def compiled(names: list[str], chip: str, folder: Path, end: float) -> None:
    """Compile the kernels of calls in a separate process, which begins no call after `end`; append results to a log."""
    if (left := end - time.monotonic()) > 0:
        log = folder / f"{chip}.{sha256(names[0].encode()).hexdigest()[:8]}.jsonl"
        compiled_by(__file__, "--seconds", str(left), "--calls", *names, every=True, chip=chip, log=log)


def results(folder: Path, chip: str) -> dict[str, list[dict]]:
    """Return the kernels of each call from the logs of a chip."""
    found: dict[str, list[dict]] = {}
    for file in sorted(folder.glob(f"{chip}.*jsonl")):
        for line in file.read_text().splitlines():
            x = json.loads(line)
            found.setdefault(x["call"], []).extend([x] if x["kernel"] else [])
    return found


if __name__ == "__main__":
    sys.exit(main())
