"""Packed sequences of a call's tokens, each behind a part of its past, so that any lengths continue in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.nn import Span


class Joined(NamedTuple):
    """S packed tokens: of each sequence the last ones of its past, then those of the call.

    Attributes:
        cu_seqlens: `[N + 1]` int32.
        rows, positions: sequence and position of each token, `[S]`.
        origin: packed index of each sequence's position 0, `[N]`; below its first token if that has another position.
        new: packed index of each token of the call, `[T]`.
    """

    cu_seqlens: Int[Tensor, "N_plus_1"]
    rows: Int[Tensor, "S"]
    positions: Int[Tensor, "S"]
    origin: Int[Tensor, "N"]
    new: Int[Tensor, "T"]

    @property
    def offsets(self) -> Int[Tensor, "S"]:
        """Index of each token in its packed sequence."""
        return torch.arange(len(self.rows), device=self.rows.device) - self.cu_seqlens[self.rows]

    def filled(self, past: Float[Tensor, "S *rest"], call: Float[Tensor, "T *rest"]) -> Float[Tensor, "S *rest"]:
        """Return the call's values at its tokens, and `past` at the others."""
        return past.to(call.dtype).index_copy(0, self.new, call)


def join_past(span: Span, past: Int[Tensor, "N"], total: int) -> Joined:
    """Put the last `past` tokens of each sequence, `total` in all, before its tokens of the call."""
    before, rows = span.before, span.rows
    sizes = past + span.after - before
    cu_seqlens = cu_seqlens_from_lengths(sizes)
    origin = cu_seqlens[:-1] + past - before
    joined = torch.arange(len(sizes), device=past.device).repeat_interleave(sizes, output_size=total + len(rows))
    positions = torch.arange(len(joined), device=past.device) - origin[joined]
    return Joined(cu_seqlens, joined, positions, origin, origin[rows] + span.positions)
