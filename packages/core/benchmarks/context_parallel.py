"""Time of one sequence split over all GPUs of a host, beside one GPU.

    torchrun --nproc-per-node 2 packages/core/benchmarks/context_parallel.py operation --tokens 262144
    torchrun --nproc-per-node 2 packages/core/benchmarks/context_parallel.py model --tokens 131072

"operation" times the gated delta rule (16 heads of 128), SSD and attention, forward and backward. "model" times a step
of a 380M hybrid, three layers of the gated delta rule and one of attention in turn, with `--window` for windows, and
`--checkpointing` to compute layers again. Rank 0 prints one JSON line for each measurement: milliseconds (the median),
the peak of memory, and the bytes that it sent by operation. `--alone` measures one GPU, with the other ranks idle.

A measurement that exceeds `--limit` seconds ends its process with the stack of each thread, and so does an error: NCCL
waits for the other ranks otherwise, also when the interpreter ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
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
from tokenmix_core.parallel import SequenceShard


def operations(tokens: int, heads: int, size: int, device: torch.device, dtype: torch.dtype) -> dict[str, Callable]:
    """Return forward and backward passes by name, of this many tokens on this rank."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=device, dtype=dtype)

    q, k, v = (random(heads, size).requires_grad_() for _ in range(3))
    g = (-0.05 * torch.rand(1, tokens, heads, device=device)).requires_grad_()
    beta = torch.rand(1, tokens, heads, device=device).requires_grad_()
    few = [random(heads // 4, size).requires_grad_() for _ in range(2)]
    do = random(heads, size)
    normal = F.normalize(k, dim=-1).detach().requires_grad_()
    return {
        "gated delta rule": lambda: parallel.chunk_gated_delta_rule(q, normal, v, g, beta).o.backward(do),
        "ssd": lambda: parallel.chunk_ssd(q, normal, v, g, dt=beta).o.backward(do),
        "attention": lambda: parallel.attention(q, *few).o.backward(do),
        "window": lambda: parallel.attention(q, *few, window=2048).o.backward(do),
    }


def step_of(args: argparse.Namespace, device: torch.device) -> Callable[[], Any]:
    """Return a forward and backward pass of the hybrid."""
    torch.manual_seed(0)
    heads = {"num_heads": 16, "num_kv_heads": 4} if args.hidden >= 1024 else {"num_heads": 2}
    config = HybridConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_hidden_layers=args.layers,
        mixers=["gated_delta_net"] * 3 + ["attention"],
        mixer_options={
            "gated_delta_net": {"num_heads": args.hidden // 128, "head_dim": 128, "expand_v": 1.0},
            "attention": heads | {"window": args.window},
        },
    )
    model = HybridForCausalLM(config).to(device).train()
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(32000, (1, args.tokens), device=device)
    bf16 = torch.autocast(device.type, dtype=torch.bfloat16)

    def step() -> None:
        model.zero_grad()
        with bf16:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()

    return step


def timed(run: Callable, shard: SequenceShard | None, repeats: int, device: torch.device) -> dict[str, Any]:
    """Return the median of the slowest rank's milliseconds, memory and bytes of one call."""
    cuda, times = device.type == "cuda", []
    for i in range(repeats + 3):
        if shard is not None:
            shard.traffic.clear()
            dist.barrier(shard.group)
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with parallel.sequence_shard(shard):
            run()
        if cuda:
            torch.cuda.synchronize()
        if i >= 3:
            times.append(1000 * (time.perf_counter() - begin))
    middle = torch.tensor(median(times), device=device)
    sent: Counter[str] = Counter()
    if shard is not None:
        dist.all_reduce(middle, dist.ReduceOp.MAX, group=shard.group)
        for (_, name), count in shard.traffic.items():
            sent[name] += count
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return {"milliseconds": round(middle.item(), 2), "peak_gib": peak and round(peak, 2), "sent_bytes": dict(sent)}


def main() -> None:
    """Measure, and end together with the other ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["operation", "model"])
    parser.add_argument("--tokens", type=int, default=262144)
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], default="contiguous")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--window", type=int)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help="one operation by its name")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one measurement")
    args = parser.parse_args()
    try:
        measure(args)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    # idle ranks wait here for all measurements
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
    shard = None if args.alone else SequenceShard(args.tokens, layout=args.layout)
    if args.what == "model":
        runs = {"model": step_of(args, device)}
    else:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        runs = operations(args.tokens // ranks, args.heads, args.head_dim, device, dtype)
    for name, run in runs.items():
        if args.only not in (None, name):
            continue
        faulthandler.dump_traceback_later(args.limit, exit=True)
        found = timed(run, shard, args.repeats, device)
        if rank == 0:
            about = {"what": name, "tokens": args.tokens, "ranks": ranks, "layout": args.layout}
            print(json.dumps(about | found), flush=True)


if __name__ == "__main__":
    main()
