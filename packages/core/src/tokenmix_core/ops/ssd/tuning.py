"""Tile sizes of SSD's kernels, and the lengths of the segments that sequences are split into."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels.tuning import one_wave
from tokenmix_core.ops.decode_tiles import MANY_PROGRAMS, StateStep


class SSDForward(NamedTuple):
    """The forward kernel's tile: chunks of BT tokens, BV columns of the state per program.

    If `hopper` is not 0, the Gluon kernel runs, with chunks of 64 tokens and `hopper` columns. If `lookback` is not 0,
    a Gluon program computes the outputs of `lookback` tokens, and itself computes the state before these tokens.
    """

    BT: int
    BV: int
    num_warps: int
    num_stages: int
    hopper: int = 0
    lookback: int = 0


class SSDStates(NamedTuple):
    """Tile of the kernels of `states.py`: tokens per chunk (BT), and the part `[BK, BV]` of the state per program."""

    BT: int
    BK: int
    BV: int
    num_warps: int
    num_stages: int


class SSDHopper(NamedTuple):
    """The Gluon gradient kernel's tile: the number of value heads per program, which sums their dq and dk."""

    heads: int
    num_warps: int


class SSDGradients(NamedTuple):
    """Tokens per chunk (BT) and columns of V per iteration (BV); `hopper` selects the Gluon kernel, with chunks of 64.

    If `scans`, a Gluon program computes all chunks of a sequence or segment, in reverse.
    """

    BT: int
    BV: int
    num_warps: int
    num_stages: int
    hopper: SSDHopper | None = None
    scans: bool = False


class SSDRecurrent(NamedTuple):
    """The tile of the token-by-token kernels: columns of the state per program (BV)."""

    BV: int
    num_warps: int


class SSDPlan(NamedTuple):
    """Tokens per segment (`segment`, 0 for whole sequences), and the tiles of each kernel.

    The forward pass and the gradients run in Gluon if `hopper` of their tile is set, else as portable kernels.
    """

    segment: int
    forward: SSDForward
    states: SSDStates
    gradients: SSDGradients


# tiles of the Gluon decoding kernel by minimum number of blocks (`gluon_step_tile`); wide tiles need many waves
STATE_STEPS: dict[int, StateStep] = {
    2048: StateStep(64, 32, 4),
    1024: StateStep(32, 128, 2),
    0: StateStep(32, 32, 2),
}


def ssd_plan(
    B: int, T: int, N: int, G: int, HV: int, K: int, V: int, dtype: torch.dtype, gluon: bool = True
) -> SSDPlan:
    """Return the plan of a call with N sequences in `[B, T]` tokens; the segments do not depend on `gluon`."""
    if dtype == torch.float32:
        forward = SSDForward(64, min(V, 32), 4, 1)
        states = SSDStates(64, min(K, 64), min(V, 64), 4, 1)
        gradients = SSDGradients(64, min(V, 32), 8, 1)
    else:
        hopper = K in (64, 128) and V in (64, 128)
        forward = SSDForward(64, min(V, 64), 8 if K == 256 else 4, 2, _columns(K, V))
        states = SSDStates(64, min(K, 128), min(V, 128), 8 if min(K, V) >= 128 else 4, 3)
        gradients = SSDGradients(
            64,
            min(V, 64 if max(K, V) == 256 else 128),
            8 if min(K, V) >= 128 or K == 256 else 4,
            1,
            _heads_together(B * T, HV // G, HV, K, V) if hopper else None,
        )

    # with `lookback`, one launch computes short sequences, in spans so long that at most two programs run per SM
    programs = N * HV * (V // (forward.hopper or forward.BV))
    if B == N and T <= 512 and forward.hopper and K <= 128:
        spans = (tokens for tokens in (64, 128) if tokens < T and programs * cdiv(T, tokens) <= 2 * one_wave())
        forward = forward._replace(lookback=next(spans, 0))

    wide = forward.hopper > 0 and K >= 128
    segment = 0 if forward.lookback else _segment_tokens(programs, T, K, wide and B == N)

    # the reverse scan is faster if whole sequences of heads of 128 fill the device; other shapes were not timed
    if B == N and not segment and gradients.hopper is not None and K == V == 128 and _fills(N * HV):
        gradients = gradients._replace(scans=True)
    if not gluon:
        forward, gradients = forward._replace(hopper=0, lookback=0), gradients._replace(hopper=None, scans=False)
    return SSDPlan(segment, forward, states, gradients)


def _columns(K: int, V: int) -> int:
    """Return the columns of the state per program of the Hopper forward kernel; 0 selects the portable kernel."""
    if K < 64 or V < 64:
        return 0
    return min(V, 128) if K == 256 else 64


def _segment_tokens(programs: int, T: int, K: int, wide: bool) -> int:
    """Return the length of the segments of sequences of T tokens; 0 if whole sequences make enough programs.

    With segments, k and v are read a second time, by additional launches. With `wide` (Hopper kernel, K ≥ 128,
    unpacked), a split fills only one wave, because a second wave costs more than it gains, and short sequences are
    split only if half of the SMs would idle.
    """
    if programs >= one_wave() or (wide and T <= 2048 and 2 * programs > one_wave()):
        return 0
    # with K = 256 an SM runs one program, with a smaller K two
    at_once = one_wave() * (1 if K == 256 else 2)
    segments = at_once // programs if wide else next_power_of_2(cdiv(at_once, programs))
    segment = max(256, next_power_of_2(cdiv(T, segments)))
    return segment if segment < T else 0


def _fills(programs: int) -> bool:
    """True if `programs`, one at a time on an SM, leave few SMs idle in their last wave."""
    return programs >= 0.9 * cdiv(programs, one_wave()) * one_wave()


def _heads_together(tokens: int, group: int, HV: int, K: int, V: int) -> SSDHopper:
    """Return how many heads of a group (16, 8, 4, 2 or 1) a program computes, for the least estimated time."""
    sizes = [heads for heads in (16, 8, 4, 2) if group % heads == 0 and K * V <= 128 * 64]
    if not sizes:
        return SSDHopper(1, 4)
    chunks = cdiv(tokens, 64) * HV
    # an SM runs one program at a time; the work that all heads of a program share takes half the time of one head's
    # work
    return SSDHopper(min(sizes, key=lambda heads: cdiv(chunks // heads, one_wave()) * (2 * heads + 1)), 8)


def recurrent_tile(sequence_heads: int, K: int, V: int) -> SSDRecurrent:
    """Return the tile of the token-by-token kernel; `sequence_heads` counts the heads of all sequences together."""
    columns = 8 if sequence_heads < one_wave() else 32
    return SSDRecurrent(min(V, columns), 4 if K * columns >= 2048 else 1)


def step_tile(sequence_heads: int, K: int, V: int) -> SSDRecurrent:
    """Return the tile of the portable decoding kernel: wide, to read longer rows, if that leaves many programs."""
    columns = 64 if K == 128 and sequence_heads * V >= 64 * MANY_PROGRAMS else 32
    return SSDRecurrent(min(V, columns), min(4, max(1, K // 32)))
