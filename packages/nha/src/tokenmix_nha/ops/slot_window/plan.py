"""Selection of Gluon or Triton kernels for forward and backward; `tuning` has their tile sizes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import GluonForm
from tokenmix_nha.ops.slot_window import tuning

GLUON = GluonForm(
    "slot_window_attention",
    "tokenmix_nha.ops.slot_window.hopper",
    dtypes=(torch.bfloat16,),
    slower="about 2 times slower",
)

Form = Literal["triton", "gluon"]


class SlotWindowPlan(NamedTuple):
    """The kernels of each pass for weak chunks, in which no slot decays by more than 80 bits.

    Strong chunks always run in Triton.
    """

    forward: Form
    backward: Form


def plan(
    slots: int, window: int, impl: str | None, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
) -> SlotWindowPlan:
    """Return the plan of a call; a tile has `slots` slots, and `others` are further tensors that the kernels read.

    Raises:
        ValueError: `impl` is "gluon" and the Gluon kernels cannot run.
    """
    why = limit(slots, k.shape[3], v.shape[3])
    if any(x is not None and x.data_ptr() % 16 for x in (q, k, v, *others)):
        why = why or "takes tensors that begin at multiples of 16 bytes"
    if not GLUON.runs(impl, q.device, q.dtype, why):
        return SlotWindowPlan("triton", "triton")
    return SlotWindowPlan("gluon" if window <= tuning.HOPPER_WINDOW else "triton", "gluon")


def limit(slots: int, K: int, V: int) -> str | None:
    """Return the reason why the Gluon kernels do not support these sizes; None if they do."""
    if slots in (32, 64) and {K, V} <= {64, 128}:
        return None
    return f"takes at most 64 slots, and K and V of 64 or 128, got M={slots}, K={K} and V={V}"
