"""Checks of calls whose rows are split over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tokenmix_core.modeling.lengths import is_given
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.parallel import SequenceShard


def check_split(
    shard: SequenceShard, mixers: Iterable[Mixer], rows: Tensor | None, others: Iterable[Any], use_cache: bool | None
) -> None:
    """Refuse calls for which rows cannot be split over ranks, with the same message on all ranks.

    Args:
        shard: how rows are split over ranks.
        mixers: the mixers of all layers.
        rows: the whole rows' ids or embeddings.
        others: attention mask, positions, boundaries, cache and further inputs; all must be None.
        use_cache: must not be True.

    Raises:
        ValueError: a mixer, an input or a shape that does not support the split.
    """
    if alone := dict.fromkeys(type(mixer).__name__ for mixer in mixers if not splits_sequences(mixer)):
        raise ValueError(
            f"{', '.join(alone)} with these options cannot split a sequence over ranks; "
            "layers of GatedDeltaNet, Mamba2 and Attention can"
        )
    if use_cache or is_given(*others):
        raise ValueError(
            "rows that are split over ranks take ids or embeddings and labels alone: no cache, attention_mask, "
            "position_ids or inputs of mixers, and no cu_seqlens, which the SequenceShard has"
        )
    if rows is not None and (rows.shape[1] != shard.tokens or (shard.packed and rows.shape[0] != 1)):
        wanted = [1 if shard.packed else "B", shard.tokens]
        raise ValueError(
            f"expected the whole rows {wanted} of the SequenceShard on each rank, got {list(rows.shape[:2])}"
        )


def splits_sequences(mixer: Mixer) -> bool:
    """Return `mixer.splits_sequences`; False if the mixer's own class does not set it."""
    return "splits_sequences" in vars(type(mixer)) and mixer.splits_sequences
