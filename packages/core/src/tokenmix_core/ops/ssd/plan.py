"""Choose the kernel of each step, once per pass; `tuning.SSDPlan` holds the choice and the tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.ssd import tuning

_HOPPER = "tokenmix_core.ops.ssd.hopper"
GLUON = GluonForm("ssd", _HOPPER, slower="about 1.8 times slower")
GLUON_STEP = GluonForm(
    "ssd_step",
    f"{_HOPPER}.step",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    slower="a little slower where batches are large",
)


def plan(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, impl: str | None) -> tuning.SSDPlan:
    """Return the plan of a call with these queries and values.

    Raises:
        ValueError: `impl` is "gluon", and Gluon kernels do not run here.
        NotCompiled: `impl` is "gluon", and the Gluon kernels did not compile.
    """
    gluon = GLUON.runs(impl, q.device, q.dtype, limit(q.shape[3], v.shape[3]))
    (B, T, G, K), (HV, V) = q.shape, v.shape[2:]
    return tuning.ssd_plan(B, T, num_sequences(q, cu_seqlens), G, HV, K, V, v.dtype, gluon)


def limit(K: int, V: int) -> str | None:
    """Return the reason why no Gluon kernel supports heads of these sizes; None if one does."""
    return f"takes K and V of 64, 128 or 256, got K={K} and V={V}" if min(K, V) < 64 else None
