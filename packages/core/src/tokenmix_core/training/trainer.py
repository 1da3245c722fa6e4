"""Run a recipe: build rows, model and engine, train, and write the manifest."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PrinterCallback, TrainingArguments, set_seed
from transformers.integrations.integration_utils import get_available_reporting_integrations

from tokenmix_core._utils import rng
from tokenmix_core._utils.atomic_io import is_temporary, remove, write_atomically
from tokenmix_core._utils.optional import install_command
from tokenmix_core._utils.trust import from_config
from tokenmix_core.data.prepare import built_in_corpus
from tokenmix_core.data.sources import HUB_ALIASES, STDLIB
from tokenmix_core.data.synthetic import COPYING, NIAH_TASKS
from tokenmix_core.data.token_file import TokenFile
from tokenmix_core.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from tokenmix_core.training import checkpoint
from tokenmix_core.training.callbacks import MetricsFile, Progress, StopOnSignal
from tokenmix_core.training.context_parallel import check_context_parallel
from tokenmix_core.training.cuda_graph import TrainingGraph
from tokenmix_core.training.data import (
    ChunkRows,
    CopyRows,
    MixedRows,
    MQARRows,
    NiahRows,
    collate_joined,
    collate_separate,
)
from tokenmix_core.training.engine import RecipeTrainer
from tokenmix_core.training.folder import METRICS, check_folder, run_lock
from tokenmix_core.training.manifest import RUN_MANIFEST, run_manifest, trained_on
from tokenmix_core.training.ranks import require_agreement, require_shared_folder, together
from tokenmix_core.training.recipe import Recipe

MQAR = "mqar"


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        output_dir: folder that contains the model, tokenizer, log and checkpoints.
        model_dir: folder from which to load the model: `output_dir`, or the last checkpoint if the run was stopped.
        step: number of optimizer steps done.
        loss: the last logged training loss, in nats per token; NaN if none was logged.
        interrupted: whether a signal or a callback stopped the run before its last step.
        seconds: wall-clock time of training and of writing the final model.
    """

    output_dir: Path
    model_dir: Path
    step: int
    loss: float
    interrupted: bool
    seconds: float


def check_sources(recipe: Recipe) -> None:
    """Raise an error if a source of the recipe does not exist; called before anything is loaded or downloaded.

    Raises:
        ValueError: a source is no known name and no existing folder; the message has the command that makes it.
    """
    for source in recipe.data.sources:
        if source in (STDLIB, MQAR, *COPYING, *NIAH_TASKS) or Path(source).exists():
            continue
        name = Path(source).name
        corpus = next((alias for alias in HUB_ALIASES if name == alias or name.startswith(f"{alias}-")), "TEXT")
        command = f"tokenmix data prepare {corpus} {source} --tokenizer {recipe.data.tokenizer}"
        what = "" if corpus != "TEXT" else ", where TEXT is a file, a folder or a dataset of the hub"
        raise ValueError(f"{source} is no token file, for there is nothing of that name; make it with: {command}{what}")


def training_rows(
    recipe: Recipe, tokenizer: Any, begun_with: Mapping[str, str] | None = None
) -> tuple[MixedRows, dict[str, str]]:
    """Return the rows of a recipe, and the fingerprint of each source.

    Args:
        recipe: the recipe.
        tokenizer: the recipe's tokenizer.
        begun_with: fingerprints by source of the run that is resumed; they determine how the built-in corpus is split.

    Raises:
        ValueError: a source does not exist, is damaged, or was prepared with another tokenizer.
    """
    data, optimizer = recipe.data, recipe.optimizer
    fingerprint = tokenizer_fingerprint(tokenizer)
    length = optimizer.steps * optimizer.batch_tokens // data.seq_len
    weights = data.weights or [1.0] * len(data.sources)
    begun_with = begun_with or {}
    datasets, names = [], {}
    for position, source in enumerate(data.sources):
        seed = data.data_seed + 1000 * position
        ramp = round(data.mqar_ramp * length * weights[position] / sum(weights))
        growing: dict[str, Any] = {"packed": data.documents == "separate", "ramp_rows": ramp}
        if source == MQAR:
            datasets.append(MQARRows(data.seq_len, data.mqar_pairs, data.mqar_vocab_size, seed, **growing))
            names[source] = f"pairs {data.mqar_pairs}, vocabulary {data.mqar_vocab_size}"
        elif source in COPYING:
            sizes = (data.copy_tokens, data.copy_vocab_size)
            datasets.append(CopyRows(source, data.seq_len, *sizes, seed, **growing))
            names[source] = "tokens {}, vocabulary {}".format(*sizes)
        elif source in NIAH_TASKS:
            text = None
            if NIAH_TASKS[source].haystack == "text":
                path = built_in_corpus(data.tokenizer, begun_with=begun_with.get(source))
                text = TokenFile(path, fingerprint=fingerprint)
            datasets.append(NiahRows(source, tokenizer, text, data.seq_len, seed, **growing))
            names[source] = text.fingerprint if text else fingerprint
        else:
            path = Path(source)
            if source == STDLIB:
                path = built_in_corpus(data.tokenizer, begun_with=begun_with.get(source))
            file = TokenFile(path, fingerprint=fingerprint)
            datasets.append(ChunkRows(file, data.seq_len, seed))
            names[source if source == STDLIB else f"tokens-{position}"] = file.fingerprint
    inputs = None if recipe.row_inputs is None else recipe.row_inputs(recipe)
    return MixedRows(datasets, weights, length, data.data_seed, inputs), names


def training_arguments(recipe: Recipe, output_dir: Path) -> TrainingArguments:
    """Return the recipe's settings as the Trainer's arguments, for this process and its device.

    Raises:
        ValueError: `report_to` names a logger that is unknown or not installed.
    """
    run, optimizer = recipe.run, recipe.optimizer
    known = get_available_reporting_integrations()
    if absent := [name for name in run.report_to if name not in (*known, "all", "none")]:
        here = ", ".join(known) or "none"
        raise ValueError(
            f"report_to: {', '.join(absent)} is no logger that is installed here (there is {here}); tensorboard and "
            f"wandb come with: {install_command('tokenmix-core[tensorboard,wandb]')}"
        )
    cuda = torch.cuda.is_available()
    bf16 = run.precision == "bf16" or (run.precision == "auto" and cuda and torch.cuda.is_bf16_supported())
    # one process has nothing to shard; without `fsdp` it can also resume a sharded run
    sharded = run.fsdp and int(os.environ.get("WORLD_SIZE", "1")) > 1
    args = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=optimizer.steps,
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_epsilon,
        max_grad_norm=optimizer.max_grad_norm,
        optim="adamw_torch_fused",
        bf16=bf16,
        # `use_cpu`: without it, processes on CPUs would form no process group
        use_cpu=not cuda,
        seed=run.seed,
        data_seed=recipe.data.data_seed,
        **_checkpointing(run.gradient_checkpointing),
        torch_compile=run.torch_compile,
        # without `sharded_checkpoint`, checkpoints contain whole parameters, so that they can be loaded as models
        fsdp=True if sharded else None,  # type: ignore[arg-type]
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"} if sharded else None,
        ddp_find_unused_parameters=False,
        # do not broadcast: rank 0 would otherwise overwrite the statistics that other ranks gather in buffers
        ddp_broadcast_buffers=False,
        average_tokens_across_devices=True,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_num_workers=run.dataloader_num_workers,
        dataloader_pin_memory=cuda,
        logging_steps=run.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_steps=run.save_steps,
        save_total_limit=run.save_total_limit,
        report_to=run.report_to or "none",
        run_name=recipe.name,
        disable_tqdm=True,
    )
    # one GPU per process: torch's DataParallel, which serves several GPUs from one process, is not supported
    args._n_gpu = min(1, args.n_gpu)
    if args.device.type == "cpu":
        # "cpu", because torch.load cannot map an optimizer's state to "cpu:0", the Trainer's choice
        vars(args)["_setup_devices"] = torch.device("cpu")
    check_context_parallel(run.context_parallel, args.world_size, recipe.data.seq_len)
    rows, accumulation = optimizer.split(recipe.data.seq_len, args.world_size // run.context_parallel)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = rows, accumulation
    return args


def _checkpointing(wanted: bool) -> dict[str, Any]:
    # the option has another name in newer versions of transformers
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": False}} if wanted else {}


def build_model(recipe: Recipe, tokenizer: Any) -> PreTrainedModel:
    """Return the model that `make_model` makes or, if it is None, a new one with weights drawn from the recipe's seed.

    Raises:
        ValueError: an invalid config, or a vocabulary smaller than that of the tokenizer or of a synthetic task.
    """
    config = recipe.model_config()
    needed = {"the tokenizer": len(tokenizer)}
    sizes = {MQAR: recipe.data.mqar_vocab_size} | dict.fromkeys(COPYING, recipe.data.copy_vocab_size)
    needed |= {source: size for source, size in sizes.items() if source in recipe.data.sources}
    for user, size in needed.items():
        if config.vocab_size < size:
            raise ValueError(f"model.vocab_size must be at least {size} for {user}, got {config.vocab_size}")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    set_seed(recipe.run.seed)
    return from_config(AutoModelForCausalLM, config) if recipe.make_model is None else recipe.make_model(recipe)


def build_trainer(
    recipe: Recipe, output_dir: Path, *, progress: bool = True, begun_with: Mapping[str, str] | None = None
) -> RecipeTrainer:
    """Return a trainer whose `train` can be called; `begun_with` is the same as for `training_rows`.

    If `progress`, the trainer reports its progress on the terminal.
    """
    # make the arguments first, because they initialise torch.distributed
    args = training_arguments(recipe, output_dir)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    with args.main_process_first(desc="corpora"):
        rows, fingerprints = training_rows(recipe, tokenizer, begun_with)
    model = build_model(recipe, tokenizer)
    identity = {k: v for k, v in recipe.identity().items() if k != "sources"}
    identity |= {"data": fingerprints, "precision": "bf16" if args.bf16 else "fp32"}
    identity |= {"streams": rng.VERSION}
    callbacks = [make(recipe) for make in recipe.callbacks]
    callbacks += [MetricsFile(output_dir / METRICS), StopOnSignal()]
    trainer = RecipeTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=collate_separate if recipe.data.documents == "separate" else collate_joined,
        processing_class=tokenizer,
        callbacks=[*callbacks, Progress()] if progress else callbacks,
        schedule=recipe.optimizer,
        seq_len=recipe.data.seq_len,
        identity=identity,
        training_graph=_training_graph(recipe),
        context_parallel=recipe.run.context_parallel,
        sharded_checkpoint=recipe.run.sharded_checkpoint,
    )
    if trainer.is_fsdp_enabled:
        tokens = args.per_device_train_batch_size * recipe.data.seq_len // recipe.run.context_parallel
        trainer.plan_units(recipe.run, tokens)
    # remove a callback of transformers that prints dictionaries
    trainer.remove_callback(PrinterCallback)
    return trainer


def _training_graph(recipe: Recipe) -> TrainingGraph:
    """Return the recipe's `training_graph`; "auto" becomes "never" with options that were not tested in CUDA graphs."""
    run = recipe.run
    others = run.gradient_checkpointing or run.torch_compile or recipe.make_model is not None
    return "never" if run.training_graph == "auto" and others else run.training_graph


def train(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    recorded: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Run a recipe while holding the lock of its output folder.

    The output folder gets the model and its tokenizer, `metrics.jsonl`, `run.json` (recipe, sha256 of the corpora,
    versions) and checkpoints. The run uses all processes that `torchrun` or `accelerate launch` has started.

    Args:
        recipe: the recipe to run.
        output_dir: an empty or new folder, or that of a run that ended before its first checkpoint; with `resume` also
            a folder with checkpoints of this same recipe.
        resume: whether to continue from the last checkpoint, with the loss curve of an uninterrupted run; without a
            checkpoint, training starts at the beginning.
        progress: whether to show a progress bar.
        recorded: further entries for `run.json`, such as the command line.

    Raises:
        ValueError: the recipe is inconsistent; the folder contains another run, or another process writes to it; or the
            checkpoint is damaged or belongs to another run.
        FloatingPointError: training diverged.
        OSError: a file cannot be written.
    """
    with together(recipe.run.rank_timeout), run_lock(output_dir, resume=resume):
        return train_locked(recipe, output_dir, resume=resume, progress=progress, recorded=recorded)


@contextmanager
def _readers_named() -> Iterator[None]:
    """Context manager: replace the error of a DataLoader worker, whose text has a traceback, by one sentence.

    Raises:
        OSError: a worker process was killed.
        ValueError: a worker process could not read a row.
    """
    try:
        yield
    except Exception as error:
        told = str(error)
        if "DataLoader worker" not in told:
            raise
        last = told.strip().splitlines()[-1]
        if "Original Traceback" in told:
            raise ValueError(f"a process that reads training data failed: {last.partition(': ')[2] or last}") from error
        raise OSError(
            f"a process that reads training data was killed, often for lack of memory ({told.splitlines()[0]}); resume "
            "the run with --resume, perhaps with fewer --dataloader_num_workers"
        ) from error


def train_locked(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    recorded: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Run a recipe as `train` does, for a caller that is inside `together` and `run_lock`, and may keep the lock."""
    output_dir = Path(output_dir)
    differing = ("dataloader_num_workers", "sources")
    values = {name: value for name, value in recipe.values().items() if name not in differing}
    values |= {"recipe": recipe.name, "model_type": recipe.model_type, "resume": resume}
    require_agreement({**values, "the output folder": str(output_dir.resolve())})
    require_shared_folder(output_dir)
    check_folder(output_dir, resume=resume)
    check_sources(recipe)
    begun_with = trained_on(output_dir).fingerprints if resume else None
    trainer = build_trainer(recipe, output_dir, progress=progress, begun_with=begun_with)
    # compare corpora by content: their folders may differ between nodes
    identity = {name: value for name, value in trainer.identity.items() if name != "data"}
    accumulation = trainer.args.gradient_accumulation_steps
    require_agreement({**identity, "corpora": trainer.identity["data"], "accumulation": accumulation})
    source = None
    if resume:
        source = checkpoint.checkpoint_to_resume(output_dir, trainer.identity)
        if source is None and trainer.args.process_index == 0:
            print(f"{output_dir} holds no checkpoint yet: training starts from the beginning", file=sys.stderr)
    # a barrier: all processes must have checked the folder before one of them writes to it
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        output_dir.mkdir(parents=True, exist_ok=True)
        # remove files that a killed process left half-written
        for path in (output_dir / checkpoint.PARTIAL, *filter(is_temporary, output_dir.iterdir())):
            remove(path)
        write_atomically(
            output_dir / RUN_MANIFEST,
            json.dumps({**run_manifest(recipe, trainer), **(recorded or {})}, indent=2) + "\n",
        )
    trainer.accelerator.wait_for_everyone()
    started = time.perf_counter()
    try:
        with _readers_named():
            trainer.train(resume_from_checkpoint=None if source is None else str(source))
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, StopOnSignal | Progress):
                callback.close()
        trainer.release_graphs()
    step = trainer.state.global_step
    interrupted = step < recipe.optimizer.steps
    if not interrupted:
        trainer.save_final()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return TrainResult(
        output_dir=output_dir,
        model_dir=output_dir / f"checkpoint-{step}" if interrupted else output_dir,
        step=step,
        loss=losses[-1] if losses else math.nan,
        interrupted=interrupted,
        seconds=time.perf_counter() - started,
    )
