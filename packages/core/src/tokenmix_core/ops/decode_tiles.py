"""Tiles of the Gluon kernels that advance a recurrence by one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from tokenmix_core.ops.dispatch import GluonForm

# a decoding launch with at least this number of programs fills the GPU many times over (many waves)
MANY_PROGRAMS = 2048


class StateStep(NamedTuple):
    """A program's tile of the state `[K, V]`: it updates BV columns, with BK rows of them in registers at a time."""

    BV: int
    BK: int
    num_warps: int


def gluon_step_tile(
    tiles: Mapping[int, StateStep], gluon: GluonForm, state: Tensor, q: Tensor, impl: str | None
) -> StateStep | None:
    """Return the tile of an operation's Gluon kernel for states `[..., HV, K, V]`; None if the portable kernel runs.

    `tiles` maps minimum numbers of blocks to tiles, from the widest tile to the narrowest. A block is 64 columns of a
    head's state. The result is the first tile for which the states of all rows of q together have the minimum number of
    blocks.

    Raises:
        ValueError: `impl` is "gluon" and the kernel does not run.
    """
    B, (HV, K, V) = len(q), state.shape[1:]
    runs = gluon.runs(impl, q.device, q.dtype, step_limit(K, V))
    return next(tile for least, tile in tiles.items() if 64 * least <= B * HV * V) if runs else None


def step_limit(K: int, V: int) -> str | None:
    """Return why the Gluon decoding kernels do not support states `[K, V]`, as a clause; None if they do."""
    return None if K == 128 and V >= 64 else f"takes one token at a time with K = 128 and V ≥ 64, got K={K} and V={V}"
