"""transformers' hybrid models on our kernels, beside the kernels that it takes where they are installed, and torch.

A layer and a small model of every family, in training and in decoding. The peers are transformers as it is, with FLA,
mamba_ssm and causal_conv1d where they are installed, and transformers with its fallback in torch.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix_core.integrations.transformers import FAMILIES, use_fallback, use_kernels
from tokenmix_core.testing.benchmarking import Run, interleaved_medians, measure
from tokenmix_core.testing.field import DELTA_RULE, field_model

# batch, tokens, width, layers; a layer is measured with the first three
LAYER, MODEL = (4, 4096, 2048), (2, 4096, 1024, 8)
CPU_LAYER, CPU_MODEL = (1, 64, 64), (1, 32, 64, 2)
# what the first lists leave out: one long sequence, short ones, a wide model
SWEEP = [(1, 32768, 2048), (32, 512, 2048), (2, 4096, 4096)]
CPU_SWEEP = [(2, 32, 64)]


def rows(device: str) -> list[dict]:
    """Measurements on `device`, one row an implementation, family and kind."""
    layer, model = (LAYER, MODEL) if device != "cpu" else (CPU_LAYER, CPU_MODEL)
    out = []
    for family in FAMILIES:
        out += _layer_rows(family, layer, device)
        out += _model_rows(family, model, device)
    return out


def sweep(device: str) -> list[dict]:
    """Layers in training at the shapes of `SWEEP`."""
    shapes = SWEEP if device != "cpu" else CPU_SWEEP
    return [row for family in FAMILIES for shape in shapes for row in _layer_rows(family, shape, device)]


def _layer_rows(family: str, shape: tuple[int, int, int], device: str) -> list[dict]:
    B, T, width = shape
    layer = next(m for m in _model(family, width, 2, device).modules() if type(m).__name__ == FAMILIES[family].layer)
    x = torch.randn(B, T, width, device=device, dtype=next(layer.parameters()).dtype, requires_grad=True)
    forwards: dict[str, Callable[[], Tensor]] = {
        name: lambda form=form: form(x) for name, form in _forms(family, layer).items()
    }
    repeats = 20 if device != "cpu" else 3
    inputs = _used(layer, lambda: layer(x))
    name = f"B{B} T{T} D{width}"
    return measure(f"layer of {family}", name, device, forwards, (x, *inputs), alike=True, repeats=repeats)


def _model_rows(family: str, shape: tuple[int, int, int, int], device: str) -> list[dict]:
    B, T, width, layers = shape
    model = _model(family, width, layers, device)
    ids = torch.randint(3, model.config.vocab_size, (B, T), device=device)
    forms = _forms(family, model)
    forwards: dict[str, Callable[[], Tensor]] = {
        name: lambda form=form: form(ids, use_cache=False).logits for name, form in forms.items()
    }
    repeats, name = 10 if device != "cpu" else 3, f"B{B} T{T} D{width} L{layers}"
    inputs = _used(model, lambda: model(ids, use_cache=False).logits)
    out = measure(f"model of {family}", name, device, forwards, inputs, repeats=repeats)
    return out + _decoding_rows(family, f"B{B} after {T // 2} D{width} L{layers}", forms, ids[:, : T // 2], device)


def _decoding_rows(family: str, shape: str, forms: dict[str, Any], ids: Tensor, device: str) -> list[dict]:
    runs: dict[str, Run] = {}
    for name, model in forms.items():
        out = model(ids, use_cache=True)
        kind = "cache_params" if "cache_params" in out else "past_key_values"
        runs[name] = lambda model=model, cache={kind: out[kind]}: model(ids[:, :1], use_cache=True, **cache).logits
    with torch.no_grad():
        times = interleaved_medians(runs, device, repeats=20 if device != "cpu" else 3)
    empty = dict.fromkeys(("fwdbwd_ms", "peak_mb", "host_us", "first_call_s"))
    op = f"one token of {family}"
    return [{"op": op, "shape": shape, "impl": name, "fwd_ms": ms} | empty for name, ms in times.items()]


def _model(family: str, width: int, layers: int, device: str) -> Any:
    """A random model whose heads kernels have."""
    if device == "cpu":
        return field_model(family, width=width, head=16, state=16, layers=layers)
    head = 128 if family in DELTA_RULE else 64
    model = field_model(family, width=width, head=head, state=128, layers=layers, vocab=32000)
    return model.to(device, torch.bfloat16)


def _forms(family: str, module: nn.Module) -> dict[str, Any]:
    """The module on our kernels and on its own, with one set of weights, so that gradients are of the same leaves."""

    def twin() -> Any:
        return copy.deepcopy(module, {id(p): p for p in module.parameters()})

    packages = ("fla", "causal_conv1d") if family in DELTA_RULE else ("mamba_ssm", "causal_conv1d")
    installed = [name for name in packages if importlib.util.find_spec(name) is not None]
    ours = twin()
    use_kernels(ours)
    forms = {"tokenmix": ours, "transformers" + (f" with {', '.join(installed)}" if installed else ", torch"): twin()}
    if installed:
        fallback = twin()
        use_fallback(fallback)
        forms["transformers, torch"] = fallback
    return forms


def _used(module: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    """The parameters that get a gradient; experts that no token is sent to do not."""
    forward().float().sum().backward()
    used = [p for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return used
