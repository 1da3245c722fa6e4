"""The Trainer with our FSDP2 policy, and with checkpoints from which any number of processes can resume."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from tokenmix_core.training import sharding
from tokenmix_core.training.recipe import RunRecipe
from tokenmix_core.training.replicas import GatheredReplica, Replica
from tokenmix_core.training.resharding import grouped_layers, memory_plan, prepare_micro_batch


class ShardedTrainer(Trainer):
    """transformers' Trainer with our FSDP2 policy.

    A checkpoint contains whole weights and optimizer states, in the files that a single process would write; with
    `sharded_checkpoint` it contains each rank's shards. `reshard`: whether to free gathered parameters after each layer
    instead of after each step. `unit_layers`: number of layers whose parameters are gathered together.
    """

    sharded_checkpoint = False
    reshard = True
    unit_layers = 1
    _replica: Replica | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; with `fsdp`, it shards models by our precision policy, also on a CPU."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp:
            sharding.apply_fsdp_policy(self.accelerator, self.args.fsdp_plugin_args or {})
            self.is_fsdp_enabled = True
            prepare = self.accelerator.prepare

            def prepare_grouped(*args: Any, **options: Any) -> Any:
                model: Any = self.model
                with grouped_layers(model, self.unit_layers):
                    return prepare(*args, **options)

            self.accelerator.prepare = prepare_grouped

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """Return the autocast of forward passes under FSDP2; without it, accelerate applies autocast itself.

        accelerate expects FSDP2's policy to cast parameters, which ours does not, and leaves out autocast.
        """
        if not (self.is_fsdp_enabled and self.args.bf16):
            return super().autocast_smart_context_manager(cache_enabled)
        return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=cache_enabled)

    def plan_units(self, run: RunRecipe, tokens: int) -> None:
        """Decide how FSDP2 gathers parameters, with `tokens` in a micro-batch of a rank, and print the choice."""
        args = self.args
        model: Any = self.model
        plan = memory_plan(model, tokens, args.world_size, bf16=args.bf16, checkpointing=run.gradient_checkpointing)
        if run.torch_compile:
            # in compiled models use one layer per unit: larger units were not tested there
            plan = plan._replace(layers=1)
        self.reshard, self.unit_layers = plan.reshards(run.fsdp_reshard), plan.unit_layers(run.fsdp_unit_layers)
        if args.process_index == 0:
            print(plan.told(run.fsdp_reshard, run.fsdp_unit_layers), file=sys.stderr)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the forward and backward pass of a micro-batch."""
        if self.is_fsdp_enabled and self._replica is None:
            prepare_micro_batch(model, reshard=self.reshard, last=self.accelerator.sync_gradients)
        return super().training_step(model, inputs, num_items_in_batch)

    def _make_replica(self, model: nn.Module) -> Replica | None:
        """Return a replica with whole weights, if FSDP2 would keep them for a step; None if its hooks gather them."""
        if not self.is_fsdp_enabled or self.reshard or not isinstance(model, FSDPModule):
            return None
        try:
            return GatheredReplica(model)
        except ValueError as why:
            warnings.warn(f"FSDP2's hooks run in every micro-batch, which is slower: {why}", stacklevel=2)
            return None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, which rank 0 gathers if it is sharded; sharded checkpoints contain the shards instead."""
        if _internal_call and self.sharded_checkpoint:
            return
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        model: Any = self.model
        state = sharding.whole_weights(model, keep=self.args.should_save)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled and not self.sharded_checkpoint:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        model: Any = self.model
        optimizer: Any = self.optimizer
        schedule: Any = self.lr_scheduler
        if self.sharded_checkpoint:
            sharding.save_shards(model, optimizer, Path(output_dir))
        else:
            # this file is the same as in an unsharded run: a single process or DDP can resume from it
            state = sharding.whole(optimizer.state_dict(), keep=self.args.should_save)
            if self.args.should_save:
                torch.save(state, Path(output_dir, "optimizer.pt"))
        if self.args.should_save:
            torch.save(schedule.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        own: Any = self.model
        with reading("weights", resume_from_checkpoint):
            if sharding.has_shards(Path(resume_from_checkpoint)):
                sharding.load_weight_shards(own, Path(resume_from_checkpoint))
            elif self.is_fsdp_enabled:
                sharding.load_weights(own, Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading("optimizer and schedule", checkpoint):
            sharded = checkpoint is not None and sharding.has_shards(Path(checkpoint))
            ours = sharded or self.is_fsdp_enabled
            # "optimizer.bin" is accelerate's name, which checkpoints of earlier versions have
            if checkpoint is None or not ours or Path(checkpoint, "optimizer.bin").exists():
                super()._load_optimizer_and_scheduler(checkpoint)
                return
            load = partial(torch.load, map_location="cpu", weights_only=True)
            model: Any = self.model
            schedule: Any = self.lr_scheduler
            optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
            schedule.load_state_dict(load(Path(checkpoint, "scheduler.pt")))
            if sharded:
                sharding.load_optimizer_shards(model, optimizer, Path(checkpoint))
                for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
                    group["lr"] = rate
            else:
                sharding.load_optimizer(optimizer, load(Path(checkpoint, "optimizer.pt")))


@contextmanager
def reading(what: str, checkpoint: str | None) -> Iterator[None]:
    """Context manager for reading a checkpoint: any error becomes a ValueError that names the unreadable `what`.

    Raises:
        ValueError: reading failed. Errors of all types are caught, because unpickling a damaged file can raise any.
    """
    try:
        yield
    except Exception as error:
        told = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{checkpoint} cannot be resumed from: its {what} cannot be read ({type(error).__name__}: {told}); "
            "remove it to go on from an older one, if there is one"
        ) from error
