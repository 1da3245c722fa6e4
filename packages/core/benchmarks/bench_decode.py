"""Decoding of whole models, milliseconds a token, beside transformers' Llama with a static cache, compiled.

A row's forward time is that of one more token of every sequence of the batch, after a prompt, in `generate`: the time
of a generation less that of its prompt, by its tokens. `floor_ms` is what reading the weights and the cache once takes.
"tokenmix, kernel by kernel" is the same without recorded steps. Llama has the sizes of the Transformer++.

A layer's step is what lies between the projections of a Gated DeltaNet layer, as a graph: in one launch, in a launch an
operation, and as it runs where nothing is asked for. Its `floor_ms` is what reading every tensor once, and writing what
is made or updated, takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmix_core.evaluation.efficiency import Stopwatch, bytes_a_second, weight_bytes
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.nn.heads import HeadFit
from tokenmix_core.ops import (
    delta_gates,
    delta_layer_step,
    gated_delta_rule_step,
    gated_rms_norm,
    short_conv_step,
    short_conv_steps,
)
from tokenmix_core.testing.benchmarking import measure_step

GDN, ATTENTION = "gated_delta_net", "attention"
MODELS = {
    "gated_delta_net": [GDN] * 21,
    "gated_delta_net_hybrid": [GDN, GDN, GDN, ATTENTION] * 5 + [GDN, GDN],
    "transformer": [ATTENTION] * 24,
}
# width, MLP's width, heads of attention, of the delta rule and their size; the CPU's has the first and last layer alone
SIZES = {"380m": (1024, 2816, 16, 6, 128), "800m": (1536, 4096, 24, 6, 192), "tiny": (32, 48, 2, 2, 16)}
# size, batch, prompt, new tokens
SHAPES = [("380m", 1, 512, 129), ("380m", 32, 512, 129)]
SWEEP = [("800m", 1, 512, 129), ("800m", 32, 512, 129), ("380m", 1, 16384, 129), ("380m", 8, 16384, 129)]
CPU_SHAPES = [("tiny", 2, 8, 17)]
# size and batch of a layer's step
LAYERS = [("380m", 1), ("380m", 32), ("800m", 1), ("800m", 32)]
CPU_LAYERS = [("tiny", 2)]
REPEATS = 5


def rows(device: str) -> list[dict]:
    """The 380M models at batch 1 and 32, and a layer's step."""
    models, layers = (SHAPES, LAYERS) if device != "cpu" else (CPU_SHAPES, CPU_LAYERS)
    out = [row for shape in models for row in _rows(*shape, device)]
    return out + [row for layer in layers for row in _layer_rows(*layer, device)]


def sweep(device: str) -> list[dict]:
    """The 800M models, and long prompts."""
    return [row for shape in (SWEEP if device != "cpu" else CPU_SHAPES) for row in _rows(*shape, device)]


def _rows(size: str, batch: int, prompt: int, tokens: int, device: str) -> list[dict]:
    out = []
    for name in MODELS:
        config = _config(name, size)
        runs: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
            "tokenmix": (lambda config=config: HybridForCausalLM(config), {}),
            "tokenmix, kernel by kernel": (lambda config=config: HybridForCausalLM(config), {"decoding_graph": False}),
        }
        if name == "transformer":
            # on a CPU transformers does not compile
            static = {"cache_implementation": "static"}
            runs["transformers Llama, static cache, compiled"] = (lambda config=config: _llama(config), static)
            runs["transformers Llama"] = (lambda config=config: _llama(config), {})
        for impl, (make, options) in runs.items():
            torch.manual_seed(0)
            model = make().to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
            row = {"op": f"decoding, {name} {size}", "shape": f"B{batch} T{prompt}+{tokens}", "impl": impl}
            out.append(row | _measure(model, batch, prompt, tokens, options))
            del model
    return out


def _measure(model: Any, batch: int, prompt: int, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    device = model.device
    ids = torch.randint(3, model.config.vocab_size, (batch, prompt), device=device)
    # nothing ends a sequence
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True, **options}
    watch = Stopwatch(device)

    def generate(new: int) -> Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)

    for _ in range(2):
        generate(tokens)
    whole = statistics.median(watch.time(lambda: generate(tokens)) for _ in range(REPEATS))
    first = statistics.median(watch.time(lambda: generate(1)) for _ in range(REPEATS))
    held = model.state_bytes(prompt + tokens // 2, batch) if hasattr(model, "state_bytes") else 0
    return {
        "fwd_ms": 1e3 * (whole - first) / (tokens - 1),
        "floor_ms": 1e3 * (weight_bytes(model) + held) / bytes_a_second(device),
        "first_ms": 1e3 * first,
    }


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
        # of sequences of this token alone, whose outputs stay the same from step to step
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
