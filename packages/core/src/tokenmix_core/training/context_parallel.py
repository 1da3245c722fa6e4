"""Train with rows split over ranks: consecutive ranks form a group, and all ranks of a group load the same rows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tokenmix_core.parallel import SequenceShard, balanced_layout, sequence_shard
from tokenmix_core.parallel.shard import Layout


def check_context_parallel(size: int, world_size: int, seq_len: int) -> None:
    """Check that `size` divides the number of ranks and 2 · `size` divides the row; all ranks raise the same error.

    Raises:
        ValueError: `world_size` is no multiple of `size`, or `seq_len` is no multiple of `2 * size`.
    """
    if world_size % size:
        raise ValueError(
            f"context_parallel={size} needs a number of processes that is a multiple of {size}, got {world_size}"
        )
    if size > 1 and seq_len % (2 * size):
        raise ValueError(
            f"context_parallel={size} needs rows (seq_len) of a multiple of {2 * size} tokens, got {seq_len}"
        )


class RowSplit:
    """Splits each micro-batch along time over the `size` ranks of this process's group.

    Parameters are replicated or sharded over all ranks, as without a split, because each rank's gradient is its part of
    a sum over tokens.
    """

    def __init__(self, model: nn.Module, size: int):
        self.size = size
        self.group, _ = dist.new_subgroups(size)
        self.layout: Layout = balanced_layout(model)

    def give_rows_to_groups(self, loader: DataLoader) -> None:
        """Let all ranks of a group load the same rows from a loader that accelerate has divided among all ranks."""
        sampler: Any = loader.batch_sampler
        sampler.num_processes //= self.size
        sampler.process_index //= self.size

    def of(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], AbstractContextManager[Any]]:
        """Return inputs without `cu_seqlens`, and a context manager that tells layers the split and boundaries."""
        boundaries = inputs.get("cu_seqlens")
        shard = SequenceShard(inputs["input_ids"].shape[1], boundaries, layout=self.layout, group=self.group)
        return {name: x for name, x in inputs.items() if name != "cu_seqlens"}, sequence_shard(shard)

    def share(self, loss: Tensor) -> Tensor:
        """Return the group's loss with its value divided by `size` and its gradient unchanged.

        The Trainer adds up values and gradients over all ranks. The values of a group's ranks are equal, but the
        gradient of a rank is only its part of the group's gradient.
        """
        return loss - (1 - 1 / self.size) * loss.detach()
