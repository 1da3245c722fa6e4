"""Execute one run: train, evaluate and store the result; or measure speed and memory."""

from __future__ import annotations

import io
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from arena import corpus, rules, store
from arena.comparison import Comparison, CostRun, Run, eviction_budgets, fingerprint, recipe_of, tuning_seeds
from arena.contestants import BOUNDED, CONTESTANTS
from arena.models import solve
from arena.scores import EACH, RETRIEVAL
from arena.sizes import Size
from arena.tasks import ARENA_SUITES, MQAR, NEEDLE, TASKS, TEXT, located, located_text, recipe, suites
from arena.workers import Terminated
from tokenmix_core.cli.commands import device_and_dtype, load_model, load_tokenizer
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.efficiency import measure_inference, measure_training
from tokenmix_core.evaluation.suites import evaluate
from tokenmix_core.evaluation.text import corpus_of, held_out_from
from tokenmix_core.testing.results import environment
from tokenmix_core.training import checkpoint, trainer
from tokenmix_core.training.callbacks import read_metrics
from tokenmix_core.training.folder import METRICS
from tokenmix_core.training.manifest import trained_on
from tokenmix_lte.training_free import in_constant_memory

# last fraction of a run; the mean loss over it selects the learning rate
_FINAL_FRACTION = 0.1
# approximate number of points to store of each logged metric
_POINTS = 20


class StopAt(TrainerCallback):
    """Stops training, with a checkpoint, at a deadline given in seconds since the epoch."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if time.time() >= self.deadline:
            control.should_save = control.should_training_stop = True


def execute(run: Run, comparison: Comparison, work: Path, *, deadline: float, commit: str, jobs: int = 1) -> bool:
    """Train and evaluate a run, or resume it; return True if its result is now stored, False if it is unfinished.

    Args:
        run: the run to execute.
        comparison: the comparison to which the run belongs.
        work: folder for the files of unfinished runs.
        deadline: seconds since the epoch at which training stops with a checkpoint; later, no evaluation starts.
        commit: commit of the code, stored with the result.
        jobs: number of concurrent runs, stored because it affects the speed.

    Raises:
        Terminated: a signal has stopped training.
    """
    size = comparison.size
    disable_progress_bar()
    settings = located(recipe_of(run, size))
    settings = replace(settings, callbacks=(*settings.callbacks, lambda _: StopAt(deadline)))
    # name the folder by the fingerprint: runs with other settings then do not find its checkpoints
    folder = work / size.name / run.key.path / fingerprint(run, size)
    diverged = False
    if not (folder / "config.json").is_file():
        resume = folder.is_dir() and bool(checkpoint.checkpoint_steps(folder))
        if not resume:
            # remove the folder of a process that was killed before its first checkpoint
            shutil.rmtree(folder, ignore_errors=True)
        try:
            if trainer.train(settings, folder, resume=resume, progress=False).interrupted:
                if time.time() < deadline:
                    # training handled the signal itself, so raise the error for it here
                    raise Terminated
                return False
        except FloatingPointError:
            diverged = True
    rows, trained = {}, time.time()
    if not diverged and run.seed not in tuning_seeds(size):
        if time.time() >= deadline:
            return False
        rows = _evaluate(run, size, folder)
    measured = {
        "state bytes": solve(run.contestant, run.division, size).state_bytes,
        **_training_log(folder, diverged),
        "rows": rows,
        "jobs": jobs,
        "evaluation seconds": round(time.time() - trained, 1),
    }
    result = _result(run, size, measured, commit)
    if run.task in (NEEDLE, TEXT):
        on_corpus = run.task == TEXT and size.corpus
        result["corpus"] = corpus.identity() if on_corpus else corpus_of(None, byte_tokenizer())
    store.add(comparison.folder, result)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return True


def _result(run: Run | CostRun, size: Size, measured: Mapping[str, Any], commit: str) -> dict[str, Any]:
    return {
        **run._asdict(),
        "size": size.name,
        "rule": fingerprint(run, size),
        "rules": rules.digest(),
        "parameters": solve(run.contestant, run.division, size).parameters,
        **measured,
        "environment": {**environment(), "commit": commit},
    }


def _evaluate(run: Run, size: Size, folder: Path) -> dict[str, Any]:
    # evaluate on the split of the built-in corpus that training used, which may be an older one
    trained, asked = trained_on(folder), suites(CONTESTANTS[run.contestant], run.task, size)
    options = {name: held_out_from(located_text(option), trained) for name, option in asked.items()}
    model, tokenizer = load_model(folder), load_tokenizer(folder)

    def rows_of(model: Any, names: list[str]) -> dict[str, list[dict[str, Any]]]:
        # hide the tables that `evaluate` prints: the report has tables of its own
        with redirect_stdout(io.StringIO()):
            results = evaluate(model, tokenizer, names, options, suites=ARENA_SUITES)
        return {name: _with_samples(result) for name, result in results.items()}

    rows = rows_of(model, list(options))
    for method, budget in eviction_budgets(run, size).items():
        retrieval = [name for name in options if run.task == MQAR or name in RETRIEVAL]
        if not retrieval:
            continue
        for name, more in rows_of(in_constant_memory(model, method, held=budget), retrieval).items():
            rows[name] += [{**row, "modes": method} for row in more]
    return rows


def _with_samples(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a suite's result, with the values of their examples, if it has them, under the key `EACH`."""
    rows, samples = result["rows"], result.get("samples")
    if samples is None:
        return rows
    return [row | {EACH: [round(x, 5) for x in values]} for row, values in zip(rows, samples, strict=True)]


def _training_log(folder: Path, diverged: bool) -> dict[str, Any]:
    """Return the loss curve, its final mean (None if diverged), the layers' metrics, and the training speed.

    The names of layers' metrics are `NAME/LAYER`; about `_POINTS` steps of each metric are stored.
    """
    lines = [line for line in read_metrics(folder / METRICS) if "loss" in line]
    # evenly spaced lines, counted from the end so that the last line is included
    thinned = lines[:: -max(1, len(lines) // _POINTS)][::-1]
    names = sorted({name for line in lines for name in line if "/" in name})
    curve = [(line["step"], line["loss"]) for line in lines]
    start = curve[-1][0] * (1 - _FINAL_FRACTION)
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return {
        "last loss": None if diverged else fmean(loss for step, loss in curve if step > start),
        "loss": [(step, round(loss, 4)) for step, loss in curve if math.isfinite(loss)],
        "logged": {
            name: [
                (line["step"], float(f"{line[name]:.4g}"))
                for line in thinned
                if math.isfinite(line.get(name, math.nan))
            ]
            for name in names
        },
        # leave out the first half of the run, with compilation and short examples
        "tokens per second": median(speeds[len(speeds) // 2 :]) if speeds else None,
    }


def measure_costs(run: CostRun, comparison: Comparison, *, commit: str) -> bool:
    """Measure and store the costs of training, prefill and decoding at a context length, in each mode; return True.

    During the call, no other process may use the GPU.
    """
    size, contestant = comparison.size, CONTESTANTS[run.contestant]
    model = _random_model(run, size)
    repeats = 3 if size.supports_claims else 1
    rows = []
    for mode in contestant.modes or ("",):
        # Oryx runs without a KV cache in the mode `BOUNDED`
        selected: Any = model.modes(mode, keep_kv=mode != BOUNDED) if mode else nullcontext()
        with selected:
            model.eval()
            inference = measure_inference(model, run.length, repeats=repeats)
            training = measure_training(model, run.length, repeats=repeats)
        rows.append({"mode": mode, **inference, "training tokens/s": training["tokens/s"]})
        rows[-1]["training peak bytes"] = training.get("peak bytes")
    store.add(comparison.folder, _result(run, size, {"rows": rows}, commit))
    return True


def _random_model(run: CostRun, size: Size) -> Any:
    # take any task, rate and seed, because speed does not depend on them
    task = next(iter(size.tasks or TASKS))
    settings = recipe(run.contestant, run.division, task, size, size.rates[0], size.tuning_seed)
    device, dtype = device_and_dtype()
    return AutoModelForCausalLM.from_config(settings.model_config(), dtype=dtype).to(device)
