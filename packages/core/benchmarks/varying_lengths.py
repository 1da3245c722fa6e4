"""Measure training and generation at new lengths in every call: `python varying_lengths.py [RECIPE...] [options]`.

Each recipe's model is trained with a new length in every step (`varying`) and with one length (`fixed`), in one
process, by blocks of steps that take turns, as single rows (`rows`) and as packed documents whose number changes, too
(`packed`). Then it generates (`generate`): both kinds of calls take the same batch sizes in turns, those of `varying`
with a new prompt length in every call, those of `fixed` with one, so that the ratio is the cost of new shapes alone.
After ten warm steps of both kinds the ratio of tokens a second shall be at least .95, and memory shall not grow.

It prints one JSON line for each recipe and form, with thousand tokens a second, their ratio, host and GPU memory in MiB
at step 50 and at the end, device, versions and commit. Lines of `generate` also have `dtype` (of the weights),
`one_batch_thousand_tokens_s` (one prompt length and the mean batch size alone; it differs from `fixed` as far as the
time of a step is not linear in the batch size), `ms_by_batch` (the fastest of five calls with one prompt length, for
batch sizes from 1 on), and `fixed_prompt_ms` and `varying_prompt_ms` (calls of one new token). `--together N` first
lets N processes at a time compile the kernels, which wait in Triton's cache on disk for the measurement.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import itertools
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tokenmix_core.testing.results import environment

DEFAULT = (
    "gated_delta_net-380m",
    "mamba2-380m",
    "transformer-380m",
    "tokenmix_nha.recipes:nha-340m",
    "tokenmix_nha.recipes:gsa-340m",
    "tokenmix_lte.recipes:lalte-0.4b",
    "tokenmix_lte.recipes:lansa-0.4b",
    "tokenmix_nats_l.recipes:nats-l-hybrid-380m",
    "tokenmix_oryx.recipes:tm-380m",
)
FORMS = ("rows", "packed", "generate")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement.

    Attributes:
        layers: maximum number of layers of the model; 0 for the recipe's number.
        fixed: tokens per step if all steps have one length.
        least, most: minimum and maximum tokens per step if lengths vary.
        documents: mean number of documents in a packed row.
        warm: number of steps of each kind that are not timed.
        block: number of steps that are timed together; each block of `generate` has every batch size equally often.
        steps: number of steps with new lengths, warm ones included.
        early: the step after which memory is measured for the first time.
        batches: batch sizes of `generate`.
        prompts: the least and the largest length of a prompt; their mean is the fixed one.
        new: number of tokens to generate.
    """

    layers: int = 8
    fixed: int = 8192
    least: int = 7000
    most: int = 9400
    documents: int = 12
    warm: int = 10
    block: int = 10
    steps: int = 50
    early: int = 50
    batches: tuple[int, ...] = (4, 2, 6, 1, 7, 3, 5)
    prompts: tuple[int, int] = (128, 896)
    new: int = 64


SMOKE = Sizes(
    layers=2, fixed=64, least=40, most=88, documents=3, warm=2, block=2, steps=6, early=4, batches=(2, 1, 3),
    prompts=(8, 24), new=4,
)  # fmt: skip


def config_of(name: str, layers: int, *, smoke: bool = False) -> Any:
    """Return the configuration of a recipe of core, or of `module:name`, with fewer layers, but all kinds of layers.

    Args:
        name: the recipe's name.
        layers: maximum number of layers; 0 for the recipe's number.
        smoke: whether to use the sizes of the package's recipe `tiny`.

    Raises:
        ValueError: an unknown recipe.
    """
    module, _, recipe = name.rpartition(":")
    module = module or "tokenmix_core.training.baselines"
    recipes = import_module(module).RECIPES
    if recipe not in recipes:
        raise ValueError(f"no recipe {recipe!r} in {module}; there is {', '.join(recipes)}")
    meant = recipes["tiny" if smoke else recipe]()
    fields = dict(meant.model)
    every = [*itertools.islice(itertools.cycle(fields["mixers"]), fields["num_hidden_layers"])]
    if 0 < layers < len(every):
        kinds = [*dict.fromkeys(every)]
        kept = every[:layers]
        missing = [kind for kind in kinds if kind not in kept]
        fields["mixers"] = kept[: layers - len(missing)] + missing
        fields["num_hidden_layers"] = layers
    return replace(meant, model=fields).model_config()


class Measurement:
    """A model whose steps are measured at one length and at varying lengths.

    Args:
        config: the model's configuration.
        sizes: the sizes of the measurement.
        device: the device on which it runs.
        dtype: dtype of the weights in `generate`; training has float32 weights, on a GPU with autocast to bfloat16.
    """

    def __init__(self, config: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.sizes, self.device, self.dtype, self.drawn = sizes, device, dtype, random.Random(0)
        self.model = AutoModelForCausalLM.from_config(config).to(device)
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=cuda or None)
        self.ids = torch.randint(0, config.vocab_size, (1, max(sizes.most, sizes.fixed)), device=device)
        # no length is used twice, unless all have been used; each turn has the batch sizes in random order
        self._lengths: list[int] = []
        self._batches: list[int] = []
        self.compiled: list[str] = []
        _tell_compiled(self.compiled)

    def length(self) -> int:
        """Return a length that was not used before, unless all have been used."""
        if not self._lengths:
            self._lengths = [x for x in range(self.sizes.least, self.sizes.most) if x != self.sizes.fixed]
            self.drawn.shuffle(self._lengths)
        return self._lengths.pop()

    def batch(self) -> int:
        """Return the next batch size."""
        if not self._batches:
            self._batches = self.drawn.sample(self.sizes.batches, len(self.sizes.batches))
        return self._batches.pop()

    def boundaries(self, tokens: int, documents: int) -> torch.Tensor:
        """Return random boundaries of this number of documents."""
        inside = sorted(self.drawn.sample(range(1, tokens), documents - 1))
        return torch.tensor([0, *inside, tokens], dtype=torch.int32).to(self.device, non_blocking=True)

    def train(self, *, packed: bool, varying: bool) -> int:
        """Take a training step; return its number of tokens."""
        sizes, inputs = self.sizes, {}
        tokens = self.length() if varying else sizes.fixed
        if packed:
            number = self.drawn.randint(2, 2 * sizes.documents - 2) if varying else sizes.documents
            inputs["cu_seqlens"] = self.boundaries(tokens, number)
        ids = self.ids[:, :tokens]
        half = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()
        with half:
            loss = self.model(ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tokens

    def generate(self, *, varying: bool, batch: int | None = None, new: int | None = None) -> int:
        """Generate with the given or the next batch size; return the number of new tokens."""
        least, most = self.sizes.prompts
        batch, new = batch or self.batch(), new or self.sizes.new
        prompt = self.drawn.randint(least, most) if varying else (least + most) // 2
        ids = self.ids[0, :prompt].expand(batch, -1).contiguous()
        out = self.model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return out[:, prompt:].numel()

    def parts(self, calls: int = 5) -> dict[str, Any]:
        """Measure only `generate`: return its speed by batch size at one prompt length, and the time of prompts."""
        ms, batches = {}, self.sizes.batches
        for batch in range(1, max(batches) + 2):
            step = partial(self.generate, batch=batch)
            self.time(step, 2, varying=False)
            ms[str(batch)] = round(min(self.time(step, 1, varying=False)[1] for _ in range(calls)) * 1e3, 2)
        tokens, seconds = self.time(partial(self.generate, batch=sum(batches) // len(batches)), calls, varying=False)
        prompt, turns = partial(self.generate, new=1), 4 * len(batches)
        alone = [round(self.time(prompt, turns, varying=x)[1] * 1e3 / turns, 2) for x in (False, True)]
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "one_batch_thousand_tokens_s": round(tokens / seconds / 1e3, 3),
            "ms_by_batch": ms,
            "fixed_prompt_ms": alone[0],
            "varying_prompt_ms": alone[1],
        }

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, step: Callable[..., int], steps: int, *, varying: bool) -> tuple[int, float]:
        """Return the tokens and the seconds of this number of steps."""
        self.wait()
        start = time.perf_counter()
        tokens = sum(step(varying=varying) for _ in range(steps))
        self.wait()
        return tokens, time.perf_counter() - start

    def memory(self) -> dict[str, float | None]:
        """Return the MiB of the process on the host, and the MiB that tensors and torch hold on the device."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if os.path.exists("/proc/self/statm") else 0
        cuda = self.device.type == "cuda"
        return {
            "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "allocated_mib": torch.cuda.memory_allocated() / 2**20 if cuda else None,
            "reserved_mib": torch.cuda.memory_reserved() / 2**20 if cuda else None,
        }

    def profile(self, form: str, *, varying: bool, steps: int = 5) -> str:
        """Return a profile of the host in a few steps as text: functions by their own time and by total time."""
        step = self.step(form)
        with torch.autograd.set_multithreading_enabled(False), self.mode(form):
            seen = cProfile.Profile()
            seen.runcall(self.time, step, steps, varying=varying)
        text = io.StringIO()
        for order in ("tottime", "cumulative"):
            pstats.Stats(seen, stream=text).strip_dirs().sort_stats(order).print_stats(45)
        return text.getvalue()

    def step(self, form: str) -> Callable[..., int]:
        """Return the function `step(varying=...)` of a form."""
        return self.generate if form == "generate" else partial(self.train, packed=form == "packed")

    def mode(self, form: str) -> Any:
        """Return the context of torch in which a form runs."""
        return torch.inference_mode() if form == "generate" else nullcontext()

    def compare(self, form: str) -> dict[str, Any]:
        """Measure one form: both kinds of steps in turns, then new lengths only until the last step."""
        sizes = self.sizes
        if form == "generate":
            # round the numbers of steps up to whole turns
            turns = len(sizes.batches)
            whole = {name: -(-getattr(sizes, name) // turns) * turns for name in ("warm", "block", "steps", "early")}
            sizes = replace(sizes, **whole)
        self.model.train(form != "generate").to(self.dtype if form == "generate" else torch.float32)
        step, first = self.step(form), time.perf_counter()
        with self.mode(form):
            for varying in (False, True):
                self.time(step, sizes.warm, varying=varying)
            first = time.perf_counter() - first
            self.compiled.clear()
            taken: dict[bool, list[float]] = {False: [], True: []}
            blocks = max(1, (min(sizes.steps, sizes.early) - sizes.warm) // sizes.block)
            for varying in (False, True) * blocks:
                tokens, seconds = self.time(step, sizes.block, varying=varying)
                taken[varying].append(tokens / seconds / 1e3)
            done = sizes.warm + blocks * sizes.block
            if done < sizes.early < sizes.steps:
                self.time(step, sizes.early - done, varying=True)
                done = sizes.early
            early, after = self.memory(), done
            if done < sizes.steps:
                self.time(step, sizes.steps - done, varying=True)
                done = sizes.steps
            late, compiled = self.memory(), sorted(set(self.compiled))
            parts = self.parts() if form == "generate" else {}
        fixed, varied = (statistics.median(taken[x]) for x in (False, True))
        return {
            "form": form,
            "fixed_thousand_tokens_s": round(fixed, 3),
            "varying_thousand_tokens_s": round(varied, 3),
            "ratio": round(varied / fixed, 4),
            "fixed_blocks": [round(x, 3) for x in taken[False]],
            "varying_blocks": [round(x, 3) for x in taken[True]],
            "warm_s": round(first, 2),
            "compiled_later": compiled,
            "early_step": after,
            "early": early,
            "steps": done,
            "end": late,
            **parts,
        }


def _tell_compiled(names: list[str]) -> None:
    """Append to a list the name of each kernel that Triton compiles from now on."""
    import triton

    hooks = triton.knobs.runtime
    hooks.jit_post_compile_hook = lambda **given: names.append(given["fn"].name)


def measure(names: Sequence[str], forms: Sequence[str], sizes: Sizes, given: argparse.Namespace) -> Iterator[dict]:
    """Yield a row for each recipe and form; a model that fails gives a row with its error."""
    where = environment()
    for name in names:
        one = None
        for form in forms:
            about = {"recipe": name, "layers": sizes.layers, **where}
            try:
                config = config_of(name, sizes.layers, smoke=given.smoke)
                one = one or Measurement(config, sizes, torch.device(given.device), getattr(torch, given.dtype))
                yield {**about, **one.compare(form)}
                for varying in (False, True) if given.profile else ():
                    title = f"{name}, {form}, {'varying' if varying else 'fixed'}"
                    print(f"==== {title}\n{one.profile(form, varying=varying)}", file=sys.stderr, flush=True)
            # go on with the other forms
            except Exception as error:
                yield {**about, "form": form, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        one = None
        gc.collect()
        if given.device != "cpu":
            torch.cuda.empty_cache()


def compile_kernels(names: Sequence[str], forms: Sequence[str], given: argparse.Namespace) -> None:
    """Take the first steps of each recipe in a process of its own, in `given.together` processes at a time."""

    def run(name: str) -> None:
        command = [sys.executable, __file__, name, "--forms", *forms, "--layers", str(given.layers)]
        command += ["--dtype", given.dtype, "--compile-only"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)

    with ThreadPoolExecutor(given.together) as pool:
        list(pool.map(run, names))


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure, and print one JSON object per line."""
    parser = argparse.ArgumentParser(description="compare new lengths in every call with one length")
    parser.add_argument("recipes", nargs="*", default=list(DEFAULT), help="of core, or module:name")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--layers", type=int, default=Sizes.layers, help="of each model, at most; 0 for the recipe's")
    parser.add_argument("--steps", type=int, help="with new lengths, the warm ones among them; memory is compared")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="compile first, N recipes at a time")
    parser.add_argument("--compile-only", action="store_true", help="take a few steps and measure nothing")
    parser.add_argument(
        "--profile", action="store_true", help="tell on stderr what the host does in steps of each kind"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights in generate")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    sizes = SMOKE if given.smoke else replace(Sizes(), layers=given.layers)
    if given.steps is not None:
        sizes = replace(sizes, steps=given.steps)
    if given.compile_only:
        sizes = replace(sizes, layers=min(sizes.layers, 4), warm=3, block=1, steps=4, new=8)
    if given.together:
        start = time.perf_counter()
        compile_kernels(given.recipes, given.forms, given)
        print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    rows = []
    for row in measure(given.recipes, given.forms, sizes, given):
        rows.append(row)
        print(json.dumps(row, ensure_ascii=False), flush=True)
    return rows


if __name__ == "__main__":
    main()
