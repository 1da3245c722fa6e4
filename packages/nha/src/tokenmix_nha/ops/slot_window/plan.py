"""Which kernels make a pass: decided here, once for it; `tuning` has their tiles."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops.choice import GluonForm
from tokenmix_nha.ops.slot_window import tuning

GLUON = GluonForm(
    "slot_window_attention",
    "tokenmix_nha.ops.slot_window.hopper",
    dtypes=(torch.bfloat16,),
    slower="about 2 times slower",
)

Form = Literal["triton", "gluon"]


class SlotWindowPlan(NamedTuple):
    """Whose kernels take the chunks whose gates are weak, in each pass; the others are always Triton's."""

    forward: Form
    backward: Form


def plan(
    slots: int, window: int, impl: str | None, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
) -> SlotWindowPlan:
    """The plan of a call with tiles of `slots` slots; `others` are what else is read by rows.

    Raises:
        ValueError: `impl` is "gluon" and kernels in Gluon do not run.
    """
    why = limit(slots, k.shape[3], v.shape[3])
    if any(x is not None and x.data_ptr() % 16 for x in (q, k, v, *others)):
        why = why or "takes tensors that begin at multiples of 16 bytes"
    if not GLUON.runs(impl, q.device, q.dtype, why):
        return SlotWindowPlan("triton", "triton")
    return SlotWindowPlan("gluon" if window <= tuning.HOPPER_WINDOW else "triton", "gluon")


def limit(slots: int, K: int, V: int) -> str | None:
    """Why kernels in Gluon take no tiles of so many slots and such heads; None where they do."""
    if slots in (32, 64) and {K, V} <= {64, 128}:
        return None
    return f"takes at most 64 slots, and K and V of 64 or 128, got M={slots}, K={K} and V={V}"
