"""The kernels in Gluon that take one token of a recurrence: which heads they take, and with what tile."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.kernels import tuning
from tokenmix_core.ops.dispatch import GluonForm


def step_tile(op: str, gluon: GluonForm, state: Tensor, q: Tensor, impl: str | None) -> tuning.StateStep | None:
    """The tile of an operation's kernel for a state `[B, HV, K, V]`; None for the portable kernel.

    Raises:
        ValueError: `impl` is "gluon" and the kernel does not run.
    """
    B, HV, K, V = state.shape
    return tuning.state_step(op, B * HV, K, V) if gluon.runs(impl, q.device, q.dtype, step_limit(K, V)) else None


def step_limit(K: int, V: int) -> str | None:
    """Why no such kernel takes these heads; None where they do."""
    return None if K == 128 and V >= 64 else f"takes one token at a time with K = 128 and V ≥ 64, got K={K} and V={V}"
