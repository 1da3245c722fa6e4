"""transformers' hybrid models on our kernels, beside the kernels that it takes where they are installed, and torch.

A layer and a small model of every family in training, and one decoded token. With names of families on the command line
only these are measured (`python bench_field.py mamba2 bamba`), and with `--only` only forms whose name has this; what
fails is told and left out, and the rest goes on.

Each baseline is transformers as it is, by what it finds installed:

- "transformers with fla, causal_conv1d": the delta-rule families, on `flash-linear-attention` and `causal-conv1d`.
- "transformers with mamba_ssm, causal_conv1d": the Mamba-2 families, on `mamba-ssm` (of which Mamba-2 needs the Triton
  kernels alone) and `causal-conv1d`. In training both go into one function, which also norms and projects.
- "transformers, torch": its own functions, whatever is installed. Mamba-2's products of whole chunks need 8 MiB a token
  at these widths, so that this baseline runs out of memory at the first shape.

FLA and mamba_ssm tune their kernels anew for other sizes of heads, FLA also for another number of them and parts of it
for another batch, some minutes each. Heads are the same at all shapes of `rows`, so that a process tunes once for all.
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

# of results, beside those of operations
FOLDER = "field"
# batch, tokens, width; the second has room for Mamba-2's form in torch
LAYERS = [(4, 4096, 2048), (1, 4096, 2048)]
# batch, tokens, width, layers
MODEL = (1, 4096, 2048, 4)
CPU_LAYERS, CPU_MODEL = [(1, 64, 64)], (1, 32, 64, 2)
# what the first lists leave out: one long sequence, short ones, a wide model
SWEEP = [(1, 32768, 2048), (32, 512, 2048), (2, 4096, 4096)]
CPU_SWEEP = [(2, 32, 64)]
# what is imported of a package for a family's kernels
PEERS = {"fla": "fla.ops.gated_delta_rule", "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined"}
CONVOLUTION = {"causal_conv1d": "causal_conv1d"}
# parts of names, of which a form beside ours has one; none for all
ONLY: list[str] = []


def rows(device: str, families: Sequence[str] = tuple(FAMILIES)) -> Iterator[dict]:
    """Measurements on `device`, one row an implementation, family and kind.

    Raises:
        RuntimeError: at the end, with the names of what failed.
    """
    layers, model = (LAYERS, MODEL) if device != "cpu" else (CPU_LAYERS, CPU_MODEL)
    yield from _each(
        families,
        *(lambda family, shape=shape: _layer_rows(family, shape, device) for shape in layers),
        lambda family: _model_rows(family, model, device),
        lambda family: _decoding_rows(family, model, device),
    )


def sweep(device: str, families: Sequence[str] = tuple(FAMILIES)) -> Iterator[dict]:
    """Layers in training at the shapes of `SWEEP`; raises as `rows`."""
    shapes = SWEEP if device != "cpu" else CPU_SWEEP
    yield from _each(families, *(lambda family, shape=shape: _layer_rows(family, shape, device) for shape in shapes))


def _each(families: Sequence[str], *kinds: Callable[[str], list[dict]]) -> Iterator[dict]:
    """The rows of every kind of every family; what raises is told, and the others go on."""
    failed = []
    for family in families:
        for kind in kinds:
            try:
                found = kind(family)
            # compilers and libraries have errors of their own
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{family} ({type(error).__name__})")
                found = []
            yield from found
            # modules and their twins are cycles
            gc.collect()
            torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"not measured: {', '.join(failed)}")


def _layer_rows(family: str, shape: tuple[int, int, int], device: str) -> list[dict]:
    B, T, width = shape
    # in training mode, in which transformers takes kernels that it takes nowhere else
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
    """A token after half of a model's tokens, eagerly; `host_us` is here the host's time for one.

    Without cuDNN's attention: in four families whichever form came first to a number of keys took the host 36 to 76
    ms, as if something were planned anew for each, and the other that comes there later 4 to 10.
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
    """Decodes one more token at each call, and before the first reads `ids`."""
    cache: dict[str, Any] = {}

    def run() -> Tensor:
        if not cache:
            out = model(ids, use_cache=True)
            kind = next(name for name, x in out.items() if isinstance(x, Cache))
            cache[kind] = out[kind]
        return model(ids[:, :1], use_cache=True, **cache).logits

    return run


def _model(family: str, width: int, layers: int, device: str) -> Any:
    """A random model whose heads kernels have."""
    if device == "cpu":
        return field_model(family, width=width, head=16, state=16, layers=layers)
    head = 128 if family in DELTA_RULE else 64
    # one group and chunks of 256, as most of the families have; several groups mamba_ssm norms each by itself, where
    # Mamba2, Bamba and Granite norm all together
    sizes = {"width": width, "head": head, "state": 128, "layers": layers, "vocab": 32000, "groups": 1, "chunk": 256}
    return field_model(family, device=device, **sizes).bfloat16()


def _ids(forms: dict[str, Any], B: int, T: int, device: str) -> Tensor:
    return torch.randint(3, forms["tokenmix"].config.vocab_size, (B, T), device=device)


def _forms(family: str, module: nn.Module) -> dict[str, Any]:
    """The module on our kernels and on its own, with one set of weights, so that gradients are of the same leaves."""

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
    # ours are measured in any case: the others are beside them
    return {name: form for name, form in forms.items() if form is ours or any(part in name for part in ONLY or [name])}


def _imports(package: str, home: str) -> bool:
    """Whether a package is there and can be imported: where it cannot, transformers goes on without it."""
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(home)
    # of a library that is not there, or was built for another version
    except Exception as error:
        warnings.warn(f"{home} cannot be imported: {type(error).__name__}: {str(error)[:200]}", stacklevel=2)
        return False
    return True


def _used(module: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    """The parameters that get a gradient; experts that no token is sent to do not."""
    forward().float().sum().backward()
    used = [p for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return used


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """Measure, print, and keep what a GPU gave."""
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
