"""Serve our models in vLLM on a GPU: compare tokens with `generate`, and time them beside vLLM's own OLMo-Hybrid.

python packages/core/benchmarks/serve_vllm.py --quick --out FOLDER    # within `--seconds`
python packages/core/benchmarks/serve_vllm.py --quick --out FOLDER --checks --timed own swapped
python packages/core/benchmarks/serve_vllm.py check nha
python packages/core/benchmarks/serve_vllm.py time ours --layers 24 --requests 256
python packages/core/benchmarks/serve_vllm.py time ours --recipe tokenmix_nats_l:nats-l-hybrid-380m

`--quick` starts all processes at once, except `embedded`, which starts when its turn comes. Each process writes its log
to `FOLDER/NAME.txt`; a timed one waits, after a first run, until it has the GPU alone. Timed are `ours` (our hybrid in
vLLM), `embedded` (our hybrid in transformers' continuous batching), `own` (vLLM's OLMo-Hybrid) and `swapped` (the same
with our kernels in its Gated DeltaNet layers), with equal sizes and requests. With `--recipe`, `ours` and `embedded`
are the model of a recipe, with random weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from served_by_vllm import engine, generated_tokens, prompts_of, served_tokens, worst_gap

HEADS = {"num_heads": 4, "head_dim": 64}
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.3, "eos_token_id": 0}
GDN = {"num_heads": 2, "head_dim": 64, "num_v_heads": 4}
# by the name of a check: the package, the prefix of its classes, and the options of each layer by the layer's label
MODELS: dict[str, tuple[str, str, dict[str, dict]]] = {
    "hybrid": ("tokenmix_core.modeling", "Hybrid", {"gated_delta_net": GDN, "attention": HEADS}),
    "nha": (
        "tokenmix_nha",
        "Nha",
        {
            f"nha-{window}": {"type": "nha", "window": window, "slots": 16, "gate_normalizer": 2.0, **HEADS}
            for window in (16, 70)
        },
    ),
    "lte": (
        "tokenmix_lte",
        "Lte",
        {
            "gated_delta_net": GDN,
            "lte": {"num_heads": 4, "num_kv_heads": 2, "window": 16, "cap": 16, "sinks": 2, "dropout": 0.0},
        },
    ),
    "nats_l": (
        "tokenmix_nats_l",
        "NatsL",
        {"gated_delta_net": GDN, "nats_l": {"num_heads": 2, "head_dim": 64, "num_softmax_heads": 4}},
    ),
    "oryx": ("tokenmix_oryx", "Oryx", {"oryx": {"linear_mixer": "gated_delta_net", "head_dim": 64}}),
    "mamba2": (
        "tokenmix_core.modeling",
        "Hybrid",
        {
            "mamba2": {"head_dim": 64, "state_size": 64},
            "window": {"type": "attention", "window": 20, **HEADS},
            "sinks": {"type": "attention", "window": 20, "sinks": 4, **HEADS},
        },
    ),
}
_SIZES = {"layers": 24, "width": 1024, "requests": 256, "new": 256, "kv_gib": 20, "max_model_len": 8192}
TIMED = ("ours", "embedded", "own", "swapped")


def built(name: str, dtype: torch.dtype, device: str) -> Any:
    """Return a tiny model with random weights."""
    package, prefix, layers = MODELS[name]
    module = importlib.import_module(package)
    torch.manual_seed(0)
    config = getattr(module, f"{prefix}Config")(
        num_hidden_layers=len(layers), mixers=list(layers), mixer_options=layers, **SIZES
    )
    return getattr(module, f"{prefix}ForCausalLM")(config).to(device, dtype).eval()


def check(name: str) -> None:
    """Print, for each setting, how many tokens of vLLM equal those of `generate`, and their `worst_gap`."""
    cuda = torch.cuda.is_available()
    floats = {"dtype": "float32"} | ({"attention_config": {"backend": "TRITON_ATTN"}} if cuda else {})
    graphs = {"enforce_eager": False, "max_num_seqs": 6}
    settings = {"float32": floats}
    if cuda:
        settings |= {"float32, graphs": {**floats, **graphs}, "bfloat16, graphs": {"dtype": "bfloat16", **graphs}}
    cached = {"enable_prefix_caching": True, "max_num_batched_tokens": 1024, "max_model_len": 2048}
    settings["float32, prefixes"] = {**floats, **cached}
    for label, options in settings.items():
        try:
            model = built(name, getattr(torch, options["dtype"]), "cuda" if cuda else "cpu")
            folder = Path(tempfile.mkdtemp())
            model.save_pretrained(folder)
            # prefixes are reused in blocks of several hundred tokens
            lengths = {"lengths": (1500, 1, 3, 900, 65, 7)} if "enable_prefix_caching" in options else {}
            prompts = prompts_of(SIZES["vocab_size"], **lengths)
            expected = generated_tokens(model, prompts)
            memory = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 29} if cuda else {}
            with engine(folder, **{"enable_prefix_caching": False, **memory, **options}) as llm:
                for turn in range(2):
                    got, reused = served_tokens(llm, prompts)
                    same = sum(a == b for x, y in zip(expected, got, strict=True) for a, b in zip(x, y, strict=True))
                    results: dict[str, Any] = {"equal": same, "of": sum(map(len, expected)), "reused": sum(reused)}
                    results["worst gap"] = round(worst_gap(model, prompts, got), 5)
                    print(json.dumps({"model": name, "setting": label, "turn": turn, **results}), flush=True)
                # an engine that this variable keeps alive would end the process group of the next one
                del llm
        except Exception:
            print(json.dumps({"model": name, "setting": label, "failed": traceback.format_exc()[-300:]}), flush=True)
            traceback.print_exc()


def folder_of(kind: str, layers: int, width: int, recipe: str | None) -> Path:
    """Save the model of a recipe, or a hybrid of three GDN layers to one of attention.

    It has random weights; of vLLM's own model only the configuration is saved.
    """
    folder, heads = Path(tempfile.mkdtemp()), width // 128
    if recipe and kind in ("ours", "embedded"):
        from transformers import AutoModelForCausalLM

        package, _, name = recipe.partition(":")
        module = "tokenmix_core.training.baselines" if package == "tokenmix_core" else f"{package}.recipes"
        config = importlib.import_module(module).RECIPES[name]().model_config()
        config.max_position_embeddings = max(8192, config.max_position_embeddings)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        return folder
    sizes = {"vocab_size": 50304, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    sizes["max_position_embeddings"] = 8192
    if kind in ("own", "swapped"):
        from transformers import OlmoHybridConfig

        OlmoHybridConfig(
            **sizes,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            layer_types=[*["linear_attention"] * 3, "full_attention"] * (layers // 4),
            **{f"linear_num_{x}_heads": heads for x in ("key", "value")},
            **{f"linear_{x}_head_dim": 128 for x in ("key", "value")},
            architectures=["OlmoHybridForCausalLM"],
            dtype="bfloat16",
            pad_token_id=0,
            eos_token_id=1,
        ).save_pretrained(folder)
        return folder
    from tokenmix_core.modeling import HybridConfig, HybridForCausalLM

    options = {
        "gated_delta_net": {"num_heads": heads, "head_dim": 128, "expand_v": 1.0},
        "attention": {"num_heads": heads, "head_dim": 128},
    }
    labels = [*["gated_delta_net"] * 3, "attention"] * (layers // 4)
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig(**sizes, mixers=labels, mixer_options=options))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def timed(kind: str, args: argparse.Namespace) -> None:
    """Print the seconds until the first answer, and the tokens per second and the GPU's busy time of all requests."""
    lengths = torch.randint(16, 4097, (args.requests,), generator=torch.Generator().manual_seed(0)).tolist()
    folder = folder_of(kind, args.layers, args.width, args.recipe)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = [torch.randint(1, vocab, (n,)).tolist() for n in lengths]
    start = time.perf_counter()
    if kind == "embedded":
        answer, started = embedded(folder), time.perf_counter()
        measure(kind, answer, prompts, args, started - start)
        return
    options: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256}
    options["max_model_len"] = args.max_model_len
    options |= {"enforce_eager": False, "dtype": "bfloat16", "enable_prefix_caching": False}
    # set the size of the cache: vLLM would measure the free memory, which several processes share
    options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": args.kv_gib << 30}
    if kind == "ours":
        options["additional_config"] = {"state_dtype": args.state_dtype}
    if kind in ("own", "swapped"):
        options |= {"load_format": "dummy", "additional_config": {"gdn_prefill_backend": "triton"}}
    if kind == "swapped":
        os.environ["TOKENMIX_VLLM_KERNELS"] = "1"
    with engine(folder, **options) as llm:
        started = time.perf_counter() - start
        measure(kind, lambda prompts, new: served_tokens(llm, prompts, new)[0], prompts, args, started)


def embedded(folder: Path) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Return a function that generates greedy tokens by continuous batching."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    pool = ContinuousBatchingConfig(max_batch_tokens=8192, max_memory_percent=0.3)

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)
        results = model.generate_batch(prompts, config, pool, progress_bar=False)
        return [x.generated_tokens for x in results.values()]

    return answer


def measure(kind: str, answer: Callable, prompts: list[list[int]], args: argparse.Namespace, started: float) -> None:
    """Run all requests three times and print the results: a first run, a timed one, and one under the profiler."""

    def run(prompts: list[list[int]], new: int) -> float:
        start = time.perf_counter()
        tokens = answer(prompts, new)
        torch.cuda.synchronize()
        assert sum(map(len, tokens)) == len(prompts) * new
        return time.perf_counter() - start

    results: dict[str, Any] = {"kind": kind, "device": torch.cuda.get_device_name(), "start s": started}
    results["first response s"] = run(prompts[:1], 1)
    results["first run s"] = run(prompts, args.new)
    print(json.dumps(results), flush=True)
    if args.wait:
        (args.wait / f"{kind}.ready").touch()
        while not (args.wait / f"{kind}.go").exists():
            time.sleep(0.05)
    results["generated tokens/s"] = args.requests * args.new / run(prompts, args.new)
    print(json.dumps(results), flush=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results["profiled s"] = run(prompts, args.new)
    averages = profile.key_averages()
    results["GPU busy s"] = sum(x.self_device_time_total for x in averages) / 1e6
    print(json.dumps(results), flush=True)
    print(averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60), flush=True)


def quick(args: argparse.Namespace) -> None:
    """Run checks and timings, each in a process with a log; stop those that still run after `args.seconds`."""
    args.out.mkdir(parents=True, exist_ok=True)
    wait, end = Path(tempfile.mkdtemp()), time.monotonic() + args.seconds
    running: dict[str, subprocess.Popen] = {}

    def begin(*command: str) -> None:
        log = (args.out / f"{command[1]}.txt").open("w")
        sizes = [f"--{x}={getattr(args, x)}" for x in (*_SIZES, "state_dtype")]
        recipe = [f"--recipe={args.recipe}"] if args.recipe else []
        given = [sys.executable, __file__, *command, f"--wait={wait}", *sizes, *recipe]
        env = dict(os.environ)
        if command[1] == "embedded" and args.embedded_path:
            env["PYTHONPATH"] = f"{args.embedded_path}:{env.get('PYTHONPATH', '')}"
        env["PYTHONFAULTHANDLER"] = "1"
        running[command[1]] = subprocess.Popen(given, stdout=log, stderr=subprocess.STDOUT, env=env)

    def ended(names: list[str], until: float) -> None:
        while any(running[x].poll() is None for x in names) and time.monotonic() < until:
            time.sleep(0.1)
        for x in names:
            if running[x].poll() is None:
                print(f"{x}: stopped at its time limit")
                # with PYTHONFAULTHANDLER, the log shows where it was
                running[x].send_signal(signal.SIGABRT)
                try:
                    running[x].wait(3)
                except subprocess.TimeoutExpired:
                    running[x].kill()
                    running[x].wait()

    for kind in args.timed:
        if kind != "embedded":
            begin("time", kind)
    for name in args.checks:
        begin("check", name)
    ended(args.checks, min(end, time.monotonic() + args.check_seconds))
    for kind in args.timed:
        if kind not in running:
            begin("time", kind)
        while not (wait / f"{kind}.ready").exists() and running[kind].poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        (wait / f"{kind}.go").touch()
        ended([kind], end)
    for name in [*args.checks, *args.timed]:
        lines = (args.out / f"{name}.txt").read_text(errors="replace").splitlines()
        print(f"== {name}: exit {running[name].returncode}", *[x for x in lines if x.startswith("{")], sep="\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="check NAME, or time ours, embedded or own")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checks", nargs="*", choices=MODELS, default=list(MODELS), help="checks of --quick")
    parser.add_argument("--timed", nargs="*", choices=TIMED, default=["own", "ours", "embedded"], help="of --quick")
    for name, value in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--recipe", help="PACKAGE:NAME, the model of `ours` and `embedded`")
    parser.add_argument("--state_dtype", default="float32", help="dtype of our recurrent states in vLLM's slots")
    parser.add_argument("--seconds", type=float, default=240, help="time limit of --quick")
    parser.add_argument("--check-seconds", type=float, default=100, help="time limit of the checks of --quick")
    parser.add_argument("--out", type=Path, default=Path("served"), help="folder of the logs of --quick")
    parser.add_argument("--wait", type=Path, help="folder in which a timed run waits for its turn")
    parser.add_argument("--embedded-path", help="PYTHONPATH entry with a transformers for `embedded` only")
    args = parser.parse_args()
    if not any(
        x.value == "tokenmix_core.integrations.vllm:register" for x in entry_points(group="vllm.general_plugins")
    ):
        parser.error(
            "vLLM does not find the plug-in: install the packages, because PYTHONPATH alone has no entry points"
        )
    if args.quick:
        quick(args)
    elif len(args.what) == 2 and args.what[0] == "check" and args.what[1] in MODELS:
        check(args.what[1])
    elif len(args.what) == 2 and args.what[0] == "time" and args.what[1] in TIMED:
        timed(args.what[1], args)
    else:
        parser.error(f"give --quick, check {' | '.join(MODELS)}, or time {' | '.join(TIMED)}")


if __name__ == "__main__":
    main()
