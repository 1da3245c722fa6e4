"""Time a training step by kind of kernel and compare it with its floor: `python step.py RECIPE... [options]`.

A step is forward, backward, clipping and fused AdamW, with float32 weights under bfloat16 autocast, as recipes train.
Models named by recipe (of core, or `tokenmix_nats_l.recipes:gdn-380m`) run eagerly, with passes captured as a CUDA
graph (`training_graph`), and compiled; so do FLA's and transformers' models of the same sizes, if installed. `--only`
selects models by name. For each model the results are: thousand tokens per second, peak GiB, seconds of the first step,
milliseconds of device time by kind of kernel, and the floor as a fraction of the time.

Each model takes a turn as soon as it is warm, ours first; then all models, still in memory, take turns in rounds, and
the median of the turns counts. A row is printed and saved after each turn, with the number of finished rounds, so that
an interrupted run keeps its rows; 0 rounds mark the turn that a model took alone. With `--rounds 0` each model is freed
after its turn, so that the GPU's memory need hold only one. `step_floor.py` defines the floor.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from step_floor import as_run, chip_of, floor, kind_of
from torch import Tensor, nn

from tokenmix_core.testing.benchmarking import WITHOUT_GPU, table
from tokenmix_core.testing.results import OURS, save
from tokenmix_core.training.cuda_graph import GraphedStep, Losses

DEFAULT = ("gated_delta_net-380m", "transformer-380m")
CPU_SIZES = {"rows": 1, "length": 64, "steps": 1, "rounds": 1}
RESULTS = Path(__file__).parent / "results" / "step"

Form = Literal["eager", "graph", "compiled"]


def kept_bytes(model: Any, ids: Tensor) -> int:
    """Return the bytes that a forward pass saves for its backward pass, except parameters; storages count once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    # all saved tensors stay alive until the end, so that no address is reused
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), autocast(ids.device):
        loss = model(ids, labels=ids).loss
    del loss
    return sum(kept.values())


def autocast(device: torch.device) -> Any:
    """Return autocast to bfloat16 on a GPU, as in training by recipes; on a CPU a context that changes nothing."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Training:
    """A model with its optimizer, whose training steps are measured.

    Attributes:
        model: the model, not compiled.
        resident: bytes of weights, gradients and the optimizer's state.
        first: seconds of the first step.
        peak: peak bytes without the memory of other models; with a CUDA graph, the warm steps before it are included.
    """

    def __init__(self, make: Callable[[], nn.Module], device: torch.device, form: Form) -> None:
        self.device = device
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        torch.manual_seed(0)
        self.model = make().to(device).train()
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False
        self.run = torch.compile(self.model) if form == "compiled" else self.model
        self.recorded = GraphedStep(self.model, device) if form == "graph" else None
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=cuda or None)
        self._before, self.resident, self.first, self.peak = before, 0, 0.0, 0

    def step(self, ids: Tensor) -> Tensor:
        """Run forward, backward, clipping and AdamW."""
        inputs = {"input_ids": ids, "labels": ids}
        made = self._passes(inputs) if self.recorded is None else self.recorded(self._passes, inputs, None)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return made.loss

    def _passes(self, inputs: dict[str, Tensor], items: None = None) -> Losses:
        with autocast(self.device):
            loss = self.run(**inputs).loss
        loss.backward()
        return Losses(loss.detach(), {})

    def warm(self, ids: Tensor, steps: int) -> list[float]:
        """Run the first steps and return their losses."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses = [float(self.step(ids))]
        self.first = time.perf_counter() - start
        losses += [float(self.step(ids)) for _ in range(steps)]
        if self.device.type == "cuda":
            if self.recorded is not None:
                self.peak = torch.cuda.max_memory_allocated() - self._before
            gc.collect()
            torch.cuda.empty_cache()
            self.resident = torch.cuda.memory_allocated() - self._before
        return losses

    def time(self, ids: Tensor, steps: int) -> float:
        """Return the milliseconds of a step, the mean over `steps` steps between two events."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(steps):
                self.step(ids)
            return (time.perf_counter() - start) * 1e3 / steps
        others = torch.cuda.memory_allocated() - self.resident
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self.step(ids)
        end.record()
        end.synchronize()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
        return begin.elapsed_time(end) / steps

    def profile(self, ids: Tensor, steps: int = 3) -> dict[str, float]:
        """Return the milliseconds of device time per step by kind of kernel, the largest first; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            for _ in range(steps):
                self.step(ids)
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        for event in seen.events():
            # annotated ranges span kernels, which would then count twice
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                kind = kind_of(event.name)
                times[kind] = times.get(kind, 0.0) + event.time_range.elapsed_us() / 1e3 / steps
        return dict(sorted(times.items(), key=lambda item: -item[1]))


def recipe_named(name: str) -> Any:
    """Return a recipe of core by its name, or of another package by `module:name`."""
    module, _, recipe = name.rpartition(":")
    recipes = importlib.import_module(module or "tokenmix_core.training.baselines").RECIPES
    if recipe not in recipes:
        raise ValueError(f"step.py: no recipe {recipe!r} in {module or 'tokenmix_core.training.baselines'}")
    return recipes[recipe]()


def models(recipe: Any) -> dict[str, tuple[Callable[[], nn.Module], Form]]:
    """Return, by name, a function that makes a model and the form in which it runs: the recipe's, then baselines."""
    from transformers import AutoModelForCausalLM

    config = recipe.model_config()
    forms: tuple[Form, ...] = ("eager", "graph", "compiled")
    made: dict[str, tuple[Callable[[], nn.Module], Form]] = {
        f"{OURS} {form}": (lambda: AutoModelForCausalLM.from_config(config), form) for form in forms
    }
    mixers = {config.mixer_type(i) for i in range(config.num_hidden_layers)} if hasattr(config, "mixer_type") else set()
    if mixers == {"attention"}:
        heads = config.options_of(0)["num_heads"]
        for form in ("eager", "compiled"):
            made[f"transformers Llama {form}"] = (lambda: _llama(config, heads), form)
    if importlib.util.find_spec("fla") is not None and len(mixers) == 1 and mixers <= {"attention", "gated_delta_net"}:
        made["FLA eager"] = (lambda: _fla(config), "eager")
    return made


def _sizes(config: Any) -> dict[str, Any]:
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings")
    return {name: getattr(config, name) for name in (*fields, "max_position_embeddings")}


def _llama(config: Any, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(config), num_attention_heads=heads, num_key_value_heads=heads))


def _fla(config: Any) -> nn.Module:
    from fla.models import (  # type: ignore[import-not-found]
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        TransformerConfig,
        TransformerForCausalLM,
    )

    options = config.options_of(0)
    if config.mixer_type(0) == "attention":
        return TransformerForCausalLM(TransformerConfig(**_sizes(config), num_heads=options["num_heads"]))
    names = ("num_heads", "head_dim", "expand_v")
    return GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**_sizes(config), **{name: options[name] for name in names}))


@dataclass
class Measured:
    """One warm model of a recipe, and the times of its turns."""

    name: str
    impl: str
    training: Training
    ids: Tensor
    losses: list[float]
    floor: dict[str, float]
    kept: int | None
    times: list[float] = field(default_factory=list)

    def row(self, rounds: int, kinds: dict[str, float] | None = None) -> dict[str, Any]:
        """Return a row of the JSON file after this number of rounds; its time is the median of the turns."""
        (B, T), ms = self.ids.shape, statistics.median(self.times)
        return {
            "op": f"training step, {self.name}",
            "shape": f"B{B} T{T}",
            "impl": self.impl,
            "rounds": rounds,
            "step_ms": ms,
            "thousand_tokens_s": B * T / ms,
            "peak_gib": self.training.peak / 2**30 if self.ids.device.type == "cuda" else None,
            "kept_gib": None if self.kept is None else self.kept / 2**30,
            "first_step_s": self.training.first,
            "floor_ms": self.floor["all"],
            "share_of_floor": self.floor["all"] / ms,
            "floor": self.floor,
            "kinds_ms": kinds or {},
            "share_as_run": as_run(self.floor, kinds) / ms if kinds else None,
            "losses": self.losses,
        }


def chosen(names: Sequence[str], only: Sequence[str] = ()) -> list[tuple[str, str, Callable[[], nn.Module], Form]]:
    """Return recipe, name, maker and form of the models whose name contains one of `only` (or of all), ours first.

    Raises:
        ValueError: an unknown recipe, or an entry of `only` that no model's name contains.
    """
    every = [(name, impl, *made) for name in names for impl, made in models(recipe_named(name)).items()]
    known = list(dict.fromkeys(impl for _, impl, _, _ in every))
    for part in only:
        if not any(part.lower() in impl.lower() for impl in known):
            raise ValueError(f"--only {part!r} is in the name of no model, there is {', '.join(known)}")
    meant = [one for one in every if not only or any(part.lower() in one[1].lower() for part in only)]
    # baselines may warm up for minutes
    return sorted(meant, key=lambda one: not one[1].startswith(OURS))


def measure(
    names: Sequence[str],
    *,
    rows: int,
    length: int,
    device: str,
    only: Sequence[str] = (),
    steps: int = 10,
    rounds: int = 5,
    warmup: int = 3,
) -> Iterator[dict[str, Any]]:
    """Yield a row after each turn of `steps` steps: of one model once it is warm, then of all in memory by rounds.

    A later row of a model replaces its earlier ones; the last has the time by kind of kernel. A model that fails is
    left out, with a line that says why.
    """
    from transformers import AutoModelForCausalLM

    where = torch.device(device)
    warm: list[Measured] = []
    meant = chosen(names, only)
    for position, (name, impl, make, form) in enumerate(meant, 1):
        say(f"{position} of {len(meant)}: warming {name}, {impl}")
        config = recipe_named(name).model_config()
        generator = torch.Generator(where).manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator, device=where)
        # only shapes are needed, so that a baseline gets its floor without our model
        with torch.device("meta"):
            parts = floor(AutoModelForCausalLM.from_config(config), rows, length, chip_of(where))
        try:
            one = _warmed(Training(make, where, form), name, impl, ids, parts, warmup, keep=rounds > 0)
            one.times = [one.training.time(ids, steps)]
            row = one.row(0, None if rounds else one.training.profile(ids))
        # baselines and compilers raise errors of any type
        except Exception as error:
            print(f"{impl} does not run {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            one = row = None
        if row is not None:
            yield row
            warm += [one] if rounds else []
        # free the memory of a model that failed or had its only turn
        one = None
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
    for done in range(rounds):
        say(f"round {done + 1} of {rounds}")
        for one in warm:
            # the first round replaces the time of the turn that the model took alone
            one.times = [*(one.times if done else ()), one.training.time(one.ids, steps)]
            yield one.row(done + 1)
    for one in warm if where.type == "cuda" else ():
        say(f"kernels of {one.name}, {one.impl}")
        yield one.row(rounds, one.training.profile(one.ids))


def _warmed(
    training: Training, name: str, impl: str, ids: Tensor, parts: dict[str, float], warmup: int, *, keep: bool
) -> Measured:
    """Return a model after its first steps; with `keep`, also count bytes that our eager model saves for backward."""
    losses = training.warm(ids, warmup)
    if training.recorded is not None and not any(training.recorded.graphs.values()):
        raise RuntimeError("no passes were recorded")
    kept = kept_bytes(training.model, ids) if keep and impl == f"{OURS} eager" else None
    say(f"first step after {training.first:.1f} s; a turn alone")
    return Measured(name, impl, training, ids, losses, parts, kept)


def say(line: str) -> None:
    """Print a line about the progress to stderr."""
    print(line, file=sys.stderr, flush=True)


# the columns that are printed; the JSON file has more
TOLD = ["op", "impl", "rounds", "step_ms", "thousand_tokens_s", "peak_gib", "kept_gib", "first_step_s"]
TOLD += ["share_of_floor", "share_as_run"]


def report(found: Sequence[dict]) -> str:
    """Return the rows as text, followed by the floor's parts and the kernels by kind."""
    lines = [table([{key: row[key] for key in TOLD} for row in found])] if found else ["nothing ran"]
    floors = {row["op"]: row["floor"] for row in found}
    told = [(f"{op}, floor", parts) for op, parts in floors.items()]
    told += [(f"{row['op']}, {row['impl']}, kernels", row["kinds_ms"]) for row in found if row["kinds_ms"]]
    lines += [f"{title}, ms: " + ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items()) for title, parts in told]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[dict]:
    """Measure and print; on a GPU also save the rows."""
    parser = argparse.ArgumentParser(description="measure training steps beside their floor and their baselines")
    parser.add_argument("recipes", nargs="*", default=list(DEFAULT), help="of core, or module:name")
    only = 'models whose name has this, such as "tokenmix", "tokenmix eager", "compiled", "FLA"; may be given again'
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=only)
    parser.add_argument("--rows", type=int, help="default: 8, on a CPU 1")
    parser.add_argument("--length", type=int, help="default: 4096, on a CPU 64")
    parser.add_argument("--steps", type=int, help="of a turn; default: 10, on a CPU 1")
    parser.add_argument("--rounds", type=int, help="turns of each model beside the others; default: 5, on a CPU 1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help=f"folder of the JSON; for a GPU {RESULTS.name}/ beside the others")
    given = parser.parse_args(arguments)
    folder = given.out or (RESULTS if given.device != "cpu" else None)
    if given.device == "cpu":
        print(f"step.py: {WITHOUT_GPU}", file=sys.stderr, flush=True)
    sizes = {"rows": 8, "length": 4096, "steps": 10, "rounds": 5} if given.device != "cpu" else CPU_SIZES
    sizes = {name: size if getattr(given, name) is None else getattr(given, name) for name, size in sizes.items()}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in measure(given.recipes, only=given.only, device=given.device, **sizes):
        found[row["op"], row["impl"]] = row
        header, line = table([{key: row[key] for key in TOLD}]).splitlines()
        if not row["kinds_ms"]:
            print(line if len(found) > 1 or row["rounds"] else f"{header}\n{line}", flush=True)
        if folder is not None:
            save([row], folder)
    print(report(list(found.values())))
    if folder is not None and found:
        print(f"kept in {folder}")
    return list(found.values())


if __name__ == "__main__":
    main()
