"""Time decoding of whole models, in milliseconds per token, and of transformers' Llama, compiled with a static cache.

The forward time of a row is that of one more token of every sequence in the batch, in `generate`: the time of a
generation minus that of its prompt, divided by the number of tokens. `floor_ms` is the time to read the weights and the
cache once. "tokenmix" captures its steps as CUDA graphs on a GPU, "tokenmix, kernel by kernel" does not, and
`same_tokens` is the fraction of tokens in which both agree. Llama has the sizes of the Transformer++.

The step of a layer is the part between the projections of a Gated DeltaNet layer, as a CUDA graph: in one launch, in
one launch per operation, and by the operations' default implementations. Its `floor_ms` is the time to read every
tensor once and to write every tensor that is created or updated.

`python bench_decode.py transformer --only tokenmix --batch 1` measures a part of it; each row is printed and saved at
once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmix_core.evaluation.efficiency import Stopwatch, bytes_a_second, weight_bytes
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.ops import (
    delta_gates,
    delta_layer_step,
    gated_delta_rule_step,
    gated_rms_norm,
    short_conv_step,
    short_conv_steps,
)
from tokenmix_core.testing.benchmarking import measure_step, table
from tokenmix_core.testing.results import OURS, save

GDN, ATTENTION = "gated_delta_net", "attention"
MODELS = {
    "gated_delta_net": [GDN] * 21,
    "gated_delta_net_hybrid": [GDN, GDN, GDN, ATTENTION] * 5 + [GDN, GDN],
    "transformer": [ATTENTION] * 24,
}
# width, MLP width, heads of attention, heads of the delta rule, head size; "tiny" has the first and fourth layer only
SIZES = {"380m": (1024, 2816, 16, 6, 128), "800m": (1536, 4096, 24, 6, 192), "tiny": (32, 48, 2, 2, 16)}
# size, batch, prompt, new tokens
SHAPES = [("380m", 1, 512, 129), ("380m", 32, 512, 129)]
SWEEP = [("800m", 1, 512, 129), ("800m", 32, 512, 129), ("380m", 1, 16384, 129), ("380m", 8, 16384, 129)]
CPU_SHAPES = [("tiny", 2, 8, 17)]
# size and batch of the decoding step of a layer
LAYERS = [("380m", 1), ("380m", 32), ("800m", 1), ("800m", 32)]
CPU_LAYERS = [("tiny", 2)]
REPEATS = 5


def rows(device: str) -> Iterator[dict]:
    """Measure the 380M models at batch 1 and 32, and the decoding step of a layer."""
    models, layers = (SHAPES, LAYERS) if device != "cpu" else (CPU_SHAPES, CPU_LAYERS)
    for shape in models:
        yield from _rows(*shape, device)
    for layer in layers:
        yield from _layer_rows(*layer, device)


def sweep(device: str) -> Iterator[dict]:
    """Measure the 800M models, and long prompts."""
    for shape in SWEEP if device != "cpu" else CPU_SHAPES:
        yield from _rows(*shape, device)


def _rows(
    size: str,
    batch: int,
    prompt: int,
    tokens: int,
    device: str,
    *,
    names: Iterable[str] = MODELS,
    only: str = "",
    repeats: int = REPEATS,
) -> Iterator[dict]:
    """Yield the rows of one shape, for the named models and the implementations whose name contains `only`."""
    for name in names:
        config = _config(name, size)
        recorded = {"decoding_graph": True} if device != "cpu" else {}
        runs: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
            OURS: (lambda config=config: HybridForCausalLM(config), recorded),
            f"{OURS}, kernel by kernel": (lambda config=config: HybridForCausalLM(config), {"decoding_graph": False}),
        }
        if name == "transformer":
            # on a CPU, transformers does not compile
            static = {"cache_implementation": "static"}
            runs["transformers Llama, static cache, compiled"] = (lambda config=config: _llama(config), static)
            runs["transformers Llama"] = (lambda config=config: _llama(config), {})
        ours: Tensor | None = None
        for impl, (make, options) in runs.items():
            if only.lower() not in impl.lower():
                continue
            torch.manual_seed(0)
            model = make().to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
            row = {"op": f"decoding, {name} {size}", "shape": f"B{batch} T{prompt}+{tokens}", "impl": impl}
            print(f"warming {row['op']}, {row['shape']}, {impl}", file=sys.stderr, flush=True)
            numbers, chosen = _measure(model, batch, prompt, tokens, options, repeats)
            ours = chosen if impl == OURS else ours
            beside = impl.startswith(f"{OURS},") and ours is not None
            same = (chosen == ours)[:, prompt:].float().mean().item() if beside else None
            yield row | numbers | {"same_tokens": same}
            del model


def _measure(
    model: Any, batch: int, prompt: int, tokens: int, options: dict[str, Any], repeats: int
) -> tuple[dict[str, Any], Tensor]:
    """Return the measured values of a row, and the generated sequences."""
    device = model.device
    torch.manual_seed(1)
    ids = torch.randint(3, model.config.vocab_size, (batch, prompt), device=device)
    # no token ends a sequence
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True, **options}
    watch = Stopwatch(device)

    def generate(new: int) -> Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)

    begin = time.perf_counter()
    generated = generate(tokens).cpu()
    warm = time.perf_counter() - begin
    generate(tokens)
    whole = statistics.median(watch.time(lambda: generate(tokens)) for _ in range(repeats))
    first = statistics.median(watch.time(lambda: generate(1)) for _ in range(repeats))
    held = model.state_bytes(prompt + tokens // 2, batch) if hasattr(model, "state_bytes") else 0
    return {
        "fwd_ms": 1e3 * (whole - first) / (tokens - 1),
        "floor_ms": 1e3 * (weight_bytes(model) + held) / bytes_a_second(device),
        "first_ms": 1e3 * first,
        "first_call_s": warm,
    }, generated


def _layer_rows(size: str, batch: int, device: str) -> list[dict]:
    _, _, _, H, K = SIZES[size]
    V, width = 2 * K, 4
    fit = HeadFit(K, V, (64, 128, 256))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, z = (torch.randn(batch, H, n, device=device, dtype=dtype) for n in (K, K, V, V))
    a, b = torch.randn(2, batch, H, device=device, dtype=dtype)
    weights = [torch.randn(H * n, width, device=device, dtype=dtype) for n in (K, K, V)]
    A_log, dt_bias = torch.rand(2, H, device=device)
    norm_weight = torch.ones(V, device=device, dtype=dtype)
    tokens = [x.flatten(1) for x in (q, k, v)]
    arrivals = torch.zeros(batch, H, dtype=torch.int32, device=device)
    options = {"scale": K**-0.5, "impl": None if device == "cpu" else "triton"}

    def states() -> tuple[list[Tensor], Tensor]:
        # sequences that repeat one token: their state is always a multiple of k̂ vᵀ, and the norm removes the factor,
        # so that outputs stay the same from step to step
        last = [x.unsqueeze(-1).repeat(1, 1, width - 1) for x in tokens]
        return last, torch.zeros(batch, *fit.state_shape(H), device=device)

    def fused() -> Callable[[], Tensor]:
        last, state = states()
        given = q, k, v, a, b, z, weights, last, A_log, dt_bias, norm_weight, state, arrivals
        return lambda: delta_layer_step(*given, **options)

    def by_operation(impl: Any) -> Callable[[], Tensor]:
        last, state = states()

        def run() -> Tensor:
            if impl is None:
                given = zip(tokens, weights, last, strict=True)
                parts = [short_conv_step(x, w, None, s, activation="silu") for x, w, s in given]
            else:
                parts = short_conv_steps(tokens, weights, last, activation="silu", impl=impl)
            q, k, v = (fitted(x.view(batch, 1, H, -1)) for fitted, x in zip(_fits(fit), parts, strict=True))
            gates = delta_gates(a.unsqueeze(1), b.unsqueeze(1), A_log, dt_bias, impl=impl)
            g, beta = (fit.gates(x) for x in gates)
            token = (x.squeeze(1) for x in (q, k, v, g, beta))
            o = gated_delta_rule_step(*token, state, scale=K**-0.5, qk_l2norm=True)
            return gated_rms_norm(fit.outputs(o.unsqueeze(1), H).squeeze(1), z, norm_weight, impl=impl)

        return run

    forwards = {"tokenmix": fused(), "tokenmix, a launch an operation": by_operation(options["impl"])}
    if device != "cpu":
        forwards["tokenmix, by default"] = by_operation(None)
    last, state = states()
    moved = 2 * sum(x.nbytes for x in (*last, state)) + sum(x.nbytes for x in (*tokens, *weights, a, b, z, z))
    floor = {"floor_ms": 1e3 * moved / bytes_a_second(torch.device(device))}
    found = measure_step(f"layer's step, gated_delta_net {size}", f"B{batch} H{H} K{K} V{V}", device, forwards)
    return [row | floor for row in found]


def _fits(fit: HeadFit) -> tuple[Callable[[Tensor], Tensor], ...]:
    return fit.keys, fit.keys, fit.values


def _llama(config: HybridConfig) -> LlamaForCausalLM:
    heads = config.mixer_options["attention"]["num_heads"]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            tie_word_embeddings=config.tie_word_embeddings,
            eos_token_id=None,
        )
    )


def _config(name: str, size: str) -> HybridConfig:
    width, mlp, heads, delta_heads, head_dim = SIZES[size]
    mixers = MODELS[name] if size != "tiny" else [MODELS[name][0], MODELS[name][3]]
    options: dict[str, dict[str, Any]] = {
        ATTENTION: {"num_heads": heads},
        GDN: {"num_heads": delta_heads, "head_dim": head_dim},
    }
    return HybridConfig(
        vocab_size=32000 if size != "tiny" else 64,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=len(mixers),
        mixers=mixers,
        mixer_options={label: options[label] for label in dict.fromkeys(mixers)},
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure what the arguments ask for; print each row at once and, on a GPU, save it."""
    parser = argparse.ArgumentParser(description="measure decoding beside reading weights and cache once")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all where none is given")
    parser.add_argument("--only", default="", metavar="NAME", help='implementations whose name has this, as "tokenmix"')
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, help="of the models; by default 380m, and tiny on a CPU")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=129, help="new tokens of a generation, the prompt's included")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="generations of which the median counts")
    parser.add_argument("--layers", action="store_true", help="a layer's step, too")
    parser.add_argument("--out", type=Path, help="folder of the JSON; for a GPU results/decode/ beside this file")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.models if name not in MODELS]:
        parser.error(f"there is no model {unknown[0]!r}, but {', '.join(MODELS)}")
    size = given.size or ("tiny" if given.device == "cpu" else "380m")
    folder = given.out or (Path(__file__).parent / "results" / "decode" if given.device != "cpu" else None)
    wanted = {"names": given.models or MODELS, "only": given.only, "repeats": given.repeats}
    for batch in given.batch:
        for row in _rows(size, batch, given.prompt, given.tokens, given.device, **wanted):
            _tell(row, folder)
        for row in _layer_rows(size, batch, given.device) if given.layers else ():
            _tell(row, folder)


def _tell(row: dict, folder: Path | None) -> None:
    print(table([row]), flush=True)
    if folder is not None:
        save([row], folder)


if __name__ == "__main__":
    main()
