"""Calls whose rows are split over ranks: checks, and prompts that end in a complete cache on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.lengths import is_given
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.parallel import SequenceShard, sequence_shard


def check_split(
    shard: SequenceShard,
    mixers: Iterable[Mixer],
    rows: Tensor | None,
    others: Iterable[Any],
    cache: HybridCache | None,
    use_cache: bool | None,
) -> None:
    """Refuse calls for which rows cannot be split over ranks, with the same message on all ranks.

    Args:
        shard: how rows are split over ranks.
        mixers: the mixers of all layers.
        rows: the whole rows' ids or embeddings.
        others: attention mask, positions and boundaries; all must be None.
        cache: an empty cache if the shard keeps states, else None.
        use_cache: must not be True.

    Raises:
        ValueError: a mixer, an input or a shape that does not support the split.
    """
    if alone := dict.fromkeys(type(mixer).__name__ for mixer in mixers if not mixer.declares("splits_sequences")):
        raise ValueError(
            f"{', '.join(alone)} with these options cannot split a sequence over ranks; "
            "layers of GatedDeltaNet, Mamba2 and Attention can"
        )
    if shard.keeps_states:
        if alone := dict.fromkeys(type(mixer).__name__ for mixer in mixers if not mixer.declares("splits_prompts")):
            raise ValueError(
                f"{', '.join(alone)} cannot split a prompt over ranks; compute it on each rank without a SequenceShard"
            )
        if shard.packed or cache is None or cache.length:
            raise ValueError("a split prompt needs rows of one document each and an empty cache; see split_prefill")
    elif cache is not None:
        use_cache = True
    if use_cache or is_given(*others):
        raise ValueError(
            "rows that are split over ranks take ids or embeddings, labels and inputs of mixers alone: no cache, "
            "attention_mask or position_ids, and no cu_seqlens, which the SequenceShard has"
        )
    if rows is not None and (rows.shape[1] != shard.tokens or (shard.packed and rows.shape[0] != 1)):
        wanted = [1 if shard.packed else "B", shard.tokens]
        raise ValueError(
            f"expected the whole rows {wanted} of the SequenceShard on each rank, got {list(rows.shape[:2])}"
        )


@torch.no_grad()
def split_prefill(
    model: Any,
    input_ids: Int[Tensor, "B T"],
    *,
    cache: HybridCache | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Float[Tensor, "B vocab"], HybridCache]:
    """Run a prompt whose tokens are split over ranks; return its last logits and the cache, both equal on all ranks.

    Afterwards every rank can decode by itself: either all ranks decode the same, or one continues alone. The last
    tokens, up to twice the number of ranks, are computed on each rank, so that a prompt may have any length.

    Args:
        model: a `HybridForCausalLM` in evaluation mode, the same on all ranks.
        input_ids: the prompt without padding, equal on all ranks.
        cache: an empty cache to fill; None for a new one.
        group: the ranks; None for all.

    Raises:
        ValueError: a layer whose states cannot be split, or a cache with tokens; the message is the same on all ranks.
    """
    filled: HybridCache = model.make_cache() if cache is None else cache
    parts, tokens = 2 * dist.get_world_size(group), input_ids.shape[1]
    first = (tokens - 1) // parts * parts
    if first:
        with sequence_shard(SequenceShard(first, layout="zigzag", group=group, keeps_states=True)):
            model.model(input_ids[:, :first], cache=filled)
    out = model(input_ids[:, first:], cache=filled, logits_to_keep=1)
    return out.logits[:, -1], filled
