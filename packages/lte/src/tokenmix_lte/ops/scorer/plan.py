"""Selection of the scorer's Gluon or Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmix_core.ops import GluonForm
from tokenmix_lte.ops.scorer.sizes import BLOCK_STREAMS, INPUT_STAGES

GLUON = GluonForm("retention_logits", "tokenmix_lte.ops.scorer.hopper", slower="about 2 to 2.4 times slower")
# shared memory that tiles of a CTA on Hopper may occupy, in bytes; scratch memory and barriers take the rest
_SHARED_MEMORY = 230_000


def hopper_limit(K: int, outs: Sequence[int]) -> str | None:
    """Return why the Gluon kernels do not support a scorer that the Triton kernels support, or None if they do."""
    C1, C2, C3 = outs
    if any(C not in (16, 32, 64) for C in (K, *outs)):
        return f"takes 16, 32 or 64 channels of keys and of each layer, got {[K, *outs]}"
    inputs = BLOCK_STREAMS * (2 * INPUT_STAGES * K + 4 * (C1 + C2))
    if 2 * (inputs + 3 * (2 * K * C1 + C1 * C2 + C2 * C3)) > _SHARED_MEMORY:
        return f"takes layers that fit in the shared memory of an SM, got {[K, *outs]} channels"
    return None


def takes_gluon(impl: str | None, device: torch.device, dtype: torch.dtype, K: int, outs: Sequence[int]) -> bool:
    """Return True if the Gluon kernels should compute a call; they do so whenever they support it.

    They also score the tokens of a decoding step, although the Triton kernels are as fast there: a token's logit must
    be bit-identical in a prompt and in decoding.

    Raises:
        ValueError: `impl` is "gluon", but the Gluon kernels do not support the call.
        NotCompiled: `impl` is "gluon", but the Gluon kernels have failed to compile.
    """
    return GLUON.runs(impl, device, dtype, hopper_limit(K, outs))
