"""Benchmarks of several implementations: interleaved median times, peak memory, CPU overhead, first-call seconds.

Each benchmark module has a function `rows(device)` that yields the rows made by `measure` and its variants. A row has
the keys `op, shape, impl, fwd_ms, fwdbwd_ms, peak_mb, host_us, first_call_s`. If a baseline fails (see `able`), the row
has the reason under `failed`, and None instead of times.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths

Run = Callable[[], object]
WITHOUT_GPU = "the benchmarks are meant for a GPU; without one they run small shapes, whose times say little"


def interleaved_medians(
    runs: Mapping[str, Run], device: str, *, repeats: int = 50, warmup: int = 3
) -> dict[str, float]:
    """Return the median milliseconds of each run; the runs take turns, so that clock drift affects all of them equally.

    CUDA runs are timed by events around each call, after the L2 cache is flushed; CPU runs by the host's clock.
    """
    for run in runs.values():
        for _ in range(warmup):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    if device == "cpu":
        for _ in range(repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - start) * 1e3)
        return {name: statistics.median(x) for name, x in times.items()}
    # cycles, each of about half a nanosecond, for which the device sleeps before a run: three times the CPU time to
    # enqueue the run, at least 1 ms and at most 20 ms
    host = {name: host_microseconds(run, device, repeats=3) or 0.0 for name, run in runs.items()}
    cycles = {name: int(2000 * min(max(1000.0, 3 * us), 20_000.0)) for name, us in host.items()}
    flush = torch.empty(256 << 20, dtype=torch.int8, device=device)
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for i in range(repeats):
        # rotate the order: a heavy run lowers the clocks for the run after it
        order = list(runs.items())[i % len(runs) :] + list(runs.items())[: i % len(runs)]
        for name, run in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            # let the device sleep while the host enqueues the run, so that gaps between launches are not timed
            torch.cuda._sleep(cycles[name])
            start.record()
            run()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
    for name, start, end in events:
        times[name].append(start.elapsed_time(end))
    return {name: statistics.median(x) for name, x in times.items()}


def captured(run: Run) -> Run:
    """Return a run that replays `run` as a CUDA graph, captured without gradients: it has no launch overhead."""
    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


def peak_megabytes(run: Run, device: str) -> float | None:
    """Return the peak device memory of a run in MiB, without memory allocated before it; None on a CPU."""
    if device == "cpu":
        return None
    run()
    torch.cuda.synchronize()
    # wait: autograd's thread may free the last graph shortly after it has returned the gradients
    time.sleep(0.2)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def host_microseconds(run: Run, device: str, *, repeats: int = 20) -> float | None:
    """Return the median CPU time, in µs, to enqueue a run; None on a CPU, where this would include the computation."""
    if device == "cpu":
        return None
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def first_call_seconds(setup: str, call: str) -> float:
    """Return the seconds that `call` takes in a new process with an empty compile cache, after the untimed `setup`."""
    code = f"{setup}\nimport time\nstart = time.perf_counter()\n{call}\nprint('seconds', time.perf_counter() - start)"
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ, TRITON_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the first call failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.rsplit("seconds", 1)[1])


def mixed_lengths(tokens: int) -> Tensor:
    """Return the lengths of 32 sequences, many short and a few long: at least 128 tokens each, `tokens` in total."""
    generator = torch.Generator().manual_seed(0)
    beyond = torch.rand(32, generator=generator) ** 3
    lengths = 128 + (beyond / beyond.sum() * (tokens - 32 * 128)).long()
    lengths[0] += tokens - lengths.sum()
    return lengths


def forward_backward(forward: Callable[[], Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> Run:
    """Return a run of forward and backward; it returns gradients instead of adding them to `.grad`."""
    return lambda: torch.autograd.grad(forward(), inputs, upstream)


def installed(path: str) -> Callable | None:
    """Return a function that imports and calls "module:name"; None if the module's top-level package is not installed.

    If an installed package cannot be imported, the call fails, so that a row reports this baseline as failed.
    """
    module, name = path.split(":")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return lambda *args, **options: getattr(importlib.import_module(module), name)(*args, **options)


def able(
    forwards: Mapping[str, Callable[[], Tensor]], inputs: Sequence[Tensor], alike: bool
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Return the first of `forwards` and those others that work at this shape; and, by name, why the rest fail.

    The first is our implementation, the others are baselines. If `alike`, a baseline's output must differ from ours by
    less than 5 %, because a kernel built for other sizes may be fast and wrong.
    """
    first, *baselines = forwards
    out, failed = {first: forwards[first]}, {}
    for name in baselines:
        try:
            o = forwards[name]()
            if inputs:
                torch.autograd.grad(o, inputs, torch.ones_like(o))
            if alike:
                ours = forwards[first]().detach().float()
                error = ((o.detach().float() - ours).norm() / ours.norm()).item()
                assert error < 0.05, f"its output differs from ours by {error:.2g}"
        # any error: compilers and libraries raise errors of many types for unsupported sizes
        except Exception as error:
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        else:
            out[name] = forwards[name]
    return out, failed


def row_of(op: str, shape: str, impl: str, **values: object) -> dict:
    """Return a row with the given values, and None for the other keys."""
    none = dict.fromkeys(("fwd_ms", "fwdbwd_ms", "peak_mb", "host_us", "first_call_s"))
    return {"op": op, "shape": shape, "impl": impl, **none, **values}


def measure(
    op: str,
    shape: str,
    device: str,
    forwards: Mapping[str, Callable[[], Tensor]],
    inputs: Sequence[Tensor],
    *,
    first_calls: Mapping[str, Callable[[], float]] | None = None,
    alike: bool = False,
    repeats: int = 50,
) -> list[dict]:
    """Return one row per implementation at one shape, with interleaved times of forward and of forward with backward.

    `forwards` maps an implementation's name to a function without arguments that returns the output; the first one is
    ours, the others are baselines. A baseline that fails, or if `alike` has an output that differs from ours by 5 % or
    more, has a row with the reason. Gradients are taken with respect to `inputs`. `first_calls` maps an
    implementation's name to a function that measures its first call in seconds. Times are medians of `repeats` calls.
    Rows also have the peak memory and the CPU time of forward with backward.
    """
    forwards, failed = able(forwards, inputs, alike)

    def without_grad(forward: Callable[[], Tensor]) -> Run:
        def run():
            with torch.no_grad():
                return forward()

        return run

    upstream = torch.randn_like(next(iter(forwards.values()))())
    forward_runs = {name: without_grad(f) for name, f in forwards.items()}
    training_runs = {name: forward_backward(f, inputs, upstream) for name, f in forwards.items()}
    forward_ms = interleaved_medians(forward_runs, device, repeats=repeats)
    training_ms = interleaved_medians(training_runs, device, repeats=repeats)
    return [
        {
            "op": op,
            "shape": shape,
            "impl": name,
            "fwd_ms": forward_ms[name],
            "fwdbwd_ms": training_ms[name],
            "peak_mb": peak_megabytes(training_runs[name], device),
            "host_us": host_microseconds(training_runs[name], device),
            "first_call_s": first_calls[name]() if first_calls and name in first_calls else None,
        }
        for name in forwards
    ] + [row_of(op, shape, name, failed=reason) for name, reason in failed.items()]


def measure_forward(
    op: str, shape: str, device: str, forwards: Mapping[str, Callable[[], Tensor]], *, graph: bool = False
) -> list[dict]:
    """Return one row per implementation at one shape for the forward without gradients.

    If `graph`, the forward is replayed as a CUDA graph. `forwards` is the same as for `measure`, but the functions may
    overwrite their state; a baseline whose output differs from ours by 5 % or more counts as failed.
    """
    with torch.no_grad():
        runs, failed = able(forwards, (), alike=True)
        timed: dict[str, Run] = {name: captured(run) if graph else run for name, run in runs.items()}
        times = interleaved_medians(timed, device)
    rows = [row_of(op, shape, name, fwd_ms=ms) for name, ms in times.items()]
    return rows + [row_of(op, shape, name, failed=reason) for name, reason in failed.items()]


def measure_forms(
    op: str, shape: str, device: str, forward: Callable[[str], Tensor], inputs: Sequence[Tensor]
) -> list[dict]:
    """Return one row for each of our implementations at one shape; `forward(impl)` computes an implementation's output.

    Names of implementations in the rows include the Triton version, so that one file can have rows of several versions.
    """
    names = {"gluon": "Gluon", "triton": "portable"} if device != "cpu" else {"reference": "reference"}
    forwards = {name: functools.partial(forward, impl) for impl, name in names.items()}
    rows = measure(op, shape, device, forwards, inputs, alike=True)
    if device == "cpu":
        return rows
    # the version of the module, which may differ from the metadata of the installed package
    from triton import __version__ as version

    return [{**row, "impl": f"{row['impl']}, Triton {version}"} for row in rows]


def document_boundaries(device: str, documents: int = 100, tokens: int = 152_497) -> Tensor:
    """Return `cu_seqlens` of packed documents with log-uniform lengths, by default of about 70 to 7,000 tokens each."""
    generator = torch.Generator().manual_seed(0)
    spread = (torch.rand(documents, generator=generator) * math.log(100)).exp()
    lengths = (spread / spread.sum() * tokens).long().clamp(min=1)
    lengths[int(lengths.argmax())] += tokens - int(lengths.sum())
    return cu_seqlens_from_lengths(lengths).to(device)


def measure_step(op: str, shape: str, device: str, forwards: Mapping[str, Callable[[], Tensor]]) -> list[dict]:
    """Return rows as `measure_forward` does, for a decoding step; on a GPU, each step is captured as a CUDA graph."""
    graph = device != "cpu"
    return measure_forward(op, f"{shape}, CUDA graph" if graph else shape, device, forwards, graph=graph)


def table(rows: Sequence[dict]) -> str:
    """Return rows as a text table for a terminal, one line per row; "–" stands for a missing key."""

    def cell(value: object) -> str:
        return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    # the columns are all keys that occur in any row
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys] + [[cell(row.get(key)) for key in keys] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)
