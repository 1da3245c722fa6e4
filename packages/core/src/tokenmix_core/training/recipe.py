"""A recipe: the complete, frozen description of a training run."""

from __future__ import annotations

import dataclasses
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tokenmix_core._utils.validation import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback

    from tokenmix_core.training.data import RowInputs

_SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BadTokens(ValueError, ArgumentTypeError):
    """An invalid number of tokens. argparse shows the text of an ArgumentTypeError, but not of other ValueErrors."""


class Tokens(int):
    """A number of tokens; text may have a suffix, "0.5M" or "15B", or be a power, "2**19"."""

    def __new__(cls, value: int | str) -> Tokens:
        if isinstance(value, str):
            text = value.strip().replace("_", "").replace(",", "")
            try:
                if "**" in text:
                    base, exponent = map(int, text.split("**"))
                    if not 0 <= exponent <= 63:
                        raise ValueError
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
        weights: relative numbers of rows from the sources, such as 3 1; if none is given, they are equal.
        tokenizer: "bytes", or the name of a tokenizer on the hub, or its folder.
        seq_len: tokens in a row.
        documents: "separate" keeps the documents of a batch apart (packed, with `cu_seqlens`); "joined" lets the
            documents of a row see each other.
        mqar_pairs: the largest number of pairs in an example of the source "mqar". If documents are separate, several
            short examples fill a row.
        mqar_vocab_size: the number of different tokens in examples of "mqar".
        mqar_ramp: the fraction of training over which examples grow: those of "mqar" from two pairs to `mqar_pairs`,
            those of copying from two tokens to `copy_tokens`, haystacks from one fact to four and to a whole row.
        copy_tokens: the largest number of tokens to copy in an example of the sources "copying" and
            "selective-copying"; examples fill a row as those of "mqar" do.
        copy_vocab_size: the number of different tokens in examples of copying, the blank and the marker included.
        data_seed: the seed of the order of rows, and of synthetic rows.
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
                f"weights must be positive, one for each of the sources {self.sources}, got {self.weights}"
            )


@dataclass(frozen=True)
class OptimizerRecipe:
    """The optimizer AdamW, the schedule of its learning rate, and the batch size.

    The learning rate rises linearly from `initial_learning_rate` to `learning_rate` over `warmup_tokens`, then falls
    along half a cosine to `min_learning_rate` at `total_tokens`. Weight decay applies to matrices, not to vectors
    (norms, biases, decay rates).

    Attributes:
        total_tokens: tokens to train on, as a number or in a form such as 15B or 2**19.
        warmup_tokens: tokens over which the learning rate rises.
        batch_tokens: tokens in one optimizer step, over all processes and accumulated micro-batches.
        micro_batch_tokens: the largest number of tokens that one process computes at once.
        learning_rate: the peak of the learning rate.
        initial_learning_rate: the learning rate from which the warm-up rises.
        min_learning_rate: the learning rate of the last step.
        adam_beta1: decay of the running mean of gradients.
        adam_beta2: decay of the running mean of squared gradients.
        adam_epsilon: added to the square root of the mean of squared gradients.
        weight_decay: decay of matrices, which is multiplied by the learning rate.
        max_grad_norm: larger gradients are scaled down to this norm.
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

    @classmethod
    def in_steps(cls, steps: int, warmup: int, tokens: int, **fields: Any) -> OptimizerRecipe:
        """Return the recipe of `steps` optimizer steps of one micro-batch; in `warmup` of them the rate rises.

        A micro-batch has `tokens` tokens.
        """
        sizes = {"total_tokens": steps * tokens, "warmup_tokens": warmup * tokens}
        sizes |= {"batch_tokens": tokens, "micro_batch_tokens": tokens}
        return cls(**{name: Tokens(size) for name, size in sizes.items()}, **fields)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return math.ceil(self.total_tokens / self.batch_tokens)

    def learning_rate_factor(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0, divided by `learning_rate`."""
        peak = self.learning_rate or 1.0
        warmup = math.ceil(self.warmup_tokens / self.batch_tokens)
        if step < warmup:
            low = self.initial_learning_rate / peak
            return low + (1 - low) * (step + 1) / (warmup + 1)
        low = self.min_learning_rate / peak
        progress = min(1.0, (step - warmup) / max(1, self.steps - 1 - warmup))
        return low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2

    def split(self, seq_len: int, world_size: int) -> tuple[int, int]:
        """Return `(rows, accumulation)`: rows of a micro-batch on each process, and micro-batches per optimizer step.

        Raises:
            ValueError: the batch cannot be divided into such micro-batches.
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
    """How the run is executed.

    Attributes:
        precision: "bf16" is bfloat16 autocast with float32 weights; "auto" is "bf16" if the GPU supports it, else
            "fp32".
        seed: the seed of the initial weights and of dropout.
        gradient_checkpointing: compute activations again in the backward pass instead of storing them.
        torch_compile: compile the model; on an H200, steps without it were faster and took less memory
            (docs/step_time.md).
        training_graph: capture forward and backward passes as CUDA graphs and replay them, for up to eight signatures
            of micro-batches (docs/step_time.md); "auto" does so if the layers are so small that the GPU would wait for
            the CPU. On several GPUs gradients are then averaged at the end of a step. Excludes
            `gradient_checkpointing`, `torch_compile`, `context_parallel`, and `fsdp` that gathers layer by layer.
        fsdp: shard parameters, gradients and optimizer states over the processes (FSDP2).
        fsdp_reshard: with `fsdp`, "always" gathers each layer's parameters in each pass, which takes less memory;
            "never" gathers them once per step; "auto" selects "never" if it fits into the memory by an estimate.
        fsdp_unit_layers: with `fsdp`, number of layers whose parameters are gathered together; 0 selects it by size.
        context_parallel: number of ranks over which each row is split (docs/context_parallel.md).
        rank_timeout: seconds without a sign of life after which a rank counts as stopped, and all other ranks end.
        dataloader_num_workers: number of processes that read data; 0 reads it in the training process.
        logging_steps: steps between two lines of the log.
        save_steps: steps between two checkpoints.
        save_total_limit: number of checkpoints to keep.
        sharded_checkpoint: every process writes its own shards into checkpoints (torch's distributed checkpoint); if
            off, one process writes whole weights and optimizer states. The trained model is written whole in both
            cases.
        report_to: loggers such as "tensorboard" or "wandb"; the JSONL log is always written.
        evaluations: suites to run on the trained model.
        evaluation_lengths: the context lengths of these evaluations; if none is given, each suite has its own.
        evaluation_limit: number of examples in each of their tasks.
        sample_prompt: beginning of the sample that is generated at the end; empty for no sample.
    """

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    seed: int = 0
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    training_graph: Literal["auto", "always", "never"] = "auto"
    fsdp: bool = False
    fsdp_reshard: Literal["auto", "always", "never"] = "auto"
    fsdp_unit_layers: int = 0
    context_parallel: int = 1
    rank_timeout: float = 60.0
    dataloader_num_workers: int = 0
    logging_steps: int = 10
    save_steps: int = 1000
    save_total_limit: int = 2
    sharded_checkpoint: bool = False
    report_to: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    evaluation_lengths: list[int] = field(default_factory=list)
    evaluation_limit: int = 64
    sample_prompt: str = ""

    def __post_init__(self) -> None:
        _check(self, seed=(0, 2**32 - 1), dataloader_num_workers=(0, 1024), evaluation_limit=(1, math.inf))
        _check(self, logging_steps=(1, math.inf), save_steps=(1, math.inf), save_total_limit=(1, math.inf))
        _check(self, rank_timeout=(1, math.inf), context_parallel=(1, math.inf))
        _check(self, fsdp_unit_layers=(0, math.inf))
        others = ("gradient_checkpointing", "torch_compile")
        if self.training_graph == "always" and (chosen := [name for name in others if getattr(self, name)]):
            raise ValueError(f"training_graph='always' does not go with {chosen[0]}; turn one of them off")


@dataclass(frozen=True)
class Recipe:
    """The description of a complete training run. For a variant, write a function that uses `dataclasses.replace`.

    Attributes:
        name: the recipe's name on the command line.
        description: one line on what the recipe trains.
        model: fields of the model's config.
        model_type: the model's type as registered with transformers.
        data, optimizer, run: see `DataRecipe`, `OptimizerRecipe` and `RunRecipe`.
        callbacks: functions, each of which makes a `TrainerCallback` for a run from its recipe.
        row_inputs: a function of the recipe that returns a function of a row's index, which returns further inputs of
            the model by name: tensors `[T, ...]` with one value per token. They must depend only on the recipe's fields
            and the index.
        make_model: a function of the recipe that returns the model to train, such as a pretrained one; by default a
            model with random weights is made from the config.
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
        """Return the model's config.

        Raises:
            ValueError: an unknown `model_type`, or fields that the config refuses.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        # this import registers the model type of core
        import tokenmix_core.modeling  # noqa: F401

        if self.model_type not in CONFIG_MAPPING:
            raise ValueError(f"model_type {self.model_type!r} is not registered; import the package that defines it")
        return AutoConfig.for_model(self.model_type, **self.model)

    def values(self) -> dict[str, Any]:
        """Return all fields that a YAML file or flags can set, as plain data; `overridden` accepts this as `config`."""
        groups = (self.data, self.optimizer, self.run)
        flat = {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}
        plain = {k: int(v) if isinstance(v, Tokens) else v for k, v in flat.items()}
        return {**plain, "model": dict(self.model)}

    def identity(self) -> dict[str, Any]:
        """Return the fields on which the loss curve depends; a checkpoint is resumed only if they are equal."""
        values = self.values()
        about_run = {f.name for f in dataclasses.fields(RunRecipe)} - {"precision", "seed"}
        kept = {k: v for k, v in values.items() if k not in about_run and k != "micro_batch_tokens"}
        return {"model_type": self.model_type, **kept}
