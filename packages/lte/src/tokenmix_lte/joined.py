"""Pack each sequence's last past tokens before its new tokens, so that one call continues sequences of any length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.nn import Span


class Joined(NamedTuple):
    """S packed tokens: for each sequence, its last past tokens followed by its tokens of the call.

    Attributes:
        cu_seqlens: boundaries of the packed sequences, `[N + 1]` int32.
        rows, positions: each token's sequence, and its position in this sequence, `[S]`.
        origin: packed index of each sequence's position 0, even if that token is not packed, `[N]`.
        new: packed index of each token of the call, `[T]`.
    """

    cu_seqlens: Int[Tensor, "N_plus_1"]
    rows: Int[Tensor, "S"]
    positions: Int[Tensor, "S"]
    origin: Int[Tensor, "N"]
    new: Int[Tensor, "T"]

    @property
    def offsets(self) -> Int[Tensor, "S"]:
        """Index of each token within its packed sequence."""
        return torch.arange(len(self.rows), device=self.rows.device) - self.cu_seqlens[self.rows]

    def filled(self, past: Float[Tensor, "S *rest"], call: Float[Tensor, "T *rest"]) -> Float[Tensor, "S *rest"]:
        """Return `call` at the tokens of the call, and `past` at all other tokens."""
        return past.to(call.dtype).index_copy(0, self.new, call)


def join_past(span: Span, past: Int[Tensor, "N"], total: int) -> Joined:
    """Pack the last `past` tokens of each sequence before its tokens of the call; `total` is the sum of `past`."""
    before, rows = span.before, span.rows
    sizes = past + span.after - before
    cu_seqlens = cu_seqlens_from_lengths(sizes)
    origin = cu_seqlens[:-1] + past - before
    joined = torch.arange(len(sizes), device=past.device).repeat_interleave(sizes, output_size=total + len(rows))
    positions = torch.arange(len(joined), device=past.device) - origin[joined]
    return Joined(cu_seqlens, joined, positions, origin, origin[rows] + span.positions)
