"""Time transformers' hybrid models on our kernels, on the kernels that transformers selects if installed, and in torch.

A layer and a small model of every family are timed in training, and also one decoded token. The command line may name
families (`python bench_field.py mamba2 bamba`) and, by `--only`, a part of the names of baselines, to measure no
others. A measurement that fails is reported and left out, and all others continue.

Each baseline is unchanged transformers, which selects kernels by what is installed:

- "transformers with fla, causal_conv1d": the delta-rule families, on `flash-linear-attention` and `causal-conv1d`.
- "transformers with mamba_ssm, causal_conv1d": the Mamba-2 families, on `mamba-ssm` (Mamba-2 needs only its Triton
  kernels) and `causal-conv1d`. In training both are part of one function, which also normalises and projects.
- "transformers, torch": transformers' own functions, whatever is installed. The products of whole chunks in Mamba-2
  need 8 MiB per token at these widths, so this baseline runs out of memory at the first shape.

FLA and mamba_ssm autotune their kernels, for some minutes, again for each new head size, FLA also for each number of
heads and, in some kernels, each batch size. All shapes of `rows` have equal heads, so that a process tunes only once.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import importlib.util
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from hf_models import DELTA_RULE, field_model
from tokenmix_core.integrations.transformers import FAMILIES, use_fallback, use_kernels
from tokenmix_core.testing.benchmarking import Run, able, host_microseconds, interleaved_medians, measure, row_of
from tokenmix_core.testing.results import kept

# folder of the results, next to those of operations
FOLDER = "field"
# batch, tokens, width; the second shape leaves enough memory for Mamba-2 in torch's own operations
LAYERS = [(4, 4096, 2048), (1, 4096, 2048)]
# batch, tokens, width, layers
MODEL = (1, 4096, 2048, 4)
CPU_LAYERS, CPU_MODEL = [(1, 64, 64)], (1, 32, 64, 2)
# shapes that are not in LAYERS: one long sequence, short ones, a wide model
SWEEP = [(1, 32768, 2048), (32, 512, 2048), (2, 4096, 4096)]
CPU_SWEEP = [(2, 32, 64)]
# for each package, the module that is imported for a family's kernels
PEERS = {"fla": "fla.ops.gated_delta_rule", "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined"}
CONVOLUTION = {"causal_conv1d": "causal_conv1d"}
# besides our form, measure only those whose name contains one of these; all if empty
ONLY: list[str] = []


def rows(device: str, families: Sequence[str] = tuple(FAMILIES)) -> Iterator[dict]:
    """Measure on `device`; yield one row per implementation, family and kind of measurement.

    Raises:
        RuntimeError: at the end, if measurements failed; the message names these.
    """
    layers, model = (LAYERS, MODEL) if device != "cpu" else (CPU_LAYERS, CPU_MODEL)
    yield from _each(
        families,
        *(lambda family, shape=shape: _layer_rows(family, shape, device) for shape in layers),
        lambda family: _model_rows(family, model, device),
        lambda family: _decoding_rows(family, model, device),
    )


def sweep(device: str, families: Sequence[str] = tuple(FAMILIES)) -> Iterator[dict]:
    """Measure layers in training at the shapes of `SWEEP`; raises the same error as `rows`."""
    shapes = SWEEP if device != "cpu" else CPU_SWEEP
    yield from _each(families, *(lambda family, shape=shape: _layer_rows(family, shape, device) for shape in shapes))


def _each(families: Sequence[str], *kinds: Callable[[str], list[dict]]) -> Iterator[dict]:
    """Yield the rows of every kind of every family; report errors at the end, after all other measurements."""
    failed = []
    for family in families:
        for kind in kinds:
            try:
                found = kind(family)
            # compilers and libraries raise errors of any type
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{family} ({type(error).__name__})")
                found = []
            yield from found
            # modules and their copies are reference cycles, which only the garbage collector frees
            gc.collect()
            torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"not measured: {', '.join(failed)}")


def _layer_rows(family: str, shape: tuple[int, int, int], device: str) -> list[dict]:
    B, T, width = shape
    # use training mode, in which transformers selects kernels that it uses in no other mode
    model = _model(family, width, 2, device).train()
    layer = next(m for m in model.modules() if type(m).__name__ == FAMILIES[family].layer)
    x = torch.randn(B, T, width, device=device, dtype=next(layer.parameters()).dtype, requires_grad=True)
    forms = _forms(family, layer)
    forwards: dict[str, Callable[[], Tensor]] = {name: lambda form=form: form(x) for name, form in forms.items()}
    repeats = 20 if device != "cpu" else 3
    inputs = _used(forms["tokenmix"], forwards["tokenmix"])
    name = f"B{B} T{T} D{width}"
    return measure(f"layer of {family}", name, device, forwards, (x, *inputs), alike=True, repeats=repeats)


def _model_rows(family: str, shape: tuple[int, int, int, int], device: str) -> list[dict]:
    B, T, width, layers = shape
    forms = _forms(family, _model(family, width, layers, device).train())
    ids = _ids(forms, B, T, device)
    forwards: dict[str, Callable[[], Tensor]] = {
        name: lambda form=form: form(ids, use_cache=False).logits for name, form in forms.items()
    }
    repeats, name = 10 if device != "cpu" else 3, f"B{B} T{T} D{width} L{layers}"
    inputs = _used(forms["tokenmix"], forwards["tokenmix"])
    return measure(f"model of {family}", name, device, forwards, inputs, repeats=repeats)


def _decoding_rows(family: str, shape: tuple[int, int, int, int], device: str) -> list[dict]:
    """Time one token after a prompt of T / 2 tokens, eagerly; `host_us` is here the CPU time of one token.

    cuDNN's attention is disabled: in four families the first form that reached a number of keys took the host 36 to 76
    ms, as if cuDNN planned for each number, and the form that reached it later took 4 to 10 ms.
    """
    B, T, width, layers = shape
    forms = _forms(family, _model(family, width, layers, device))
    ids = _ids(forms, B, T // 2, device)
    without_cudnn = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with torch.no_grad(), sdpa_kernel(without_cudnn):
        steps, failed = able({name: _decoding(form, ids) for name, form in forms.items()}, (), alike=False)
        runs: dict[str, Run] = {**steps}
        times = interleaved_medians(runs, device, repeats=20 if device != "cpu" else 3)
        host = {name: host_microseconds(run, device) for name, run in runs.items()}
    named = f"one token of {family}", f"B{B} after {T // 2} D{width} L{layers}"
    rows = [row_of(*named, name, fwd_ms=ms, host_us=host[name]) for name, ms in times.items()]
    return rows + [row_of(*named, name, failed=reason) for name, reason in failed.items()]


def _decoding(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Return a function that reads `ids` before its first call and decodes one more token at each call."""
    cache: dict[str, Any] = {}

    def run() -> Tensor:
        if not cache:
            out = model(ids, use_cache=True)
            kind = next(name for name, x in out.items() if isinstance(x, Cache))
            cache[kind] = out[kind]
        return model(ids[:, :1], use_cache=True, **cache).logits

    return run


def _model(family: str, width: int, layers: int, device: str) -> Any:
    """Return a random model with head sizes that kernels support."""
    if device == "cpu":
        return field_model(family, width=width, head=16, state=16, layers=layers)
    head = 128 if family in DELTA_RULE else 64
    # one group of heads, and chunks of 256 tokens, as in most of the families. mamba_ssm would normalise several groups
    # separately, but Mamba2, Bamba and Granite normalise all together
    sizes = {"width": width, "head": head, "state": 128, "layers": layers, "vocab": 32000, "groups": 1, "chunk": 256}
    return field_model(family, device=device, **sizes).bfloat16()


def _ids(forms: dict[str, Any], B: int, T: int, device: str) -> Tensor:
    return torch.randint(3, forms["tokenmix"].config.vocab_size, (B, T), device=device)


def _forms(family: str, module: nn.Module) -> dict[str, Any]:
    """Return copies of the module on our and its own kernels; they share weights, so that gradients are comparable."""

    def twin() -> Any:
        return copy.deepcopy(module, {id(p): p for p in module.parameters()})

    own = "fla" if family in DELTA_RULE else "mamba_ssm"
    installed = [name for name, home in ({own: PEERS[own]} | CONVOLUTION).items() if _imports(name, home)]
    ours = twin()
    use_kernels(ours)
    forms = {"tokenmix": ours, "transformers" + (f" with {', '.join(installed)}" if installed else ", torch"): twin()}
    if installed:
        fallback = twin()
        use_fallback(fallback)
        forms["transformers, torch"] = fallback
    # always measure our form, to which the others are compared
    return {name: form for name, form in forms.items() if form is ours or any(part in name for part in ONLY or [name])}


def _imports(package: str, home: str) -> bool:
    """Return whether a package is installed and can be imported; transformers does without packages that cannot."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(home)
    # the package lacks a library, or was built for another version
    except Exception as error:
        warnings.warn(f"{home} cannot be imported: {type(error).__name__}: {str(error)[:200]}", stacklevel=2)
        return False
    return True


def _used(module: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    """Return the parameters that get a gradient; experts to which no token is sent get none."""
    forward().float().sum().backward()
    used = [p for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return used


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """Measure and print; on a GPU also save the rows."""
    parser = argparse.ArgumentParser(description="measure transformers' hybrid models on our kernels and on others")
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; without any, all")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="baselines whose name has this")
    parser.add_argument("--sweep", action="store_true", help="layers at other shapes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.families) - set(FAMILIES)):
        parser.error(f"there is no family {', '.join(unknown)}, but {', '.join(FAMILIES)}")
    ONLY[:] = given.only
    found = (sweep if given.sweep else rows)(given.device, given.families or tuple(FAMILIES))
    return list(kept(found, given.out / ("sweep" if given.sweep else FOLDER)))


if __name__ == "__main__":
    main()
