"""Serve tiny models of each mixer in vLLM and compare greedy tokens with `generate`; time our hybrid in vLLM.

python packages/core/benchmarks/serve_vllm.py --quick
python packages/core/benchmarks/serve_vllm.py --layers 24 --requests 256
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from served_by_vllm import engine, generated_tokens, prompts_of, served_tokens
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

KINDS = {
    "attention": {"num_heads": 4, "head_dim": 64},
    "gated_delta_net": {"num_heads": 2, "head_dim": 64, "num_v_heads": 4},
    "mamba2": {"head_dim": 64, "state_size": 64},
}


def saved(folder: Path, labels: list[str], options: dict, dtype: torch.dtype, **sizes) -> HybridForCausalLM:
    """Save and return a model with random weights."""
    torch.manual_seed(0)
    config = HybridConfig(num_hidden_layers=len(labels), mixers=labels, mixer_options=options, **sizes)
    model = HybridForCausalLM(config).to("cuda", dtype).eval()
    model.save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    args = parser.parse_args()
    if args.quick:
        args.layers, args.requests, args.new = 8, 64, 64
    for kind in KINDS:
        labels = list(dict.fromkeys([kind, "attention"]))
        for eager in (True, False):
            folder = Path(tempfile.mkdtemp())
            sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.3}
            model = saved(folder, labels, {x: KINDS[x] for x in labels}, torch.float32, **sizes)
            prompts = prompts_of(512)
            expected = generated_tokens(model, prompts)
            options = {"enforce_eager": eager, "gpu_memory_utilization": 0.2, "enable_prefix_caching": False}
            with engine(folder, dtype="float32", attention_config={"backend": "TRITON_ATTN"}, **options) as llm:
                got, _ = served_tokens(llm, prompts)
            same = sum(a == b for x, y in zip(expected, got, strict=True) for a, b in zip(x, y, strict=True))
            total = sum(map(len, expected))
            print(json.dumps({"labels": labels, "eager": eager, "equal": same, "of": total}), flush=True)
    folder = Path(tempfile.mkdtemp())
    labels = ["gated_delta_net"] * 3 + ["attention"]
    heads = args.width // 128
    layers = {
        "gated_delta_net": {"num_heads": heads, "head_dim": 128, "expand_v": 1.0},
        "attention": {"num_heads": heads, "head_dim": 128},
    }
    sizes = {"vocab_size": 50304, "hidden_size": args.width, "intermediate_size": 3 * args.width}
    saved(folder, labels * (args.layers // 4), layers, torch.bfloat16, **sizes)
    torch.cuda.empty_cache()
    lengths = torch.randint(16, 4097, (args.requests,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [torch.randint(1, 50304, (n,)).tolist() for n in lengths]
    start = time.perf_counter()
    options = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 256, "enforce_eager": False}
    with engine(folder, dtype="bfloat16", gpu_memory_utilization=0.8, enable_prefix_caching=False, **options) as llm:
        started = time.perf_counter()
        served_tokens(llm, prompts[:1], 1)
        first = time.perf_counter()
        served_tokens(llm, prompts, args.new)
        again = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            served_tokens(llm, prompts, args.new)
            torch.cuda.synchronize()
        done = time.perf_counter()
        busy = sum(x.self_device_time_total for x in profile.key_averages()) / 1e6
        results = {
            "start s": started - start,
            "first response s": first - started,
            "first run s": again - first,
            "generated tokens/s, profiled": args.requests * args.new / (done - again),
            "GPU busy s": busy,
        }
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
