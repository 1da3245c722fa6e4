"""Time reading a prompt into a cache, with the baselines of `step.py`: `python prompts.py RECIPE... [options]`.

The models are those of recipes, with random weights in bfloat16, and FLA's and transformers' models of the same sizes,
if these libraries are installed (Llama uses flash-attn if installed, else torch's attention). A read is a forward pass
that fills a cache and returns the last token's logits: the time that a user waits for the first new token. For each
model and length the result is the median of a few reads, in which models take turns, and the peak of memory without
weights.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix_core.evaluation.efficiency import Stopwatch
from tokenmix_core.testing.benchmarking import WITHOUT_GPU, table
from tokenmix_core.testing.results import save

sys.path.insert(0, str(Path(__file__).parent))
import step

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "prompts"
DEFAULT = ("gated_delta_net-380m", "transformer-380m")
TOLD = ("op", "shape", "impl", "ms", "thousand_tokens_s", "peak_gib")


def readers(name: str, only: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Return functions that make the recipe's model and its baselines, by name, if the name contains one of `only`."""
    made = {impl.removesuffix(" eager"): make for _, impl, make, form in step.chosen([name]) if form == "eager"}
    return {impl: make for impl, make in made.items() if not only or any(x.lower() in impl.lower() for x in only)}


def _model(make: Callable[[], Any], device: torch.device) -> Any:
    torch.manual_seed(0)
    with device:
        model = make().to(torch.bfloat16).eval()
    if "Llama" in type(model).__name__ and importlib.util.find_spec("flash_attn") is not None:
        model.set_attn_implementation("flash_attention_2")
    return model


@torch.inference_mode()
def read(model: Any, prompt: Tensor) -> None:
    """Fill a cache with a prompt."""
    model(input_ids=prompt, use_cache=True, logits_to_keep=1)


def measure(
    names: Sequence[str], lengths: Sequence[int], *, only: Sequence[str] = (), device: torch.device, turns: int = 5
) -> Iterator[dict[str, Any]]:
    """Yield a row for each recipe, length and model; for a model that fails, print why instead."""
    watch, cuda = Stopwatch(device), device.type == "cuda"
    for name in names:
        models = {impl: _model(make, device) for impl, make in readers(name, only).items()}
        for length in lengths:
            vocabulary = next(iter(models.values())).config.vocab_size
            prompt = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
            times: dict[str, list[float]] = {}
            peaks: dict[str, float | None] = {}
            for impl, model in models.items():
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated() if cuda else 0
                try:
                    # the first call compiles kernels
                    read(model, prompt)
                # baselines raise errors of any type
                except Exception as error:
                    print(f"{impl} does not read {length:,} tokens: {type(error).__name__}: {str(error)[:300]}")
                    continue
                times[impl] = []
                peaks[impl] = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else None
            for _ in range(turns):
                for impl, found in times.items():
                    found.append(watch.time(partial(read, models[impl], prompt)))
            for impl, found in times.items():
                seconds = statistics.median(found)
                yield {
                    "op": f"prompt, {name}",
                    "shape": f"B1 T{length}",
                    "impl": impl,
                    "ms": 1e3 * seconds,
                    "thousand_tokens_s": length / seconds / 1e3,
                    "peak_gib": peaks[impl],
                }


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure and print; on a GPU also save the rows."""
    parser = argparse.ArgumentParser(description="measure reading prompts into caches beside baselines")
    parser.add_argument("recipes", nargs="*", default=list(DEFAULT), help="of core, or module:name")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="models whose name has this")
    parser.add_argument("--length", type=int, action="append", default=[], help="tokens; may be given again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder of the JSON; for a GPU that of the documents")
    given = parser.parse_args(arguments)
    folder = given.out or (RESULTS if given.device != "cpu" else None)
    if given.device == "cpu":
        print(f"prompts.py: {WITHOUT_GPU}", file=sys.stderr, flush=True)
    lengths, found = given.length or ([4096, 2**17] if given.device != "cpu" else [64]), []
    for row in measure(given.recipes, lengths, only=given.only, device=torch.device(given.device)):
        found.append(row)
        print(table([{key: row[key] for key in TOLD}]), flush=True)
        if folder is not None:
            save([row], folder)
    return found


if __name__ == "__main__":
    main()
