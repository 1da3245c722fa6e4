"""The choice between kernels in Gluon and portable ones, which make all other calls that kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmix_core.ops.choice import GluonForm
from tokenmix_lte.ops.scorer.sizes import BLOCK_STREAMS, RING

GLUON = GluonForm("retention_logits", "tokenmix_lte.ops.scorer.hopper", slower="about 2 to 2.4 times slower")
# bytes that a block may have on Hopper, less what its own scratch and barriers take
_SHARED_MEMORY = 230_000


def hopper_limit(K: int, outs: Sequence[int]) -> str | None:
    """Why kernels in Gluon do not take a scorer that the portable ones take; None where they do."""
    C1, C2, C3 = outs
    if any(C not in (16, 32, 64) for C in (K, *outs)):
        return f"takes 16, 32 or 64 channels of keys and of each layer, got {[K, *outs]}"
    inputs = BLOCK_STREAMS * (2 * RING * K + 4 * (C1 + C2))
    if 2 * (inputs + 3 * (2 * K * C1 + C1 * C2 + C2 * C3)) > _SHARED_MEMORY:
        return f"takes layers that fit on a multiprocessor, got {[K, *outs]} channels"
    return None


def takes_gluon(impl: str | None, device: torch.device, dtype: torch.dtype, K: int, outs: Sequence[int]) -> bool:
    """Tell whether kernels in Gluon make a call: wherever they take it.

    So they do the few tokens of a decoding step's lazy pass, too, where portable ones are as fast: a logit is the same
    number in a prompt and in a piece.

    Raises:
        ValueError: they are asked for and do not run.
        NotCompiled: they are asked for and did not compile.
    """
    return GLUON.runs(impl, device, dtype, hopper_limit(K, outs))
