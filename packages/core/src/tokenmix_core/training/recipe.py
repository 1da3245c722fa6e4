"""A recipe: the complete, frozen description of a training run, and how a YAML file or flags change its fields."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from tokenmix_core._utils.validation import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

    from tokenmix_core.training.data import RowInputs

_SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BadTokens(ValueError, ArgumentTypeError):
    """Not a number of tokens; argparse shows what such an error says, and nothing of another ValueError."""


class Tokens(int):
    """A number of tokens; as text also with a suffix, "0.5M" or "15B", or as a power, "2**19"."""

    def __new__(cls, value: int | str) -> Tokens:
        if isinstance(value, str):
            text = value.strip().replace("_", "").replace(",", "")
            try:
                if "**" in text:
                    base, exponent = map(int, text.split("**"))
                    value = base**exponent
                else:
                    scale = _SUFFIXES.get(text[-1:], 1)
                    number = float(text[:-1] if scale > 1 else text) * scale
                    value = round(number)
                    if value != number:
                        raise ValueError
            except (ValueError, OverflowError):
                raise BadTokens(
                    f"expected a number of tokens such as 524288, 2**19, 0.5M or 15B, got {text!r}"
                ) from None
        return super().__new__(cls, value)


def _check(owner: Any, **bounds: tuple[float, float]) -> None:
    check_fields(owner, type(owner))
    for name, (low, high) in bounds.items():
        if not low <= (value := getattr(owner, name)) <= high:
            wanted = f"from {low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


@dataclass(frozen=True)
class DataRecipe:
    """The data that a model is trained on.

    Attributes:
        sources: one or several of "stdlib" (the built-in corpus), "mqar", "copying", "selective-copying", "s-niah-1" to
            "s-niah-3", or the folder of a token file made by `data prepare`.
        weights: the share of rows from each source; none given means equal shares.
        tokenizer: "bytes", or a tokenizer of the hub or of a folder.
        seq_len: tokens in a row.
        documents: "separate" keeps the documents of a batch apart (packed, with `cu_seqlens`); "joined" lets the
            documents of a row see each other.
        mqar_pairs: the most pairs in an example of the source "mqar". Where documents are kept apart, several short
            examples fill a row.
        mqar_vocab_size: how many tokens its examples are made of.
        mqar_ramp: the share of training over which its examples grow from two pairs to `mqar_pairs`, those of copying
            from two tokens to `copy_tokens`, and those with needles from one fact to four and to a whole row.
        copy_tokens: the most tokens to copy in an example of the sources "copying" and "selective-copying", which fill
            a row as those of "mqar" do.
        copy_vocab_size: how many tokens such an example is made of, the blank and the marker included.
        data_seed: the seed of the order of rows and of synthetic rows.
    """

    sources: list[str] = field(default_factory=lambda: ["stdlib"])
    weights: list[float] = field(default_factory=list)
    tokenizer: str = "bytes"
    seq_len: int = 4096
    documents: Literal["separate", "joined"] = "separate"
    mqar_pairs: int = 8
    mqar_vocab_size: int = 8192
    mqar_ramp: float = 0.0
    copy_tokens: int = 16
    copy_vocab_size: int = 64
    data_seed: int = 0

    def __post_init__(self) -> None:
        _check(self, seq_len=(2, math.inf), data_seed=(0, math.inf), mqar_ramp=(0, 1))
        _check(self, mqar_pairs=(1, math.inf), mqar_vocab_size=(4, math.inf))
        _check(self, copy_tokens=(1, math.inf), copy_vocab_size=(4, math.inf))
        if not self.sources:
            raise ValueError("sources must name at least one source of data, got none")
        if self.weights and (min(self.weights) <= 0 or len(self.weights) != len(self.sources)):
            raise ValueError(
                f"weights must be positive numbers, one for each of the sources {self.sources}, got {self.weights}"
            )


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW, the schedule of its learning rate, and the batch.

    The learning rate rises linearly from `initial_learning_rate` to `learning_rate` over `warmup_tokens`, then follows
    half a cosine down to `min_learning_rate` at `total_tokens`. Matrices decay; vectors (norms, biases, gates) do not.

    Attributes:
        total_tokens: tokens to train on; a number, or one such as 15B or 2**19.
        warmup_tokens: tokens over which the learning rate rises.
        batch_tokens: tokens in one optimizer step, over all processes and accumulated micro-batches.
        micro_batch_tokens: the most tokens that one process puts through the model at once.
        learning_rate: the peak of the learning rate.
        initial_learning_rate: the learning rate that the warm-up begins with.
        min_learning_rate: the learning rate of the last step.
        adam_beta1: decay of the running mean of gradients.
        adam_beta2: decay of the running mean of their squares.
        adam_epsilon: what is added to the root of that mean.
        weight_decay: of matrices, times the learning rate.
        max_grad_norm: gradients are scaled down to this norm.
    """

    total_tokens: Tokens = field(default=Tokens(10**9))
    warmup_tokens: Tokens = field(default=Tokens(0))
    batch_tokens: Tokens = field(default=Tokens(2**19))
    micro_batch_tokens: Tokens = field(default=Tokens(2**15))
    learning_rate: float = 3e-4
    initial_learning_rate: float = 0.0
    min_learning_rate: float = 3e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        many = (1, math.inf)
        _check(self, total_tokens=many, batch_tokens=many, micro_batch_tokens=many, warmup_tokens=(0, math.inf))
        _check(self, adam_beta1=(0, 1), adam_beta2=(0, 1), adam_epsilon=(0, 1), weight_decay=(0, math.inf))
        _check(self, learning_rate=(0, math.inf), max_grad_norm=(0, math.inf))
        _check(self, initial_learning_rate=(0, self.learning_rate), min_learning_rate=(0, self.learning_rate))
        if self.warmup_tokens >= self.total_tokens:
            raise ValueError(f"warmup_tokens must be below total_tokens={self.total_tokens}, got {self.warmup_tokens}")

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return math.ceil(self.total_tokens / self.batch_tokens)

    def learning_rate_factor(self, step: int) -> float:
        """The learning rate of a step, counted from 0, as a factor of `learning_rate`."""
        peak = self.learning_rate or 1.0
        warmup = math.ceil(self.warmup_tokens / self.batch_tokens)
        if step < warmup:
            low = self.initial_learning_rate / peak
            return low + (1 - low) * (step + 1) / (warmup + 1)
        low = self.min_learning_rate / peak
        progress = min(1.0, (step - warmup) / max(1, self.steps - 1 - warmup))
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2

    def split(self, seq_len: int, world_size: int) -> tuple[int, int]:
        """`(rows, accumulation)`: rows of a micro-batch on each process, and micro-batches in a step.

        Raises:
            ValueError: the batch cannot be divided so.
        """
        rows, rest = divmod(self.batch_tokens, seq_len)
        if rest or rows % world_size:
            raise ValueError(
                f"batch_tokens must be a multiple of seq_len times the number of processes, {seq_len} × {world_size}, "
                f"got {self.batch_tokens}"
            )
        rows //= world_size
        micro = min(rows, self.micro_batch_tokens // seq_len)
        if micro == 0 or rows % micro:
            raise ValueError(
                f"micro_batch_tokens must be a multiple of seq_len={seq_len} that divides the {rows * seq_len} tokens "
                f"of a step on one process, got {self.micro_batch_tokens}"
            )
        return micro, rows // micro


@dataclass(frozen=True)
class RunRecipe:
    """How the run is carried out.

    Attributes:
        precision: "bf16" is bfloat16 autocast with float32 weights; "auto" is that where the GPU has it, else "fp32".
        seed: the seed of the weights and of dropout.
        gradient_checkpointing: recompute activations in the backward pass.
        torch_compile: compile the model; on an H200 steps were faster without, in less memory (docs/step_time.md).
        training_graph: on one GPU, record forward and backward passes as a CUDA graph and repeat it, as far as
            micro-batches are of few kinds (docs/step_time.md); "auto" does so where layers are so small that the GPU
            would wait for the host. Goes with neither of the two above, nor `fsdp`.
        fsdp: shard parameters, gradients and optimizer states over the processes (FSDP2).
        dataloader_num_workers: processes that read data; 0 reads in the training process.
        logging_steps: steps between two lines of the log.
        save_steps: steps between two checkpoints.
        save_total_limit: how many checkpoints are kept.
        report_to: "tensorboard", "wandb", ...; the JSONL log is always written.
        evaluations: suites to run on the trained model.
        evaluation_lengths: the context lengths they measure at; none given leaves that to each suite.
        evaluation_limit: examples for each of their tasks.
        sample_prompt: what the sample that is shown at the end begins with; empty for none.
    """

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    seed: int = 0
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    training_graph: Literal["auto", "always", "never"] = "auto"
    fsdp: bool = False
    dataloader_num_workers: int = 0
    logging_steps: int = 10
    save_steps: int = 1000
    save_total_limit: int = 2
    report_to: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    evaluation_lengths: list[int] = field(default_factory=list)
    evaluation_limit: int = 64
    sample_prompt: str = ""

    def __post_init__(self) -> None:
        _check(self, seed=(0, 2**32 - 1), dataloader_num_workers=(0, 1024), evaluation_limit=(1, math.inf))
        _check(self, logging_steps=(1, math.inf), save_steps=(1, math.inf), save_total_limit=(1, math.inf))
        others = ("gradient_checkpointing", "torch_compile", "fsdp")
        if self.training_graph == "always" and (chosen := [name for name in others if getattr(self, name)]):
            raise ValueError(f"training_graph='always' does not go with {chosen[0]}; turn one of them off")


@dataclass(frozen=True)
class Recipe:
    """A complete training run. A variant is made with `dataclasses.replace` in a new function.

    Attributes:
        name: what the recipe is called on the command line.
        description: one line on what it trains.
        model: fields of the model's config.
        model_type: the registered type of the model.
        data, optimizer, run: see there.
        callbacks: each one makes a `TrainerCallback` for the run from the recipe.
        row_inputs: makes from the recipe a function of a row's index that gives further inputs of the model by name,
            tensors `[T, ...]` with one value a token; it must depend on nothing but the recipe's fields and the index.
        make_model: makes the model to train from the recipe, such as one that was trained before; by default a new one
            of the config.
    """

    name: str
    description: str
    model: Mapping[str, Any]
    model_type: str = "tokenmix_hybrid"
    data: DataRecipe = DataRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    run: RunRecipe = RunRecipe()
    callbacks: tuple[Callable[[Recipe], TrainerCallback], ...] = ()
    row_inputs: Callable[[Recipe], RowInputs] | None = None
    make_model: Callable[[Recipe], PreTrainedModel] | None = None

    def model_config(self) -> PreTrainedConfig:
        """The config of the model.

        Raises:
            ValueError: an unknown type, or what the config finds wrong.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        # registers core's own type
        import tokenmix_core.modeling  # noqa: F401

        if self.model_type not in CONFIG_MAPPING:
            raise ValueError(f"model_type {self.model_type!r} is not registered; import the package that defines it")
        return AutoConfig.for_model(self.model_type, **self.model)

    def values(self) -> dict[str, Any]:
        """All fields that a YAML file or a flag can set, as plain data; `overridden` takes them back."""
        groups = (self.data, self.optimizer, self.run)
        flat = {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}
        plain = {k: int(v) if isinstance(v, Tokens) else v for k, v in flat.items()}
        return {**plain, "model": dict(self.model)}

    def identity(self) -> dict[str, Any]:
        """The fields that the loss curve depends on; a checkpoint goes on only under equal ones."""
        values = self.values()
        about_run = {f.name for f in dataclasses.fields(RunRecipe)} - {"precision", "seed"}
        kept = {k: v for k, v in values.items() if k not in about_run and k != "micro_batch_tokens"}
        return {"model_type": self.model_type, **kept}


def overridden(
    recipe: Recipe, flags: Sequence[str] = (), config: str | Path | Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe with fields replaced by those of a YAML file, and then by flags.

    Where `total_tokens` is lowered and `warmup_tokens` is not given, the warm-up keeps its share of the run, and that
    is said.

    Args:
        recipe: the recipe to begin with.
        flags: `--field value ...`; `--model.field value` sets a field of the model's config, and
            `--model.mixer_options.label.option value` one entry of a field that has entries.
        config: a YAML file with `field: value` lines and, under `model:`, fields of the model's config; or a mapping
            of them, such as `Recipe.values` gives.

    Raises:
        ValueError: an unknown field, with the nearest known one, or a value that does not fit its field.
    """
    parser = _parser(recipe)
    model = dict(recipe.model)
    if config is not None:
        read = (config, "the recorded fields") if isinstance(config, Mapping) else (_yaml_file(config), str(config))
        flags = [*_field_flags(*read, parser), *flags]
    flags = list(flags)
    rest = []
    position = 0
    while position < len(flags):
        flag, equals, value = flags[position].partition("=")
        position += 1
        if not flag.startswith("--model."):
            rest.append(flags[position - 1])
            continue
        if not equals:
            if position == len(flags):
                raise ValueError(f"{flag} needs a value")
            value = flags[position]
            position += 1
        name, *inside = flag.removeprefix("--model.").split(".")
        name = _known_name(flag, name, _model_fields(recipe))
        model[name] = _with(model.get(name), inside, _yaml_value(flag, value), flag)
    _scale_warmup(recipe.optimizer, parser, rest)
    *groups, unknown = parser.parse_args_into_dataclasses(rest, return_remaining_strings=True, look_for_args_file=False)
    for text in unknown:
        if text.startswith("--"):
            flag = text.partition("=")[0]
            _known_name(flag, flag[2:].replace("-", "_"), [*_fields(), "model.FIELD"])
    if unknown:
        raise ValueError(f"unexpected argument {unknown[0]!r}; fields are given as --field value")
    data, optimizer, run = groups
    changed = dataclasses.replace(recipe, model=model, data=data, optimizer=optimizer, run=run)
    changed.model_config()
    return changed


def _scale_warmup(optimizer: OptimizerRecipe, parser: Any, flags: Sequence[str]) -> None:
    known, _ = parser.parse_known_args(flags)
    given = any(flag.partition("=")[0] in ("--warmup_tokens", "--warmup-tokens") for flag in flags)
    old, total = optimizer.total_tokens, known.total_tokens
    warmup = optimizer.warmup_tokens * max(total, 0) // old
    if given or total >= old or warmup == optimizer.warmup_tokens:
        return
    parser.set_defaults(warmup_tokens=Tokens(warmup))
    if os.environ.get("RANK", "0") == "0":
        print(
            f"warmup_tokens is {warmup:,} instead of {optimizer.warmup_tokens:,}, the same share of "
            f"total_tokens={total:,} as of {old:,}; --warmup_tokens sets another",
            file=sys.stderr,
        )


def _fields() -> list[str]:
    return [f.name for group in (DataRecipe, OptimizerRecipe, RunRecipe) for f in dataclasses.fields(group)]


def _model_fields(recipe: Recipe) -> list[str]:
    return [name for name in recipe.model_config().to_dict() if not name.startswith("_")]


def _known_name(shown: str, name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"the nearest is {near[0]!r}" if near else "`info RECIPE --fields` shows all"
    raise ValueError(f"unknown field {shown}; {hint}")


def _with(old: Any, inside: Sequence[str], value: Any, flag: str) -> Any:
    """The value, or a copy of `old` with it as the entry that the keys `inside` lead to."""
    if not inside:
        return value
    if not isinstance(old, Mapping | None):
        raise ValueError(f"{flag}: there is no {inside[0]!r} inside {old!r}")
    return {**(old or {}), inside[0]: _with((old or {}).get(inside[0]), inside[1:], value, flag)}


def _parser(recipe: Recipe) -> Any:
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(message)

    groups: Any = [DataRecipe, OptimizerRecipe, RunRecipe]
    parser = Parser(groups, add_help=False, allow_abbrev=False)
    parser.set_defaults(**{k: v for k, v in recipe.values().items() if k != "model"})
    return parser


def _yaml_value(flag: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: {text!r} is not valid YAML: {error}") from error
    if isinstance(value, str):
        # YAML takes 1e-6 for text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _yaml_file(path: str | Path) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error


def _field_flags(content: Any, path: str, parser: Any) -> list[str]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold `field: value` lines, got {type(content).__name__}")
    flags: list[str] = []
    model = content.get("model") or {}
    if not isinstance(model, dict):
        raise ValueError(f"{path}: model must hold `field: value` lines, got {type(model).__name__}")
    flags += [f"--model.{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in model.items()]
    for key, value in content.items():
        if key == "model":
            continue
        name = _known_name(f"{key!r} in {path}", str(key), _fields())
        if isinstance(value, list):
            if value:
                flags += [f"--{name}", *map(str, value)]
            else:
                parser.set_defaults(**{name: []})
        elif isinstance(value, dict) or value is None:
            raise ValueError(f"{path}: {name} must have one value or a list of them, got {value!r}")
        else:
            flags.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return flags
