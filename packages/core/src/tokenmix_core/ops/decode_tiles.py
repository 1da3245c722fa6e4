"""Tiles of the Gluon kernels that take one token of a recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from tokenmix_core.ops.dispatch import GluonForm

# programs of one token that make many waves
MANY_PROGRAMS = 2048


class StateStep(NamedTuple):
    """BV columns of the state a program, of which BK rows at a time are in registers."""

    BV: int
    BK: int
    num_warps: int


def gluon_step_tile(
    tiles: Mapping[int, StateStep], gluon: GluonForm, state: Tensor, q: Tensor, impl: str | None
) -> StateStep | None:
    """Return the tile of an operation's Gluon kernel for a state `[B, HV, K, V]`; None for the portable kernel.

    `tiles` are the operation's, from the widest, by the least number of programs of 64 columns that they need.

    Raises:
        ValueError: `impl` is "gluon" and the kernel does not run.
    """
    B, HV, K, V = state.shape
    runs = gluon.runs(impl, q.device, q.dtype, step_limit(K, V))
    return next(tile for least, tile in tiles.items() if 64 * least <= B * HV * V) if runs else None


def step_limit(K: int, V: int) -> str | None:
    """Return the reason why no such kernel takes these heads; None if it does."""
    return None if K == 128 and V >= 64 else f"takes one token at a time with K = 128 and V ≥ 64, got K={K} and V={V}"
