"""Losses of rows that are split over the ranks of a process group, for texts that are too long for one GPU."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


@torch.inference_mode()
def split_token_losses(
    model: Any, input_ids: Int[Tensor, "B T"], *, group: Any = None, block: int = 4096
) -> Float[Tensor, "B T-1"]:
    """Return `token_losses` on all ranks; each computes its tokens of every row, one row after another.

    Args:
        model: a `HybridForCausalLM` in evaluation mode, the same on all ranks.
        input_ids: the tokens, the same on all ranks, on the model's device.
        group: the ranks; None for all.
        block: tokens whose logits exist at the same time.

    Raises:
        ValueError: another library's model, or a layer that cannot split rows; the message is the same on all ranks.
    """
    # a late import: `info` lists the suites and should not import models
    from tokenmix_core.modeling import HybridForCausalLM
    from tokenmix_core.parallel import SequenceShard, gather_rows, sequence_shard

    if not isinstance(model, HybridForCausalLM):
        raise ValueError(f"only hybrid models split rows over processes, got {type(model).__name__}; run one process")
    parts = 2 * torch.distributed.get_world_size(group)
    tokens, losses = input_ids.shape[1] - 1, []
    padding = -tokens % parts
    # padding is a document of its own, which the other documents do not see
    boundaries = [0, tokens, tokens + padding] if padding else None
    for row in input_ids.split(1):
        shard = SequenceShard(tokens + padding, boundaries, layout="zigzag", group=group)
        with sequence_shard(shard):
            hidden = model.model(F.pad(row[:, :-1], (0, padding)), use_cache=False).last_hidden_state
        targets = shard.split(F.pad(row[:, 1:], (0, padding)))
        found = [
            F.cross_entropy(model.lm_head(x).float().flatten(0, 1), y.flatten(), reduction="none").view_as(y)
            for x, y in zip(hidden.split(block, 1), targets.split(block, 1), strict=True)
        ]
        losses.append(gather_rows(shard, torch.cat(found, 1))[:, :tokens])
    return torch.cat(losses)
