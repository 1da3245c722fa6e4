"""Time a decoded token of whole models, and the reading of its bytes: `python decoding.py [--only NAME] [options]`.

The models of recipes, and a Llama of 8B converted to NHA, with random weights in bfloat16, read a prompt. Then each one
runs several turns of captured steps (`model.decoding`), of which the fastest counts. Rows are written at once into the
JSON file of the documents' table and replace older rows of the same device, model, batch size and prompt. All papers'
packages must be installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tokenmix_core._utils.atomic_io import write_atomically
from tokenmix_core.evaluation.efficiency import Stopwatch, cache_bytes, weight_bytes
from tokenmix_core.testing.benchmarking import table
from tokenmix_core.testing.results import environment

sys.path.insert(0, str(Path(__file__).parent))
import step

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "tokens.json"
# maximum number of tokens of a prompt that one call reads
PIECE = 2**17
# the fields that identify a row of the table
KEY = ("model", "size", "batch", "after", "note")
TOLD = (*KEY, "step_ms", "floor_ms", "held_mib", "prompt_s")


@dataclass(frozen=True)
class Job:
    """A row of the table.

    Attributes:
        model, size: names in the table.
        recipe: the recipe `module:name`, or `EIGHT` for the 8B model.
        after: number of tokens of the prompt.
        batch: number of sequences.
        options: for each mixer, the options of its layers that differ from the recipe's.
        share: fraction of softmax chunks in NAtS-L's layers; with None, random weights decide, about a half.
        repeated: whether one prompt is read and its state copied for all sequences.
        note: text in the table that states differences from the recipe.
    """

    model: str
    size: str
    recipe: str
    after: int
    batch: int = 1
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    share: float | None = None
    repeated: bool = False
    note: str | None = None


def jobs() -> list[Job]:
    """Return the rows of the documents' table, grouped by model."""
    nats_l, lte = "tokenmix_nats_l.recipes", "tokenmix_lte.recipes"
    quarter: dict[str, Any] = {"share": 0.25, "note": "a quarter softmax"}
    found = []
    for model, kind, more in (
        ("Gated DeltaNet", "gdn", {}),
        ("Transformer++", "transformer", {}),
        ("Gated DeltaNet and attention", "gdn-hybrid", {}),
        ("Mamba-2", "mamba2", {}),
        ("NAtS-L Hybrid", "nats-l-hybrid", quarter),
    ):
        for size, batch, after in (("380m", 1, 512), ("380m", 32, 512), ("380m", 1, 2**17), ("800m", 1, 512)):
            found.append(Job(model, size.upper(), f"{nats_l}:{kind}-{size}", after, batch, **more))
    for model, recipe in (("NHA", "tokenmix_nha.recipes:nha-340m"), ("Oryx-TM", "tokenmix_oryx.recipes:tm-380m")):
        size = recipe.rpartition("-")[2].upper()
        found += [Job(model, size, recipe, 512, batch) for batch in (1, 32)]
    found += [Job("NHA, a converted Llama", "8B", EIGHT, after) for after in (2048, 2**15, 2**17)]
    once: dict[str, Any] = {"batch": 32, "repeated": True, "note": "one prompt, 32 times"}
    found.append(Job("NHA, a converted Llama", "8B", EIGHT, 2**15, **once))
    for cap in (256, 512):
        told = once | {"note": f"{cap} far keys, {once['note']}", "options": {"lte": {"cap": cap}}}
        lengths = (4096, 2**15, 2**17, 2**20) if cap == 512 else (4096,)
        found += [Job("laLTE", "1.4B", f"{lte}:lalte-1.4b", after, **told) for after in lengths]
    for model, kind, lengths in (
        ("window 1,024", "gdn-swa", (4096, 2**17)),
        ("attention", "gdn-attention", (4096, 2**15)),
    ):
        found += [Job(f"Gated DeltaNet and {model}", "1.4B", f"{lte}:{kind}-1.4b", n, **once) for n in lengths]
    return found


EIGHT = "llama-8b"


def model_of(job: Job, device: torch.device) -> Any:
    """Return the job's model with random weights on the device."""
    from transformers import AutoModelForCausalLM

    with device:
        if job.recipe == EIGHT:
            return _eight()
        module, _, name = job.recipe.partition(":")
        recipe = importlib.import_module(module).RECIPES[name]()
        options = dict(recipe.model["mixer_options"])
        for mixer, changed in job.options.items():
            options[mixer] = {**options[mixer], **changed}
        recipe = replace(recipe, model={**recipe.model, "mixer_options": options})
        return AutoModelForCausalLM.from_config(recipe.model_config(), dtype=torch.bfloat16).eval()


def _eight(**sizes: int) -> Any:
    """Return a model of the size of Llama 3's 8B: every eighth layer stays full attention, the others become NHA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tokenmix_nha.conversion import convert
    from tokenmix_nha.windows import hybrid_windows

    fields: dict[str, Any] = dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=2**17 + 2**10, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    config = LlamaConfig(**(fields | sizes))
    llama = LlamaForCausalLM(config).bfloat16()
    return convert(llama, hybrid_windows(32, 32, range(0, 32, 8)), slots=64).eval()


def drawn(share: float | None) -> AbstractContextManager[Any]:
    """Context manager: low digits of the scores, as random numbers, make about this fraction of chunks softmax."""
    if share is None:
        return nullcontext()
    from tokenmix_nats_l.chunks import ChunkTypes

    def types(scores: torch.Tensor, threshold: object = None) -> ChunkTypes:
        digits = scores.float().unflatten(-1, (2, -1))[..., 0, :].mul(1e4)
        softmax = (digits - digits.floor() < share).float()
        return ChunkTypes(softmax, 1 - softmax, softmax)

    return mock.patch("tokenmix_nats_l.layer.learned_types", types)


@torch.inference_mode()
def measure(job: Job, model: Any, *, tokens: int = 64, turns: int = 2) -> dict[str, Any]:
    """Return a row: the time per token in the best turn, and the time to read weights and state once.

    A turn has 64 tokens, as many as a chunk of NAtS-L or as LTE scores at once, so that it includes work done in one
    step of 64.
    """
    device = model.device
    watch = Stopwatch(device)
    sequences = 1 if job.repeated else job.batch
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, model.config.vocab_size, (sequences, job.after), generator=generator).to(device)
    with drawn(job.share):
        # the first call compiles kernels and allocates memory
        _read(model, prompt)
        outputs: list[Any] = []
        prompt_seconds = watch.time(lambda: outputs.append(_read(model, prompt)))
        output = outputs.pop()
        cache, last = output.cache, output.logits[:, -1:].argmax(-1)
        if job.repeated:
            cache.batch_repeat_interleave(job.batch)
            last = last.repeat_interleave(job.batch, 0)
        del output

        def steps(n: int) -> None:
            given = last
            for _ in range(n):
                given = model(input_ids=given, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)

        with model.decoding(cache):
            # the first steps move the cache, and each form of a step runs twice, the second time to be captured
            steps(2 * tokens + 1)
            held = cache_bytes(cache, allocated=False)
            seconds = min(watch.time(lambda: steps(tokens)) / tokens for _ in range(turns))
    return {
        **{name: getattr(job, name) for name in KEY},
        "step_ms": 1e3 * seconds,
        "floor_ms": 1e3 * (weight_bytes(model) + held) / step.chip_of(device).bytes,
        "held_mib": held / 2**20,
        "prompt_s": prompt_seconds,
    }


def _read(model: Any, prompt: torch.Tensor) -> Any:
    """Read a prompt; a very long one in pieces, because activations of the whole prompt would not fit into memory."""
    cache = None
    for piece in prompt.split(PIECE, 1):
        output = model(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
    return output


def rows(chosen: Sequence[Job], device: torch.device) -> Iterator[dict]:
    """Yield a row for each job; consecutive jobs with the same recipe, options and share use one model."""
    model, of = None, None
    for job in chosen:
        print(f"{job.model} {job.size}, {job.batch} x {job.after:,}", file=sys.stderr, flush=True)
        if of != (job.recipe, job.options, job.share):
            # free the model before the next one is made
            model = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            model, of = model_of(job, device), (job.recipe, job.options, job.share)
        start = time.perf_counter()
        yield measure(job, model)
        print(f"took {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def keep(row: dict[str, Any], path: Path) -> None:
    """Write a row into the JSON file; it replaces the row of the same job on the same device."""
    found = json.loads(path.read_text()) if path.exists() else []
    row = {**row, "environment": environment()}
    same = [i for i, other in enumerate(found) if _identity(other) == _identity(row)]
    if same:
        found[same[0]] = row
    else:
        found.append(row)
    write_atomically(path, json.dumps(found, indent=1) + "\n")


def _identity(row: dict[str, Any]) -> list[Any]:
    return [row["environment"]["device"], *(row[name] for name in KEY)]


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure and print; on a GPU also save the rows."""
    parser = argparse.ArgumentParser(description="measure a token of whole models beside its bytes")
    only = 'rows whose model and size have this, such as "NHA" or "380M"; may be given again'
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=only)
    parser.add_argument("--after", type=int, action="append", default=[], help="rows with a prompt of so many tokens")
    parser.add_argument("--out", type=Path, help="the JSON; for a GPU by default that of the documents")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = given.out or (RESULTS if device.type == "cuda" else None)
    chosen = [
        job
        for job in jobs()
        if (not given.only or any(part.lower() in f"{job.model} {job.size}".lower() for part in given.only))
        and (not given.after or job.after in given.after)
    ]
    if not chosen:
        parser.error(f"no row has {', '.join(map(str, given.only + given.after))}")
    found = []
    for row in rows(chosen, device):
        found.append(row)
        print(table([{name: row[name] for name in TOLD}]), flush=True)
        if path is not None:
            keep(row, path)
    return found


if __name__ == "__main__":
    main()
