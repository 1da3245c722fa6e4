"""Which kernels make each step of a call: decided here, once for a pass; `tuning.SSDPlan` has the tiles."""

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
    """The plan of a call with these queries and values.

    Raises:
        ValueError: `impl` is "gluon" and kernels in Gluon do not run.
    """
    gluon = GLUON.runs(impl, q.device, q.dtype, limit(q.shape[3], v.shape[3]))
    return tuning.ssd_plan(*_sizes(q, v, cu_seqlens), gluon)


def limit(K: int, V: int) -> str | None:
    """Why no kernel in Gluon takes such heads; None where some do."""
    return f"takes K and V of 64, 128 or 256, got K={K} and V={V}" if min(K, V) < 64 else None


def _sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple:
    (B, T, G, K), (HV, V) = q.shape, v.shape[2:]
    return B, T, num_sequences(q, cu_seqlens), G, HV, K, V, v.dtype
