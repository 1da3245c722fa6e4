"""Short documents of a packed batch as one sequence that forgets."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# recurrences work by chunks of so many tokens
CHUNK = 64
# what 24 bits cannot tell from nothing, and few enough of them that sums of gates in a chunk keep theirs
FORGOTTEN = -40 * math.log(2)


def as_one_sequence(
    g: Float[Tensor, "B T HV"], cu_seqlens: Int[Tensor, "N_plus_1"] | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Decays and boundaries for a recurrence that starts from nothing and whose last states nobody wants.

    Where 16-bit documents are short on average, a decay of 2⁻⁴⁰ at each one's first token takes the place of
    boundaries:
    documents then share chunks, each of which would cost as much as a full one, and no states are written for them.
    What is not finite in one document reaches those behind it, which it does not otherwise. Elsewhere both come back as
    they are, and so they do where torch traces, which would make a graph for either case.

    Args:
        g: natural logarithms of the decays, float32.
        cu_seqlens: boundaries of the packed documents; None for an unpacked batch.
        dtype: of the values; float32 would see what is left.
    """
    if cu_seqlens is None or torch.compiler.is_compiling() or dtype not in (torch.bfloat16, torch.float16):
        return g, cu_seqlens
    tokens = g.shape[1]
    if tokens >= CHUNK * (cu_seqlens.shape[0] - 1):
        return g, cu_seqlens
    # an empty document at the end begins behind the last token
    first = torch.zeros(tokens + 1, dtype=torch.bool, device=g.device)
    first.index_fill_(0, cu_seqlens[:-1].long(), True)
    return g.masked_fill(first[:-1].view(1, -1, 1), FORGOTTEN), None
