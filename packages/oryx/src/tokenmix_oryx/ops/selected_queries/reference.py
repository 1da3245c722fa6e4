"""Attention for selected queries in eager PyTorch, one call for each run of adjacent selected queries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.ops import attention, drops_padding


@drops_padding("q", "k", "v", "selected")
def selected_attention_by_runs(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    selected: Bool[Tensor, "B TQ"],
    *,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    impl: str | None = "reference",
) -> Float[Tensor, "B TQ HQ V"]:
    """Compute `selected_attention`, differentiable by autograd; the host reads `selected` and so waits for the device.

    Args:
        impl: implementation of core's attention, which is called for each run.
    """
    shift = k.shape[1] - q.shape[1]
    rows = []
    for i, row in enumerate(selected.tolist()):
        parts = []
        for start, stop, first_key, wanted in _runs(row, cu_seqlens):
            if wanted:
                keys = slice(first_key, stop + shift)
                run = attention(
                    q[i : i + 1, start:stop], k[i : i + 1, keys], v[i : i + 1, keys], scale=scale, impl=impl
                )
                parts.append(run.o)
            else:
                parts.append(q.new_zeros(1, stop - start, q.shape[2], v.shape[3]))
        rows.append(torch.cat(parts, 1))
    # if no query is selected, add 0 · input: the output then depends on the inputs, so that they get zero gradients
    return torch.cat(rows) + 0.0 * (q.sum() + k.sum() + v.sum()) if not selected.any() else torch.cat(rows)


def _runs(selected: list[bool], cu_seqlens: Tensor | None) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the runs of queries that are all selected or all not: start, end, first token of the sequence, selected."""
    boundaries = [0, len(selected)] if cu_seqlens is None else cu_seqlens.tolist()
    for first, last in itertools.pairwise(boundaries):
        start = first
        for wanted, run in itertools.groupby(selected[first:last]):
            stop = start + sum(1 for _ in run)
            yield start, stop, first, wanted
            start = stop
