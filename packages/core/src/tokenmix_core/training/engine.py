"""The engine: transformers' Trainer over accelerate, with the schedule, log and checkpoints of a recipe."""

from __future__ import annotations

import math
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from tokenmix_core._utils.atomic_io import writing
from tokenmix_core.training import checkpoint
from tokenmix_core.training.cuda_graph import GraphedStep, Losses
from tokenmix_core.training.recipe import OptimizerRecipe

# dense bfloat16 FLOP/s by a part of the GPU's name, the first that fits
PEAK_FLOPS = (
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
)
# what becomes of passes that could be recorded
Record = Literal["auto", "always", "never"]
# operations of a micro-batch and layer, below which a GPU waits for the host that launches them: with .84e12 graphs
# made steps 1.6 times as fast, with 3.4e12 1.01 times (docs/step_time.md)
WAITED_FOR = 2e12


class RecipeTrainer(Trainer):
    """The Trainer of a recipe.

    What it adds: the recipe's schedule and weight decay; no cache in training; tokens/s, model-FLOPs utilisation and
    auxiliary losses in the log; whole checkpoints; an error as soon as the loss or a weight is not finite; passes that
    are recorded.

    Args:
        schedule: of the learning rate, and the batch.
        seq_len: T, tokens of a row.
        identity: what a checkpoint is of.
        record: repeat forward and backward passes as CUDA graphs where that can be; "auto", where it gains time, too.
    """

    def __init__(
        self,
        *args: Any,
        schedule: OptimizerRecipe,
        seq_len: int,
        identity: dict[str, Any],
        record: Record = "never",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.schedule, self.identity, self._record = schedule, identity, record
        self._recorded: GraphedStep | None = None
        self.output_dir = Path(str(self.args.output_dir))
        # such a model divides its summed loss terms by num_items_in_batch itself
        self.model_accepts_loss_kwargs = True
        self._redirected: Path | None = None
        # of a micro-batch: auxiliary terms of the loss; since the last line of the log: their sums, and the steps
        # there were before the first of them
        self._terms: dict[str, Tensor] = {}
        self._auxiliary: dict[str, Tensor] = {}
        self._steps_before = 0
        self._logged: tuple[float, int] | None = None
        self._stepped = False
        self._peak_flops = peak_flops(device_name(self.args), bf16=self.args.bf16)
        flops = getattr(self.model, "flops_per_token", None)
        self._flops_per_token = flops(seq_len) if flops is not None else None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay; norms, biases, gates and other vectors do not."""
        return [name for name, p in model.named_parameters() if p.dim() >= 2]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The schedule of the recipe."""
        if self.lr_scheduler is None:
            # a plain function: what the scheduler saves is its step alone
            factor = self.schedule.learning_rate_factor
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(chosen, lambda step: factor(step))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader:
        """The rows in order, read by processes that leave Ctrl-C and SIGTERM to this one."""
        loader = super().get_train_dataloader()
        # accelerate keeps the loader that starts the processes inside its own
        inner = getattr(loader, "base_dataloader", loader)
        inner.worker_init_fn = partial(_leave_signals_to_trainer, inner.worker_init_fn)
        return loader

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward passes of a micro-batch, recorded where that was asked for and can be."""

        def passes(inputs: dict[str, Any], items: Any) -> Losses:
            self._terms = {}
            return Losses(step(model, inputs, items), self._terms)

        step = super().training_step
        if self._record != "never" and self._recorded is None:
            # not before the first step, as callbacks may have changed the model
            self._recorded = self._recorder(model)
        self._stepped = True
        if self._recorded is None:
            losses = passes(inputs, num_items_in_batch)
        else:
            # what a callback has evaluated is no other kind of model
            model.train()
            losses = self._recorded(passes, self._prepare_inputs(inputs), num_items_in_batch)
        if not self._auxiliary:
            self._steps_before = self.state.global_step
        for name, share in losses.auxiliary.items():
            self._auxiliary[name] = self._auxiliary.get(name, 0.0) + share
        return losses.loss

    def forget_recordings(self) -> None:
        """Give back the memory of recorded passes."""
        self._recorded = None

    def _recorder(self, model: nn.Module) -> GraphedStep | None:
        """What records the passes; None where they cannot be, which is said if they had to, or nothing is gained."""
        auto = self._record == "auto"
        try:
            if self.args.world_size > 1:
                raise ValueError("several processes train")
            if auto and not self._waited_for(model):
                raise ValueError("the GPU would not wait for the host")
            return GraphedStep(model, self.args.device, needed=not auto)
        except ValueError as why:
            self._record = "never"
            if auto:
                return None
            warnings.warn(f"training goes on kernel by kernel and records no graph: {why}", stacklevel=2)
            return None

    def _waited_for(self, model: nn.Module) -> bool:
        """Tell whether layers are done sooner than they are launched, by what they compute."""
        layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
        tokens = self.schedule.batch_tokens / self.args.gradient_accumulation_steps
        return (
            bool(layers) and self._flops_per_token is not None and self._flops_per_token * tokens < WAITED_FOR * layers
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's loss; a cache would let packed documents see each other, so there is none."""
        inputs = {**inputs, "use_cache": False}
        outputs: Any
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        for name, values in (outputs.get("auxiliary") or {}).items():
            if name.endswith("_loss"):
                self._terms[name] = torch.stack([x.detach().float().sum() for x in values]).sum() / num_items_in_batch  # type: ignore[operator]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add throughput and auxiliary losses to a line of the training log.

        The summary of a finished run that is resumed, which trains nothing, is left out.

        Raises:
            FloatingPointError: the loss or the norm of the gradient is not finite.
        """
        if "train_runtime" in logs and not self._stepped:
            return
        if "loss" in logs:
            self._log_throughput(logs)
            for name in ("loss", "grad_norm"):
                if not math.isfinite(logs.get(name, 0.0)):
                    super().log(logs, start_time)
                    raise FloatingPointError(
                        f"{name} is {logs[name]} at step {self.state.global_step}: training diverged. A lower "
                        "learning_rate, a longer warm-up or a smaller max_grad_norm may help; the last checkpoint is "
                        "from before"
                    )
        super().log(logs, start_time)

    def _log_throughput(self, logs: dict[str, float]) -> None:
        now, step = time.perf_counter(), self.state.global_step
        steps = step - (self._logged[1] if self._logged else 0)
        for name, total in sorted(self._auxiliary.items()):
            # each process holds its share of the sum over a whole batch
            logs[name] = self._gathered(total).sum().item() / max(1, step - self._steps_before)
        self._auxiliary.clear()
        if self._logged is not None and steps:
            rate = steps * self.schedule.batch_tokens / (now - self._logged[0])
            logs["tokens_per_second"] = round(rate, 1)
            if self._flops_per_token and self._peak_flops:
                utilisation = rate * self._flops_per_token / (self._peak_flops * self.args.world_size)
                logs["model_flops_utilisation"] = round(utilisation, 4)
        self._logged = (now, step)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._redirected) if self._redirected else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._require_finite_weights(model)
        step = self.state.global_step
        aside = self._redirected = self.output_dir / checkpoint.PARTIAL
        with self._writing(f"the checkpoint of step {step}"):
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._redirected = None
            if aside.is_dir():
                # on a network file system, only the writer of a file can wait for it
                checkpoint.sync_tree(aside)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with self._writing(f"the checkpoint of step {step}"):
                checkpoint.write_manifest(aside / f"checkpoint-{step}", {"step": step, "identity": self.identity})
                checkpoint.publish(aside, self.output_dir)
            checkpoint.remove_old_checkpoints(self.output_dir, self.args.save_total_limit or 1)
            if self.control.should_training_stop and step < self.state.max_steps:
                print(f"checkpoint of step {step} written; stopping", file=sys.stderr)
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with _reading("weights", resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _reading("optimizer and schedule", checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _reading("random state", checkpoint):
            super()._load_rng_state(checkpoint)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(what, self.output_dir, RuntimeError, SafetensorError)

    def _require_finite_weights(self, model: nn.Module) -> None:
        # of a sharded parameter, each process looks at its own part
        parameters = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        finite = torch.stack([p.detach().isfinite().all() for p in parameters if p.numel()]).all()
        if not self._gathered(finite).all():
            raise FloatingPointError(
                f"weights are not finite at step {self.state.global_step}: training diverged, and no checkpoint of "
                "this step is written"
            )

    def _gathered(self, value: Tensor) -> Tensor:
        """A scalar of every process, `[processes]`."""
        gathered = self.accelerator.gather(value[None])
        assert isinstance(gathered, Tensor)
        return gathered

    def save_final(self) -> None:
        """Write model and tokenizer into the output folder; each file appears whole."""
        aside = self.output_dir / checkpoint.PARTIAL
        with self._writing("the model"):
            self.save_model(str(aside))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (aside / "training_args.bin").unlink(missing_ok=True)
            with self._writing("the model"):
                checkpoint.publish(aside, self.output_dir)
        self.accelerator.wait_for_everyone()


@contextmanager
def _reading(what: str, checkpoint: str | None) -> Iterator[None]:
    # unpickling what is damaged can raise anything
    try:
        yield
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{checkpoint} cannot be resumed from: its {what} cannot be read ({type(error).__name__}: {told}); "
            "remove it to go on from an older one, if there is one"
        ) from error


def _leave_signals_to_trainer(then: Callable[[int], None] | None, worker: int) -> None:
    # both reach the whole process group, and a reader that died would end the run before its checkpoint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)


def device_name(args: TrainingArguments) -> str:
    """The device that the run computes on."""
    cuda = args.device.type == "cuda"
    return torch.cuda.get_device_name(args.device) if cuda else platform.processor() or platform.machine()


def peak_flops(device_name: str, *, bf16: bool) -> float | None:
    """Dense bfloat16 FLOP/s of a GPU by its name, where they are known and used."""
    return next((peak for part, peak in PEAK_FLOPS if part in device_name), None) if bf16 else None
