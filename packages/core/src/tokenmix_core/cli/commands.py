"""The functions that run the commands; `tokenmix_core.cli` imports this module when a command runs.

transformers is imported only inside functions that need a model, so that `info` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenmix_core._utils.atomic_io import check_writable
from tokenmix_core._utils.trust import from_config, from_pretrained
from tokenmix_core.cli.packages import packages_of
from tokenmix_core.cli.ranks import evaluating_ranks
from tokenmix_core.data import prepare as corpora
from tokenmix_core.data import tokenizer as tokenizers
from tokenmix_core.data.encode import usable_cores
from tokenmix_core.evaluation.efficiency import BENCH_SUITES
from tokenmix_core.evaluation.options import EvalOptions, Suite
from tokenmix_core.evaluation.origin import training_provenance
from tokenmix_core.evaluation.report import training_result, write_result
from tokenmix_core.evaluation.suites import LM_EVAL, SUITES, check_options, check_read, check_suites, evaluate
from tokenmix_core.evaluation.text import document_separator, held_out_from, text_vocab_size
from tokenmix_core.training.manifest import RUN_MANIFEST, read_manifest, resumed, trained_on
from tokenmix_core.training.overrides import overridden
from tokenmix_core.training.recipe import Recipe

if TYPE_CHECKING:
    from tokenmix_core.training.trainer import TrainResult

RECIPES = "tokenmix_core.training.baselines:RECIPES"
DTYPES = ("float32", "bfloat16", "float16")
# errors that transformers raises for values of wrong types
_OF_VALUES = (KeyError, IndexError, TypeError, AttributeError)


def sentence(error: BaseException) -> str:
    """Return the message of an error as one line."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


class Context:
    """The recipes and suites of the package whose command runs.

    Args:
        recipes, suites: mappings by name or "module:attribute" (see `cli.main`); core's suites are always added.
        using: "module:function" that applies the package's own arguments to a model; see `tokenmix_core.cli.main`.
    """

    def __init__(
        self,
        recipes: Mapping[str, Any] | str | None,
        suites: Mapping[str, Suite] | str | None,
        using: str | None = None,
    ) -> None:
        self.recipes = self._load(recipes or RECIPES)
        self.packages = packages_of(recipes, suites)
        self.suites = {**SUITES, **self._load(suites or {})}
        # a function that returns a context manager, inside which the model is used as the command's arguments require
        self.using: Callable[[Any, argparse.Namespace], AbstractContextManager[Any]]
        self.using = self._load(using) if using is not None else lambda model, args: nullcontext()

    @staticmethod
    def _load(registry: Any) -> Any:
        if not isinstance(registry, str):
            return registry
        module, _, attribute = registry.partition(":")
        return getattr(importlib.import_module(module), attribute)

    def recipe(self, name: str) -> Recipe:
        """Return the recipe of this name.

        Raises:
            ValueError: there is no such recipe.
        """
        if name not in self.recipes:
            near = difflib.get_close_matches(name, self.recipes, n=4, cutoff=0.0)
            raise ValueError(f"there is no recipe {name!r}; the nearest are {', '.join(near)}; `info` lists all")
        return self.recipes[name]()


def train(args: argparse.Namespace, context: Context) -> int:
    """Run a recipe, and then the evaluations that it lists."""
    from tokenmix_core.training import trainer
    from tokenmix_core.training.callbacks import read_metrics
    from tokenmix_core.training.folder import METRICS, run_lock
    from tokenmix_core.training.ranks import together

    name, out, fields = _asked_for(args, context)
    begun, evaluating = context.recipe(name), not args.no_eval
    if args.resume:
        recipe = resumed(begun, out, fields, args.config)
        if (out / RUN_MANIFEST).is_file():
            evaluating = evaluating and read_manifest(out).get("evaluate", True)
    else:
        recipe = overridden(begun, fields, args.config)
    names = list(recipe.run.evaluations) if evaluating else []
    if recipe.run.sample_prompt and evaluating and "samples" not in names:
        names.append("samples")
    check_suites(names, context.suites)
    resume = bool(args.resume)
    # hold the lock until the evaluations are written
    with ExitStack() as held:
        with together(recipe.run.rank_timeout):
            held.enter_context(run_lock(out, resume=resume))
            trainer.check_sources(recipe)
            if names:
                tokenizer = tokenizers.load_tokenizer(recipe.data.tokenizer)
                check_options(names, tokenizer, options_of(recipe), context.suites)
            result = trainer.train_locked(recipe, out, resume=resume, recorded={"evaluate": evaluating})
        if (code := end_of_training(args, result)) is not None:
            return code
        print(f"trained {result.step} steps in {result.seconds:.0f} s; the model is in {result.model_dir}")
        log = read_metrics(out / METRICS)
        trained = training_result(log, recipe.optimizer.batch_tokens)
        trained["provenance"] = training_provenance(read_manifest(out)) | {"checkpoint": str(result.model_dir)}
        write_result(trained, out / "evaluation")
        if names:
            model, tokenizer = load_model(result.model_dir), load_tokenizer(result.model_dir)
            options = held_out_from(options_of(recipe), trained_on(out))
            evaluate(model, tokenizer, names, options, out=out / "evaluation", suites=context.suites)
    return 0


def end_of_training(args: argparse.Namespace, result: TrainResult) -> int | None:
    """Leave the process group; return an exit code on ranks above 0 and, with a hint, for a stopped run; else None."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return 0
    if not result.interrupted:
        return None
    again = [*args.parser.prog.split(), "--resume", str(result.output_dir)]
    launched = ", launched as before," if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    print(f"stopped at step {result.step}; go on{launched} with: {shlex.join(again)}")
    return 130


def _asked_for(args: argparse.Namespace, context: Context) -> tuple[str, Path, list[str]]:
    """Return the name of the recipe that `train` should run, the run's folder, and the flags that set fields.

    Raises:
        ValueError: there is neither a recipe nor a run, there are two folders, or this command lacks the run's recipe.
    """
    fields = list(args.rest)
    name = fields.pop(0) if fields and not fields[0].startswith("-") else None
    folder: str | None = args.resume if isinstance(args.resume, str) else None
    if name is None and folder is not None and folder in context.recipes and not Path(folder).is_dir():
        # here the call is `train --resume RECIPE --out DIR`
        name, folder = folder, None
    if folder is not None and args.out is not None and Path(folder) != args.out:
        raise ValueError(f"--resume and --out name two folders, {folder} and {args.out}; give the one of the run")
    out: Path | None = args.out if folder is None else Path(folder)
    if name is not None:
        return name, out or Path("runs") / name, fields
    if out is None or not args.resume:
        raise ValueError("name a RECIPE, which `info` lists, or the folder of a run to go on with: --resume DIR")
    name = read_manifest(out)["recipe"]
    if name not in context.recipes:
        raise ValueError(f"{out} holds a run of {name!r}, a recipe of another package than that of this command")
    return name, out, fields


def options_of(recipe: Recipe) -> EvalOptions:
    """Return options for evaluating a recipe's model: its values, its first folder of text, and mqar's vocabulary."""
    texts = [source for source in recipe.data.sources if Path(source).is_dir()]
    return EvalOptions(
        limit=recipe.run.evaluation_limit,
        lengths=tuple(recipe.run.evaluation_lengths) or None,
        text=texts[0] if texts else None,
        prompt=recipe.run.sample_prompt or None,
        vocab_size=recipe.data.mqar_vocab_size if "mqar" in recipe.data.sources else None,
        seed=recipe.run.seed,
    )


def eval(args: argparse.Namespace, context: Context) -> None:
    """Evaluate a checkpoint."""
    names = ("limit", "batch_size", "lengths", "max_length", "tasks", "include", "text", "vocab_size", "seed")
    options = EvalOptions(**{name: getattr(args, name) for name in names})
    if not args.suite and not args.tasks:
        raise ValueError("name what to run: --suite NAME, or --tasks A,B for tasks of lm-eval")
    suites = args.suite or [LM_EVAL]
    check_suites(suites, context.suites)
    out = args.out or Path(args.checkpoint) / "evaluation"
    if Path(args.checkpoint).is_dir():
        check_writable(out)
    check_read(suites, options, context.suites)
    if any(context.suites[name].reads_text for name in suites):
        options = held_out_from(options, trained_on(args.checkpoint))
    with evaluating_ranks(suites, options, out) as (options, out):
        model = load_model(args.checkpoint, *device_and_dtype(args.device, args.dtype))
        with context.using(model, args):
            evaluate(model, load_tokenizer(args.checkpoint), suites, options, out=out, suites=context.suites)


def generate(args: argparse.Namespace, context: Context) -> None:
    """Print the continuation of a text, token by token."""
    from transformers import TextStreamer

    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}")
    if args.top_k < 0 or not 0 < args.top_p <= 1:
        raise ValueError(f"--top-k must be at least 0 and --top-p in (0, 1], got {args.top_k} and {args.top_p}")
    device, dtype = device_and_dtype(args.device, args.dtype)
    model, tokenizer = load_model(args.checkpoint, device, dtype), load_tokenizer(args.checkpoint)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    ids = tokenizer(prompt)["input_ids"] or [document_separator(tokenizer)]
    if ids == [None]:
        raise ValueError("--prompt is empty, and the tokenizer has no token that separates texts")
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    torch.manual_seed(args.seed)
    input_ids = torch.tensor([ids], device=device)
    with torch.inference_mode(), context.using(model, args):
        print(prompt, end="", flush=True)
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=args.max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
        )


def bench(args: argparse.Namespace, context: Context) -> None:
    """Measure a model's speed and memory on this machine."""
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    options = EvalOptions(limit=args.repeats, batch_size=args.batch_size, lengths=args.lengths)
    device, dtype = device_and_dtype(args.device, args.dtype)
    tokenizer = None
    if is_checkpoint(args.target):
        model = load_model(args.target, device, dtype)
        if (Path(args.target) / "tokenizer_config.json").is_file():
            tokenizer = load_tokenizer(args.target)
    else:
        from transformers import AutoModelForCausalLM

        model = from_config(AutoModelForCausalLM, config_of(args.target, context), dtype=dtype).to(device)
        # random weights come without a tokenizer, and the recipe's may have to be downloaded: use bytes if they fit
        if text_vocab_size(model) >= len(tokenizers.byte_tokenizer()):
            tokenizer = tokenizers.byte_tokenizer()
    with context.using(model, args):
        evaluate(model, tokenizer, list(BENCH_SUITES), options, out=args.out, suites=BENCH_SUITES)


def prepare(args: argparse.Namespace, context: Context) -> None:
    """Tokenize a corpus and write its tokens to one memory-mapped file."""
    names = ("tokenizer", "text_field", "subset", "split", "held_out", "max_tokens", "on_bad_row", "special_tokens")
    options = {name: getattr(args, name) for name in names}
    workers = usable_cores() if args.workers is None else args.workers
    meta = corpora.prepare(args.source, args.output, workers=workers, **options)
    held_out = f"{meta.held_out_tokens:,} tokens of {meta.held_out_documents:,} documents"
    skipped = f"; {n:,} bad rows were skipped" if (n := meta.source["skipped_rows"]) else ""
    print(f"{args.output}: {meta.tokens:,} tokens of {meta.documents:,} documents; {held_out} are held out{skipped}")
    if told := corpora.files_read(meta):
        print(f"{args.output}: {told}")


def convert(args: argparse.Namespace, context: Context) -> None:
    """Convert another library's model folder to ours, or a folder of ours to FLA's layout."""
    from tokenmix_core.integrations import checkpoints, layouts
    from tokenmix_core.modeling.checkpoint import copy_companions

    if args.to is None:
        model = checkpoints.convert_folder(args.source, args.out, layouts.LAYOUTS, dtype=args.dtype)
        what = checkpoints.layout_of(checkpoints.read_fields(args.source), layouts.LAYOUTS).what
    else:
        model = checkpoints.load_ours(args.source, args.dtype)
        layout = layouts.fla_layout(model.config)
        checkpoints.export(model, layout, args.out)
        copy_companions(args.source, args.out)
        what = f"as {layout.what}"
    print(f"{args.out}: {what}, {model.num_parameters():,} parameters, {str(model.dtype).removeprefix('torch.')}")


def device_and_dtype(device: str | None = None, dtype: str | None = None) -> tuple[torch.device, torch.dtype]:
    """Return the named device and dtype; by default the GPU with bfloat16 or, without a GPU, the CPU with float32.

    Raises:
        ValueError: an unknown name, or a device that this machine does not have.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        chosen = torch.device("meta")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"--device {device} is not here: this machine has {count} CUDA devices")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return chosen, getattr(torch, dtype or ("bfloat16" if chosen.type == "cuda" else "float32"))


def is_checkpoint(target: str | Path) -> bool:
    """True if `target` is a folder with a model's `config.json`."""
    return (Path(target) / "config.json").is_file()


def config_of(target: str, context: Context) -> Any:
    """Return the model configuration of a checkpoint or a recipe.

    Raises:
        ValueError: there is no recipe or model of this name, or the checkpoint's files are damaged.
    """
    if not is_checkpoint(target):
        if Path(target).exists():
            raise ValueError(f"{target} holds no model: expected a folder with config.json")
        return context.recipe(target).model_config()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from tokenmix_core.modeling.folder_checks import check_model_folder

    check_model_folder(Path(target))
    try:
        return from_pretrained(AutoConfig, target, local_files_only=True)
    except (OSError, *_OF_VALUES, RecursionError, StrictDataclassError) as error:
        raise ValueError(f"{target} holds no config that can be read: {_told(error)}") from error


def load_model(folder: str | Path, device: torch.device | None = None, dtype: torch.dtype | str | None = None) -> Any:
    """Load the causal language model of a folder, in evaluation mode.

    Without `device` or `dtype`, `device_and_dtype` chooses both. The dtype "auto" is the dtype of the weights in the
    folder.

    Raises:
        ValueError: there is no such folder, or it does not contain a complete model.
    """
    if device is None or dtype is None:
        device, dtype = device_and_dtype()
    if not Path(folder).is_dir():
        raise ValueError(
            f"checkpoint {str(folder)!r} must be a folder with a model, and there is no such folder; a model of the "
            "hub is downloaded into one by: hf download NAME --local-dir FOLDER"
        )
    if not is_checkpoint(folder):
        from tokenmix_core.training.sharding import has_shards

        if has_shards(Path(folder)):
            raise ValueError(
                f"{folder} is a sharded checkpoint, which training alone reads: finish the run, or go on with "
                f"`train --resume {Path(folder).parent} --sharded_checkpoint false` to its next checkpoint"
            )
        raise ValueError(f"{folder} holds no model: expected config.json and weights")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    from tokenmix_core.modeling.checkpoint import load_checked

    try:
        load = partial(from_pretrained, AutoModelForCausalLM)
        # models of transformers are checked as strictly as ours
        model: Any = load_checked(AutoModelForCausalLM, load, folder, strict=True, dtype=dtype, local_files_only=True)
    except (OSError, *_OF_VALUES, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{folder} cannot be loaded as a causal language model: {_told(error)}") from error
    return model.to(device).eval()


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a folder.

    Raises:
        ValueError: the folder has no tokenizer that can be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return from_pretrained(AutoTokenizer, folder, local_files_only=True)
    except ImportError:
        raise
    except Exception as error:
        # the library raises errors of class Exception for a damaged file
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Return the message of a library's error as a clause, to complete a sentence."""
    told = sentence(error)
    return f"a file holds a value that transformers cannot use ({told})" if isinstance(error, _OF_VALUES) else told
