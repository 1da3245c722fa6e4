"""The engine: transformers' Trainer on accelerate, with the learning rates, log and checkpoints of a recipe."""

from __future__ import annotations

import math
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import TrainingArguments, set_seed

from tokenmix_core._utils import rng
from tokenmix_core._utils.atomic_io import sync_tree, writing
from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.training import checkpoint
from tokenmix_core.training.context_parallel import RowSplit
from tokenmix_core.training.cuda_graph import GraphedStep, Losses, TrainingGraph
from tokenmix_core.training.recipe import OptimizerRecipe
from tokenmix_core.training.replicas import Replica
from tokenmix_core.training.sharded_trainer import ShardedTrainer, reading
from tokenmix_core.training.weight_decay import decay_parameter_names

# dense bfloat16 FLOP/s by a part of the GPU's name; the first entry that occurs in the name counts
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
# FLOPs per micro-batch and layer below which a GPU waits for the CPU to launch kernels: CUDA graphs made steps of
# .84e12 FLOPs 1.6 times as fast, steps of 3.4e12 FLOPs 1.01 times (docs/step_time.md)
_LAUNCH_BOUND_FLOPS = 2e12


class RecipeTrainer(ShardedTrainer):
    """The Trainer that runs a recipe.

    It adds to the Trainer: the recipe's learning rates and weight decay; training without a cache; tokens/s,
    model-FLOPs utilisation and auxiliary losses in the log; atomic checkpoints; an error if a logged loss or gradient
    norm is not finite, or a weight at a checkpoint; and CUDA graphs.

    Args:
        schedule: the recipe's learning rates and batch sizes.
        seq_len: T, number of tokens in a row.
        identity: values that a checkpoint's manifest must contain for the run to resume from it.
        training_graph: whether to capture forward and backward passes as CUDA graphs, as in `RunRecipe`.
        context_parallel: number of ranks over which each row is split.
        sharded_checkpoint: whether every rank writes its own shards into checkpoints.
    """

    def __init__(
        self,
        *args: Any,
        schedule: OptimizerRecipe,
        seq_len: int,
        identity: dict[str, Any],
        training_graph: TrainingGraph = "never",
        context_parallel: int = 1,
        sharded_checkpoint: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.sharded_checkpoint = sharded_checkpoint
        self._split = RowSplit(self.model, context_parallel) if context_parallel > 1 else None  # type: ignore[arg-type]
        self.schedule, self.identity, self.training_graph = schedule, identity, training_graph
        self._graphed_step: GraphedStep | None = None
        self.output_dir = Path(str(self.args.output_dir))
        # True: our models divide the summed loss by num_items_in_batch themselves
        self.model_accepts_loss_kwargs = True
        self._redirected: Path | None = None
        # auxiliary losses of the last micro-batch; their sums since the last line of the log; number of steps done when
        # these sums began
        self._terms: dict[str, Tensor] = {}
        self._auxiliary: dict[str, Tensor] = {}
        self._steps_before = 0
        self._logged: tuple[float, int] | None = None
        self._stepped = False
        self._seeded: int | None = None
        self._peak_flops = peak_flops(device_name(self.args), bf16=self.args.bf16)
        flops = getattr(self.model, "flops_per_token", None)
        self._flops_per_token = flops(seq_len) if flops is not None else None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that weight decay applies to; see `decay_parameter_names`."""
        return decay_parameter_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the recipe's learning-rate schedule, which the first call creates."""
        if self.lr_scheduler is None:
            # a plain function: LambdaLR would save a callable object in checkpoints
            factor = self.schedule.learning_rate_factor
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(chosen, lambda step: factor(step))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader that yields rows in order and whose worker processes ignore Ctrl-C and SIGTERM."""
        loader = super().get_train_dataloader()
        # get the inner loader, which starts the worker processes; accelerate has wrapped it
        inner = getattr(loader, "base_dataloader", loader)
        if self._split is not None:
            self._split.give_rows_to_groups(inner)
        inner.worker_init_fn = partial(_leave_signals_to_trainer, inner.worker_init_fn)
        return loader

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the forward and backward pass of a micro-batch, as a CUDA graph if that is possible and requested."""

        self._seed_step()
        if not self._stepped:
            self._replica = self._make_replica(model)
        self._stepped = True
        last = self.accelerator.sync_gradients
        replica = nullcontext(model) if self._replica is None else self._replica.micro_batch(last=last)
        with replica as trained:
            losses = self._run_passes(trained, inputs, num_items_in_batch)
        if not self._auxiliary:
            self._steps_before = self.state.global_step
        for name, share in losses.auxiliary.items():
            self._auxiliary[name] = self._auxiliary.get(name, 0.0) + share
        return losses.loss

    def _run_passes(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Losses:
        def passes(inputs: dict[str, Any], items: Any) -> Losses:
            self._terms = {}
            return Losses(step(model, inputs, items), self._terms)

        step = super().training_step
        if self.training_graph != "never" and self._graphed_step is None:
            # make the graphed step only now: callbacks may change the model until the first step
            self._graphed_step = self._make_graphed_step(model)
        if self._graphed_step is None:
            return passes(inputs, num_items_in_batch)
        # a callback may have switched to evaluation mode, in which the passes have another signature
        model.train()
        return self._graphed_step(passes, self._prepare_inputs(inputs), num_items_in_batch)

    def _seed_step(self) -> None:
        """Seed the random generators of a step: dropout then differs between ranks, and a resumed run repeats it."""
        step = self.state.global_step
        if self._seeded != step:
            self._seeded = step
            key = (self.args.seed, step, self.args.process_index)
            set_seed(int(rng.stream("dropout", *key).integers(2**32)))

    def release_graphs(self) -> None:
        """Drop the CUDA graphs and so free their memory."""
        self._graphed_step = None

    def _make_replica(self, model: nn.Module) -> Replica | None:
        """Return a replica that computes without hooks, or None: with DDP graphs alone need one."""
        if not isinstance(model, DistributedDataParallel):
            return super()._make_replica(model)
        if self._split is not None or cuda_graphs.capture_on(self.args.device) is None:
            return None
        auto = self.training_graph == "auto" and self._is_launch_bound(model.module)
        return Replica(model) if auto or self.training_graph == "always" else None

    def _make_graphed_step(self, model: nn.Module) -> GraphedStep | None:
        """Return a `GraphedStep`; None if graphs have no advantage ("auto") or are impossible ("always" then warns)."""
        auto = self.training_graph == "auto"
        try:
            if self._split is not None or (self.args.world_size > 1 and self._replica is None):
                raise ValueError("rows or the model are split over several processes")
            if auto and not self._is_launch_bound(model):
                raise ValueError("the GPU would not wait for the CPU")
            given = None if self._replica is None else self._replica.fixed_gradients()
            way: TrainingGraph = "auto" if auto else "always"
            return GraphedStep(model, self.args.device, training_graph=way, gradients=given)
        except ValueError as why:
            self.training_graph = "never"
            if auto:
                return None
            warnings.warn(f"training continues kernel by kernel, without CUDA graphs: {why}", stacklevel=2)
            return None

    def _is_launch_bound(self, model: nn.Module) -> bool:
        """True if layers have so few FLOPs that launching their kernels takes longer than computing them."""
        layers = getattr(getattr(model, "config", None), "num_hidden_layers", None)
        tokens = self.schedule.batch_tokens / (self.args.gradient_accumulation_steps * self.args.world_size)
        return (
            bool(layers)
            and self._flops_per_token is not None
            and self._flops_per_token * tokens < _LAUNCH_BOUND_FLOPS * layers
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the model's loss, computed without a cache: with one, packed documents would see each other."""
        inputs = {**inputs, "use_cache": False}
        outputs: Any
        inputs, split = (inputs, nullcontext()) if self._split is None else self._split.of(inputs)
        with split:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self._split is not None:
            loss = self._split.share(loss)
        for name, values in (outputs.get("auxiliary") or {}).items():
            if name.endswith("_loss"):
                self._terms[name] = torch.stack([x.detach().float().sum() for x in values]).sum() / num_items_in_batch  # type: ignore[operator]
        return (loss, outputs) if return_outputs else loss

    def get_cp_size(self) -> int:
        """Return the number of ranks that load the same rows."""
        return 1 if self._split is None else self._split.size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add throughput and auxiliary losses to a line of the log.

        Drops the summary line if a finished run is resumed and there is nothing to train.

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
                        "older"
                    )
        super().log(logs, start_time)

    def _log_throughput(self, logs: dict[str, float]) -> None:
        now, step = time.perf_counter(), self.state.global_step
        steps = step - (self._logged[1] if self._logged else 0)
        for name, total in sorted(self._auxiliary.items()):
            # each process has its own part of a sum over the whole batch
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
                # on a network file system, only the process that wrote a file can wait until the file is on disk
                sync_tree(aside)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with self._writing(f"the checkpoint of step {step}"):
                checkpoint.write_manifest(aside / f"checkpoint-{step}", {"step": step, "identity": self.identity})
                checkpoint.publish(aside, self.output_dir)
            checkpoint.remove_old_checkpoints(self.output_dir, self.args.save_total_limit or 1)
            if self.control.should_training_stop and step < self.state.max_steps:
                print(f"checkpoint of step {step} written; stopping", file=sys.stderr)
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.args.process_index == 0:
            size = self.args.world_size
            names = [f"rng_state_{rank}.pth" for rank in range(size)] if size > 1 else ["rng_state.pth"]
            if missing := [name for name in names if not Path(checkpoint, name).is_file()]:
                print(
                    f"{checkpoint} has no {', '.join(missing)}, as it was written by another number of processes: "
                    "dropout draws from seed, step and rank, other random generators start again",
                    file=sys.stderr,
                )
        with reading("random state", checkpoint):
            super()._load_rng_state(checkpoint)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(what, self.output_dir, RuntimeError, SafetensorError)

    def _require_finite_weights(self, model: nn.Module) -> None:
        # each process checks the parameters or shards that it holds
        parameters = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        finite = torch.stack([p.detach().isfinite().all() for p in parameters if p.numel()]).all()
        if not self._gathered(finite).all():
            raise FloatingPointError(
                f"weights are not finite at step {self.state.global_step}: training diverged, and no checkpoint of "
                "this step is written"
            )

    def _gathered(self, value: Tensor) -> Tensor:
        """Return the values that a scalar has on all processes, `[processes]`."""
        gathered = self.accelerator.gather(value[None])
        assert isinstance(gathered, Tensor)
        return gathered

    def save_final(self) -> None:
        """Write model and tokenizer to the output folder; if killed, leave each file whole or absent."""
        aside = self.output_dir / checkpoint.PARTIAL
        with self._writing("the model"):
            self.save_model(str(aside))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (aside / "training_args.bin").unlink(missing_ok=True)
            with self._writing("the model"):
                checkpoint.publish(aside, self.output_dir)
        self.accelerator.wait_for_everyone()


def _leave_signals_to_trainer(then: Callable[[int], None] | None, worker: int) -> None:
    # ignore Ctrl-C and SIGTERM, which reach the whole process group: if a worker ended, the run would fail before its
    # checkpoint
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)


def device_name(args: TrainingArguments) -> str:
    """Return the name of the GPU that a run uses or, on a CPU, of the processor."""
    cuda = args.device.type == "cuda"
    return torch.cuda.get_device_name(args.device) if cuda else platform.processor() or platform.machine()


def peak_flops(device_name: str, *, bf16: bool) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU; None if the GPU is unknown or `bf16` is False."""
    return next((peak for part, peak in PEAK_FLOPS if part in device_name), None) if bf16 else None
