"""Join short packed documents into one sequence, in which a strong decay at each boundary separates them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# chunk size of the recurrences' kernels
CHUNK = 64
# log decay at a boundary: 2⁻⁴⁰ is below the precision of 16-bit values; a stronger decay would make a chunk's
# cumulative sums of g less precise
BOUNDARY_DECAY = -40 * math.log(2)


def as_one_sequence(
    g: Float[Tensor, "B T HV"], cu_seqlens: Int[Tensor, "N_plus_1"] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Replace document boundaries by decays, for a recurrence that starts from zero and returns no final states.

    If 16-bit documents are shorter than a chunk on average, the decay at each document's first token becomes 2⁻⁴⁰, and
    the returned boundaries are those of one sequence. Several documents then share a chunk, whereas separate documents
    would each cost at least a full chunk, and no final states are written. A NaN or infinity in one document then also
    reaches later documents. In all other cases, and under torch.compile (which would trace one graph for each case),
    `g` and `cu_seqlens` are returned unchanged.

    Args:
        g: natural logarithms of the decays, float32.
        cu_seqlens: boundaries of the packed documents; None for an unpacked batch.
        dtype: dtype of the recurrence's values; only 16-bit dtypes round the remaining 2⁻⁴⁰ away.
    """
    if cu_seqlens is None or torch.compiler.is_compiling() or dtype not in (torch.bfloat16, torch.float16):
        return g, cu_seqlens
    tokens = g.shape[1]
    if tokens >= CHUNK * (cu_seqlens.shape[0] - 1):
        return g, cu_seqlens
    # one element more than there are tokens, because an empty last document begins at index `tokens`
    first = torch.zeros(tokens + 1, dtype=torch.bool, device=g.device)
    first.index_fill_(0, cu_seqlens[:-1].long(), True)
    # boundaries of one sequence, from 0 to the end of the last document, where padding begins
    whole = cu_seqlens[:: len(cu_seqlens) - 1].contiguous()
    return g.masked_fill(first[:-1].view(1, -1, 1), BOUNDARY_DECAY), whole
