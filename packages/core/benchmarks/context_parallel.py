"""Time one sequence that is split over all GPUs of a host, and the same on one GPU.

    torchrun --nproc-per-node 2 packages/core/benchmarks/context_parallel.py operation --tokens 262144
    torchrun --nproc-per-node 2 packages/core/benchmarks/context_parallel.py model --tokens 131072

"operation" times the gated delta rule (16 heads of 128, which it normalises, as in models), SSD and attention, forward
and backward. "model" times a step of a 380M hybrid, three layers of the gated delta rule and one of attention in turn;
`--window` limits attention to a window, and `--checkpointing` recomputes layers in the backward pass. Parameters are in
float32 under autocast or, with `--bfloat16`, in bfloat16 as under FSDP2. Rank 0 prints one JSON line for each
measurement: the slowest rank's median milliseconds, and its own CPU time until all kernels are launched, peak memory
and bytes sent, by operation. `--alone` measures one GPU, with the other ranks idle.

Before it is timed, each operation, and a model of one layer of each kind, runs once: rank 0 prints the seconds and the
number of kernels that this compiled. With `--compile-only` nothing is timed. Two such calls, with `--only
gated_delta_net` and `--only attention`, can run at once, and leave their kernels in Triton's cache on the disk.

`--fla N` also times FLA's gated delta rule with its `cp_context`; each of FLA's kernels then autotunes over N of its
configurations only. FLA 0.6 on Hopper needs Triton 3.7.1.

A measurement that exceeds `--limit` seconds ends its process with the stack of each thread, and so does an error: NCCL
waits for the other ranks otherwise, also when the interpreter ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tokenmix_core import parallel
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.parallel import SequenceShard, overlap

KINDS = ["gated_delta_net", "attention"]


def operations(
    tokens: int, heads: int, size: int, device: torch.device, dtype: torch.dtype, fla: Callable | None = None
) -> dict[str, Callable]:
    """Return forward and backward passes by name, of this many tokens on this rank; `fla` is FLA's gated delta rule."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=device, dtype=dtype)

    q, k, v = (random(heads, size).requires_grad_() for _ in range(3))
    g = (-0.05 * torch.rand(1, tokens, heads, device=device)).requires_grad_()
    beta = torch.rand(1, tokens, heads, device=device).requires_grad_()
    few = [random(max(1, heads // 4), size).requires_grad_() for _ in range(2)]
    do = random(heads, size)
    normal = F.normalize(k, dim=-1).detach().requires_grad_()
    found = {
        "gated delta rule": lambda: parallel.chunk_gated_delta_rule(q, k, v, g, beta, qk_l2norm=True).o,
        "ssd": lambda: parallel.chunk_ssd(q, normal, v, g, dt=beta).o,
        "attention": lambda: parallel.attention(q, *few).o,
        "window": lambda: parallel.attention(q, *few, window=2048).o,
    }
    if fla is not None:
        found["gated delta rule, FLA"] = lambda: fla(q, k, v, g, beta)[0]

    def both(run: Callable) -> None:
        for x in (q, k, v, g, beta, normal, *few):
            # gradients that are added to those of the call before would be timed, too
            x.grad = None
        run().backward(do)

    return {name: functools.partial(both, run) for name, run in found.items()}


def fla_rule(configurations: int, tokens: int, device: torch.device, alone: bool) -> Callable:
    """Return FLA's gated delta rule on rows of so many tokens, split over all ranks unless `alone`."""
    from triton.runtime.autotuner import Autotuner

    create = Autotuner.__init__

    def limited(self: Any, fn: Any, arg_names: list[str], configs: list[Any], *args: Any, **options: Any) -> None:
        def unusual(config: Any) -> tuple[int, ...]:
            tile = math.prod(x for x in config.kwargs.values() if type(x) is int)
            # two stages fit into shared memory with the largest tiles
            return abs(config.num_stages - 2), -tile, abs(config.num_warps - 4)

        ordered = sorted(configs, key=unusual)
        create(self, fn, arg_names, ordered[:configurations], *args, **options)

    Autotuner.__init__ = limited
    from fla.ops.cp import build_cp_context  # type: ignore[import-not-found]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

    rule = functools.partial(chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True)
    if alone:
        return rule
    boundaries = torch.tensor([0, tokens])
    context = build_cp_context(boundaries.to(device), dist.group.WORLD, cu_seqlens_cpu=boundaries)
    return functools.partial(rule, cp_context=context)


def step_of(args: argparse.Namespace, device: torch.device, mixers: list[str], layers: int) -> Callable[[], None]:
    """Return a forward and backward pass of a model with these mixers."""
    torch.manual_seed(0)
    heads = {"num_heads": 16, "num_kv_heads": 4} if args.hidden >= 1024 else {"num_heads": 2}
    options = {
        "gated_delta_net": {"num_heads": args.hidden // 128, "head_dim": 128, "expand_v": 1.0},
        "attention": heads | {"window": args.window},
    }
    config = HybridConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=layers,
        mixers=mixers,
        mixer_options={name: options[name] for name in dict.fromkeys(mixers)},
    )
    model = HybridForCausalLM(config).to(device, torch.bfloat16 if args.bfloat16 else torch.float32).train()
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(32000, (1, args.tokens), device=device)
    bf16 = torch.autocast(device.type, dtype=torch.bfloat16, enabled=not args.bfloat16)

    def step() -> None:
        model.zero_grad()
        with bf16:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()

    return step


def called(run: Callable, shard: SequenceShard | None, device: torch.device, calls: int = 1) -> tuple[float, float]:
    """Return this rank's milliseconds of so many calls, and those until the CPU has launched them.

    All ranks begin together.
    """
    if shard is not None:
        shard.traffic.clear()
        dist.barrier(shard.group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    with parallel.sequence_shard(shard):
        for _ in range(calls):
            run()
    launched = time.perf_counter() - begin
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin), 1000 * launched


def compiled(name: str, run: Callable, shard: SequenceShard | None, device: torch.device) -> dict[str, Any]:
    """Call once; return the seconds, and how many kernels were compiled and how many read from Triton's cache."""
    counts = {"compiled": 0, "cached": 0}
    if device.type == "cuda":
        from triton import knobs

        def listen(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
            counts["cached" if cache_hit else "compiled"] += 1
            if not cache_hit and dist.get_rank() == 0:
                print(f"{name}: compiled {metadata.get('name')}", file=sys.stderr, flush=True)

        knobs.compilation.listener = listen
    return {"what": name, "first_call_seconds": round(called(run, shard, device)[0] / 1000, 1), **counts}


def timed(run: Callable, shard: SequenceShard | None, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the slowest rank's median milliseconds of a call, and this rank's CPU time, peak memory and bytes sent."""
    cuda = device.type == "cuda"
    # the CPU runs ahead of the GPU within a training step, so several calls are timed together
    calls = args.calls if args.what == "operation" else 1
    times = [called(run, shard, device, calls) for _ in range(args.warmups + args.repeats)][args.warmups :]
    middle, launched = (torch.tensor(median(x) / calls, device=device) for x in zip(*times, strict=True))
    sent: Counter[str] = Counter()
    if shard is not None:
        dist.all_reduce(middle, dist.ReduceOp.MAX, group=shard.group)
        for (_, name), count in shard.traffic.items():
            sent[name] += count // calls
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    row = {"milliseconds": round(middle.item(), 2), "cpu_milliseconds": round(launched.item(), 2)}
    return row | {"peak_gib": peak and round(peak, 2), "sent_bytes": dict(sent)}


def main() -> None:
    """Measure, and end together with the other ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["operation", "model"])
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], help="by default the one that balances the work")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--window", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--bfloat16", action="store_true", help="bfloat16 parameters of the model, without autocast")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--calls", type=int, default=5, help="calls of an operation that are timed together")
    parser.add_argument("--only", nargs="+", help="operations by their names, or kinds of layers to compile")
    parser.add_argument("--no-groups", action="store_true", help="exchange all heads before computing any")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--fla", type=int, metavar="N", help="FLA's rule as well, with N configurations per kernel")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one measurement")
    args = parser.parse_args()
    overlap.MAX_GROUPS = 1 if args.no_groups else overlap.MAX_GROUPS
    try:
        measure(args)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    # idle ranks wait here until all measurements are done
    faulthandler.dump_traceback_later(args.limit * (5 if args.alone else 1), exit=True)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def measure(args: argparse.Namespace) -> None:
    """Measure on this rank; rank 0 prints."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = 1 if args.alone else dist.get_world_size()
    if args.alone and rank:
        return

    def shown(row: dict[str, Any], layout: str) -> None:
        if rank == 0:
            print(json.dumps(row | {"tokens": args.tokens, "ranks": ranks, "layout": layout}), flush=True)

    def measured(name: str, run: Callable, balanced: str, *, time_it: bool) -> None:
        layout = args.layout or balanced
        shard = None if args.alone else SequenceShard(args.tokens, layout=layout)
        if rank == 0:
            print(f"{name}: first call", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(args.limit, exit=True)
        shown(compiled(name, run, shard, device), layout)
        if time_it:
            faulthandler.dump_traceback_later(args.limit, exit=True)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            shown({"what": name} | timed(run, shard, args, device), layout)

    wanted = args.only or []
    if args.what == "model":
        # give single layers the layout of the whole model, so that they compile kernels for its shapes
        layout = "zigzag" if args.window is None else "contiguous"
        for kind in KINDS:
            if not wanted or kind in wanted:
                measured(f"one layer of {kind}", step_of(args, device, [kind], 1), layout, time_it=False)
        if not args.compile_only:
            run = step_of(args, device, ["gated_delta_net"] * 3 + ["attention"], args.layers)
            measured("model", run, layout, time_it=True)
        return
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fla = None if args.fla is None else fla_rule(args.fla, args.tokens, device, args.alone)
    for name, run in operations(args.tokens // ranks, args.heads, args.head_dim, device, dtype, fla).items():
        if not wanted or name in wanted:
            measured(name, run, "zigzag" if name == "attention" else "contiguous", time_it=not args.compile_only)


if __name__ == "__main__":
    main()
