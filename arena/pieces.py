"""Pieces of a comparison: what is to be run, what was, and one piece from its recipe to its JSON file."""

from __future__ import annotations

import io
import json
import math
import shutil
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from arena.contestants import BOUNDED, CONTESTANTS, DIVISIONS, EVERYBODY, EVICTIONS, run_in, solve, taking_part
from arena.sizes import Size
from arena.store import COSTS, Key, add, read
from arena.tasks import ARENA_SUITES, MQAR, TASKS, recipe, suites
from tokenmix_core.commands import device_and_dtype, load_model, load_tokenizer
from tokenmix_core.evaluation.efficiency import measure_inference, measure_training
from tokenmix_core.evaluation.suites import evaluate
from tokenmix_core.testing.results import environment
from tokenmix_core.training import checkpoint, trainer
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.recipe import Recipe
from tokenmix_lte.training_free import Method, in_constant_memory

# the share of a run's end whose mean loss chooses the rate
_LAST = 0.1
# about as many points of what callbacks log are kept
_POINTS = 20


class Piece(NamedTuple):
    """One run of training and its measurements."""

    division: str
    contestant: str
    task: str
    rate: float
    seed: int

    @property
    def key(self) -> Key:
        """Its identity in the store."""
        return Key(*self)


class CostPiece(NamedTuple):
    """Speed and memory of one contestant at one length of context."""

    division: str
    contestant: str
    length: int

    @property
    def key(self) -> Key:
        """Its identity in the store."""
        return Key(self.division, self.contestant, COSTS, self.length, None)


@dataclass(frozen=True)
class Comparison:
    """One comparison: its size and contestants, and where its results lie.

    Attributes:
        size: of everything.
        results: the folder of the results of all sizes.
        divisions, contestants, tasks: the part of the comparison that is looked at, by name; none given: what belongs
            to the size.
    """

    size: Size
    results: Path
    divisions: tuple[str, ...] = ()
    contestants: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        every = {"divisions": DIVISIONS, "contestants": EVERYBODY, "tasks": tuple(TASKS)}
        for part, names in every.items():
            object.__setattr__(self, part, getattr(self, part) or getattr(self.size, part) or names)
        for what, names, known in (
            ("division", self.divisions, DIVISIONS),
            ("contestant", self.contestants, CONTESTANTS),
            ("task", self.tasks, TASKS),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"there is no {what} {unknown[0]!r}; choose from {', '.join(known)}")
        if not any(self.entrants(division) for division in self.divisions):
            raise ValueError(
                f"none of {', '.join(self.contestants)} takes part in the division {' or '.join(self.divisions)}"
            )

    @property
    def folder(self) -> Path:
        """The folder of the size's results."""
        return self.results / self.size.name

    def entrants(self, division: str) -> list[str]:
        """The contestants of a division that are looked at."""
        return [c.name for c in taking_part(division) if c.name in self.contestants]

    def runs(self) -> list[tuple[str, str, str]]:
        """Division, task and contestant of all that is to be run, each once, and a table's rows one after another."""
        found = [
            (run_in(contestant, division, self.size), task, contestant)
            for division in self.divisions
            for task in self.tasks
            for contestant in self.entrants(division)
        ]
        return list(dict.fromkeys(found))

    def tuning(self, division: str, task: str, contestant: str) -> list[Piece]:
        """The pieces that choose the rate: one for each of the grid, at a seed that no result counts.

        Those of an ablation are of what it ablates.
        """
        size = self.size
        contestant = CONTESTANTS[contestant].ablates or contestant
        division = run_in(contestant, division, size)
        return [Piece(division, contestant, task, rate, size.tuning_seed) for rate in size.rates]

    def rate(self, division: str, task: str, contestant: str) -> float | None:
        """The chosen rate, that of the least loss at the end of training; None before all of the grid were tried.

        A run that diverged lost. Where all did, the smallest rate stands for the contestant.
        """
        tried = {piece.rate: self.read(piece) for piece in self.tuning(division, task, contestant)}
        if any(result is None for result in tried.values()):
            return None
        losses = {rate: result["last loss"] for rate, result in tried.items() if result is not None}
        return min(sorted(losses), key=lambda rate: math.inf if losses[rate] is None else losses[rate])

    def counted(self, division: str, task: str, contestant: str) -> list[Piece]:
        """The pieces whose results count, at the chosen rate; none before it is chosen."""
        rate = self.rate(division, task, contestant)
        division = run_in(contestant, division, self.size)
        return [] if rate is None else [Piece(division, contestant, task, rate, seed) for seed in self.size.seeds]

    def costs(self, *divisions: str) -> list[CostPiece]:
        """The measurements of speed and memory for these divisions, by default for all, short contexts first."""
        found = [
            CostPiece(run_in(name, division, self.size), name, length)
            for division in divisions or self.divisions
            for length in self.size.cost_lengths
            for name in self.entrants(division)
        ]
        return list(dict.fromkeys(found))

    def ready(self) -> list[Piece]:
        """Find the pieces that can be run now: rates that were not tried, and seeds at rates that are chosen.

        A contestant's seeds come before the rates of the next, so that a comparison that is cut off has whole rows.
        """
        found = []
        for run in self.runs():
            found += [p for p in (*self.tuning(*run), *self.counted(*run)) if self.read(p) is None]
        # an ablation's rates are tried for it and for what it ablates
        return list(dict.fromkeys(found))

    def unmeasured(self) -> list[CostPiece]:
        """Find the measurements of speed and memory that are left."""
        return [piece for piece in self.costs() if self.read(piece) is None]

    def read(self, piece: Piece | CostPiece) -> dict[str, Any] | None:
        """The result of a piece; None before it is done.

        Raises:
            ValueError: it was made under another rule, or is damaged.
        """
        if (stored := read(self.folder, piece.key)) is None:
            return None
        made, rule = stored.result["rule"], fingerprint(piece, self.size)
        if made != rule:
            raise ValueError(f"{stored.source} was made under another rule ({made}, now {rule}); remove it to go on")
        return stored.result


@cache
def fingerprint(piece: Piece | CostPiece, size: Size) -> str:
    """Hash all that a result depends on beside the code: recipe and suites' options, or shape and length."""
    if isinstance(piece, CostPiece):
        about: Any = [solve(piece.contestant, piece.division, size).fields, piece.length]
    else:
        chosen = suites(CONTESTANTS[piece.contestant], piece.task, size)
        options = {name: asdict(value) for name, value in chosen.items()}
        about = [recipe_of(piece, size).identity(), options]
        if held := evictions(piece, size):
            about.append(held)
    return blake2b(json.dumps(about, sort_keys=True, default=list).encode(), digest_size=8).hexdigest()


def recipe_of(piece: Piece, size: Size) -> Recipe:
    """The recipe of a piece."""
    return recipe(piece.contestant, piece.division, piece.task, size, piece.rate, piece.seed)


class StopAt(TrainerCallback):
    """Ends training with a checkpoint once the clock has reached a time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if time.time() >= self.deadline:
            control.should_save = control.should_training_stop = True


def run_piece(piece: Piece, comparison: Comparison, work: Path, *, deadline: float, commit: str, jobs: int = 1) -> bool:
    """Train and measure, from where an earlier call stopped; return whether the result is there.

    Args:
        piece: what to run.
        comparison: the comparison that it is of.
        work: a folder for what is there only until the piece is done.
        deadline: when to stop, in seconds since the epoch; training ends there with a checkpoint, and measuring does
            not begin.
        commit: of the code.
        jobs: pieces that run beside each other, which says what a wall-clock time is worth.
    """
    size = comparison.size
    disable_progress_bar()
    about = recipe_of(piece, size)
    about = replace(about, callbacks=(*about.callbacks, lambda _: StopAt(deadline)))
    # what was trained under another rule lies elsewhere
    folder = work / size.name / piece.key.path / fingerprint(piece, size)
    diverged = False
    if not (folder / "config.json").is_file():
        resume = folder.is_dir() and bool(checkpoint.checkpoint_steps(folder))
        if not resume:
            # left by a process that was killed before its first checkpoint
            shutil.rmtree(folder, ignore_errors=True)
        try:
            if trainer.train(about, folder, resume=resume, progress=False).interrupted:
                return False
        except FloatingPointError:
            diverged = True
    measured = {}
    if not diverged and piece.seed in size.seeds:
        if time.time() >= deadline:
            return False
        measured = _measured(piece, size, folder)
    model = solve(piece.contestant, piece.division, size)
    result = {
        **piece._asdict(),
        "size": size.name,
        "rule": fingerprint(piece, size),
        "parameters": model.parameters,
        "state bytes": model.state_bytes,
        **_training(folder, diverged),
        "rows": measured,
        "jobs": jobs,
        "environment": {**environment(), "commit": commit},
    }
    add(comparison.folder, result)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return True


def _measured(piece: Piece, size: Size, folder: Path) -> dict[str, Any]:
    chosen = suites(CONTESTANTS[piece.contestant], piece.task, size)
    model, tokenizer = load_model(folder), load_tokenizer(folder)

    def measure(model: Any) -> dict[str, list[dict[str, Any]]]:
        # the tables are made of all results together
        with redirect_stdout(io.StringIO()):
            found = evaluate(model, tokenizer, list(chosen), chosen, suites=ARENA_SUITES)
        return {name: result["rows"] for name, result in found.items()}

    rows = measure(model)
    for method, held in evictions(piece, size).items():
        for name, found in measure(in_constant_memory(model, method, held=held)).items():
            rows[name] += [{**row, "modes": method} for row in found]
    return rows


def evictions(piece: Piece, size: Size) -> dict[Method, int]:
    """The ways in which a trained model is measured once more, with the tokens that it then holds."""
    held = CONTESTANTS[piece.contestant].held
    if held is None or piece.task != MQAR or piece.seed not in size.seeds:
        return {}
    return dict.fromkeys(EVICTIONS, held(size))


def _training(folder: Path, diverged: bool) -> dict[str, Any]:
    """The loss by step, the mean over its end (None for a run that diverged), what callbacks log, and the speed.

    Callbacks log by layer, as NAME/LAYER; some of their numbers are enough for a curve.
    """
    lines = [line for line in read_metrics(folder / trainer.METRICS) if "loss" in line]
    # the last one among them
    thinned = lines[:: -max(1, len(lines) // _POINTS)][::-1]
    names = sorted({name for line in lines for name in line if "/" in name})
    curve = [(line["step"], line["loss"]) for line in lines]
    end = curve[-1][0] * (1 - _LAST)
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return {
        "last loss": None if diverged else fmean(loss for step, loss in curve if step > end),
        "loss": [(step, round(loss, 4)) for step, loss in curve if math.isfinite(loss)],
        "logged": {
            name: [
                (line["step"], float(f"{line[name]:.4g}"))
                for line in thinned
                if math.isfinite(line.get(name, math.nan))
            ]
            for name in names
        },
        # after short examples and compilation
        "tokens per second": median(speeds[len(speeds) // 2 :]) if speeds else None,
    }


def run_costs(piece: CostPiece, comparison: Comparison, *, commit: str) -> bool:
    """Measure a training step, a prefill and decoding at one context, in each mode; to be run alone on a GPU.

    Returns True, as its result is there.
    """
    size, contestant = comparison.size, CONTESTANTS[piece.contestant]
    model = _random_model(piece, size)
    repeats = 3 if size.says_something else 1
    rows = []
    for mode in contestant.modes or ("",):
        # a linear mode promised to the end keeps no keys
        chosen: Any = model.modes(mode, keep_kv=mode != BOUNDED) if mode else nullcontext()
        with chosen:
            model.eval()
            inference = measure_inference(model, piece.length, repeats=repeats)
            training = measure_training(model, piece.length, repeats=repeats)
        rows.append({"mode": mode, **inference, "training tokens/s": training["tokens/s"]})
        rows[-1]["training peak bytes"] = training["peak bytes"]
    result = {
        **piece._asdict(),
        "size": size.name,
        "rule": fingerprint(piece, size),
        "parameters": solve(piece.contestant, piece.division, size).parameters,
        "rows": rows,
        "environment": {**environment(), "commit": commit},
    }
    add(comparison.folder, result)
    return True


def _random_model(piece: CostPiece, size: Size) -> Any:
    # no seed and no rate matter to a speed
    about = recipe(piece.contestant, piece.division, next(iter(TASKS)), size, size.rates[0], size.tuning_seed)
    device, dtype = device_and_dtype()
    return AutoModelForCausalLM.from_config(about.model_config(), dtype=dtype).to(device)
