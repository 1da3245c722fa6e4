"""Fold short packed documents into one sequence by a decay at each boundary."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# chunk size of the recurrences' kernels
CHUNK = 64
# log decay at a boundary: below the 24-bit mantissa, and small enough that cumulative gates in a chunk stay precise
BOUNDARY_DECAY = -40 * math.log(2)


def as_one_sequence(
    g: Float[Tensor, "B T HV"], cu_seqlens: Int[Tensor, "N_plus_1"] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Replace boundaries by decays, for a recurrence with zero initial states and unused final states.

    If 16-bit documents are shorter than a chunk on average, each boundary becomes a decay of 2⁻⁴⁰ at the document's
    first token, and the boundaries are those of one sequence. Documents then share chunks, each of which would
    otherwise cost as much as a full one, and no states are written for them. A NaN or infinity in one document then
    reaches later documents, too. In all other cases, and under torch.compile (which would trace a graph per case), both
    arguments are returned unchanged.

    Args:
        g: natural logarithms of the decays, float32.
        cu_seqlens: boundaries of the packed documents; None for an unpacked batch.
        dtype: of the values; float32 values would be affected by the remaining 2⁻⁴⁰.
    """
    if cu_seqlens is None or torch.compiler.is_compiling() or dtype not in (torch.bfloat16, torch.float16):
        return g, cu_seqlens
    tokens = g.shape[1]
    if tokens >= CHUNK * (cu_seqlens.shape[0] - 1):
        return g, cu_seqlens
    # an empty last document begins at index `tokens`
    first = torch.zeros(tokens + 1, dtype=torch.bool, device=g.device)
    first.index_fill_(0, cu_seqlens[:-1].long(), True)
    # one sequence, which ends where padding begins
    whole = cu_seqlens[:: len(cu_seqlens) - 1].contiguous()
    return g.masked_fill(first[:-1].view(1, -1, 1), BOUNDARY_DECAY), whole
