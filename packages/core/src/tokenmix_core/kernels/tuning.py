"""Kernel configurations by shape: small fixed tables, measured once, in place of autotuning at a user's first call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tokenmix_core.chunking import cdiv, next_power_of_2
from tokenmix_core.kernels.changes import watch


class AttentionTile(NamedTuple):
    """BM queries meet BN keys."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


# by kernel and bound of the head size: the fastest of those measured on an H200 (docs/log/attention.md); float32 is
# multiplied without matrix units and holds twice the bytes
_ATTENTION: dict[str, dict[int, AttentionTile]] = {
    "forward": {64: AttentionTile(64, 64, 4, 3), 128: AttentionTile(64, 64, 4, 3), 256: AttentionTile(128, 64, 8, 2)},
    "backward_queries": {
        64: AttentionTile(64, 64, 4, 3),
        128: AttentionTile(64, 64, 4, 2),
        256: AttentionTile(64, 32, 4, 2),
    },
    "backward_keys": {
        64: AttentionTile(64, 64, 4, 2),
        128: AttentionTile(32, 64, 4, 3),
        256: AttentionTile(32, 64, 8, 2),
    },
}
_ATTENTION_FLOAT32: dict[int, AttentionTile] = {
    64: AttentionTile(32, 32, 4, 2),
    128: AttentionTile(32, 32, 8, 1),
    256: AttentionTile(16, 16, 4, 1),
}


def attention(kernel: str, head_size: int, dtype: torch.dtype) -> AttentionTile:
    """The tile of an attention kernel: "forward", "backward_keys" or "backward_queries"."""
    table = _ATTENTION_FLOAT32 if dtype == torch.float32 else _ATTENTION[kernel]
    return next(tile for bound, tile in table.items() if head_size <= bound)


def attention_stages(head_size: int, programs: int) -> tuple[int, int]:
    """How many places the forward kernel for Hopper has for tiles of keys, and of values, and a thread's registers.

    So four blocks share a SM with heads of 64 and two with heads of 128, or three by one place, which
    counts where many programs wait.
    """
    if head_size == 64:
        return 2, 128
    return (1, 168) if crowded(programs) else (2, ALL_REGISTERS)


# of a thread, which ptxas is told of for wide tiles of float32: by itself, as 12.8 and 12.9, it falls back to 32 there,
# and spills up to 16 KB
ALL_REGISTERS = 255


class KeptAttentionTile(NamedTuple):
    """BM queries meet BN columns, in at most so many registers a thread where that is a number."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# as above, chosen by registers and shared memory of the machine code for sm_90: with heads of 64, 168 registers let
# three blocks share a SM; where keys are gathered, two stages go to their positions
_KEPT_ATTENTION: dict[str, dict[int, KeptAttentionTile]] = {
    "forward": {
        64: KeptAttentionTile(64, 64, 4, 5, 168),
        128: KeptAttentionTile(64, 64, 4, 3),
        256: KeptAttentionTile(128, 64, 8, 2),
    },
    "backward_queries": {
        64: KeptAttentionTile(64, 64, 4, 5, 168),
        128: KeptAttentionTile(64, 64, 4, 3),
        256: KeptAttentionTile(64, 32, 4, 2),
    },
    "backward_keys": {
        64: KeptAttentionTile(64, 64, 4, 2),
        128: KeptAttentionTile(32, 64, 4, 3),
        256: KeptAttentionTile(32, 64, 8, 2),
    },
}


def kept_attention(kernel: str, head_size: int, dtype: torch.dtype, unit: int) -> KeptAttentionTile:
    """The same of attention over kept keys. BN divides 64: a tile of columns lies in one unit of more than a token."""
    if dtype == torch.float32:
        return KeptAttentionTile(*attention(kernel, head_size, dtype), ALL_REGISTERS if head_size > 128 else None)
    tile = next(tile for bound, tile in _KEPT_ATTENTION[kernel].items() if head_size <= bound)
    if kernel == "backward_keys" or unit == 1:
        return tile
    return tile._replace(num_stages=attention(kernel, head_size, dtype).num_stages)


# of the forward kernel for Hopper, by head sizes: as many registers as four, three, three and two blocks a
# SM leave a thread, which is the most blocks without spills in its loop
KEPT_ATTENTION_HOPPER: dict[tuple[int, int], KeptAttentionTile] = {
    (64, 64): KeptAttentionTile(64, 64, 4, 1, 128),
    (64, 128): KeptAttentionTile(64, 64, 4, 1, 168),
    (128, 64): KeptAttentionTile(64, 64, 4, 1, 168),
    (128, 128): KeptAttentionTile(64, 64, 4, 1, 255),
}


def kept_attention_hopper(K: int, V: int) -> KeptAttentionTile:
    """The tile of that kernel: BN divides 64, as a tile of columns lies in one unit; BM is BN where K and V differ."""
    return KEPT_ATTENTION_HOPPER[K, V]


def kept_attention_pieces(tiles: int, device: torch.device) -> int:
    """Into how many pieces the work of `tiles` tiles of keys is cut, beyond one a tile: some rounds of programs.

    Sums of pieces take room, so where keys are few there are fewer.
    """
    return min(8 * sm_count(device), max(2 * sm_count(device), tiles // 4))


def attention_decode(head_size: int, dtype: torch.dtype) -> tuple[int, int, int, int | None]:
    """BN, num_warps, num_stages and maxnreg of the decoding kernel, which is bound by reading the cache."""
    if dtype == torch.float32 or head_size > 128:
        return 32, 4, 2, ALL_REGISTERS if dtype == torch.float32 and head_size > 128 else None
    return 64, 4, 3, None


def splits(programs: int, tiles: int, device: torch.device) -> int:
    """Into how many parts each of `programs` loops over `tiles` tiles is split, to give every SM two."""
    return max(1, min(2 * sm_count(device) // programs, tiles // 2, 64))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where kernels are only interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def one_round() -> int:
    """As many programs as the current GPU has SMs; 132, as of an H100 or H200, before there is a GPU."""
    if not torch.cuda.is_initialized():
        return 132
    return sm_count(torch.device("cuda", torch.cuda.current_device()))


class SSDForward(NamedTuple):
    """Chunks of BT tokens, BV columns of the state a program; in Gluon `hopper` columns and chunks of 64, unless 0.

    With `lookback`, sequences of one length are cut up in Gluon into that many tokens a program, each of which makes
    the state before its tokens by itself.
    """

    BT: int
    BV: int
    num_warps: int
    num_stages: int
    hopper: int = 0
    lookback: int = 0


class SSDStates(NamedTuple):
    """Chunks of BT tokens, a tile `[BK, BV]` of the state a program."""

    BT: int
    BK: int
    BV: int
    num_warps: int
    num_stages: int


class SSDHopper(NamedTuple):
    """Value heads a program, whose dq and dk it sums."""

    heads: int
    num_warps: int


class SSDGradients(NamedTuple):
    """Chunks of BT tokens, V in steps of BV; or, in Gluon, chunks of 64 where `hopper` is not None.

    Where it `walks`, in Gluon too, a program takes all chunks of a sequence or segment, one after the other.
    """

    BT: int
    BV: int
    num_warps: int
    num_stages: int
    hopper: SSDHopper | None = None
    walks: bool = False


class SSDRecurrent(NamedTuple):
    """BV columns of the state a program."""

    BV: int
    num_warps: int


class SSDPlan(NamedTuple):
    """How a call is cut up: `segment` tokens a program, 0 for whole sequences, and the tiles of each kernel.

    A kernel in Gluon runs where its part of the plan has a `hopper`, a portable one elsewhere.
    """

    segment: int
    forward: SSDForward
    states: SSDStates
    gradients: SSDGradients


# programs that do so for many rounds
_MANY = 2048


def ssd(B: int, T: int, N: int, G: int, HV: int, K: int, V: int, dtype: torch.dtype, gluon: bool = True) -> SSDPlan:
    """The plan of an SSD call of N sequences over `[B, T]` tokens; segments are the same with and without Gluon."""
    if dtype == torch.float32:
        forward = SSDForward(64, min(V, 32), 4, 1)
        states = SSDStates(64, min(K, 64), min(V, 64), 4, 1)
        gradients = SSDGradients(64, min(V, 32), 8, 1)
    else:
        hopper = K in (64, 128) and V in (64, 128)
        forward = SSDForward(64, min(V, 64), 8 if K == 256 else 4, 2, _ssd_columns(K, V))
        states = SSDStates(64, min(K, 128), min(V, 128), 8 if min(K, V) >= 128 else 4, 3)
        gradients = SSDGradients(
            64,
            min(V, 64 if max(K, V) == 256 else 128),
            8 if min(K, V) >= 128 or K == 256 else 4,
            1,
            _ssd_hopper(B * T, HV // G, HV, K, V) if hopper else None,
        )

    # short sequences in one launch: twice as many programs fit as there are SMs
    programs = N * HV * (V // (forward.hopper or forward.BV))
    if B == N and T <= 512 and forward.hopper and K <= 128:
        spans = (tokens for tokens in (64, 128) if tokens < T and programs * cdiv(T, tokens) <= 2 * one_round())
        forward = forward._replace(lookback=next(spans, 0))

    wide = forward.hopper > 0 and K >= 128
    segment = 0 if forward.lookback else _ssd_segment(programs, T, K, wide and B == N)

    # where whole sequences of wide heads fill the device, a walk is faster: elsewhere it was not timed
    if B == N and not segment and gradients.hopper is not None and K == V == 128 and _fills(N * HV):
        gradients = gradients._replace(walks=True)
    if not gluon:
        forward, gradients = forward._replace(hopper=0, lookback=0), gradients._replace(hopper=None, walks=False)
    return SSDPlan(segment, forward, states, gradients)


def _ssd_columns(K: int, V: int) -> int:
    """Columns of the state a program for Hopper; 0 where Triton's form is taken."""
    if K < 64 or V < 64:
        return 0
    return min(V, 128) if K == 256 else 64


def _ssd_segment(programs: int, T: int, K: int, wide: bool) -> int:
    """Tokens of the segments that sequences of T are cut into; 0 for whole ones, which are programs enough.

    Segments read k and v once more and take more launches. Where the states are `wide` they are cut into one round of
    programs, as more cost more than they gain; and, if short, only where half of the SMs would idle.
    """
    if programs >= one_round() or (wide and T <= 2048 and 2 * programs > one_round()):
        return 0
    # states of 256 keys leave room for one program a SM
    at_once = one_round() * (1 if K == 256 else 2)
    pieces = at_once // programs if wide else next_power_of_2(cdiv(at_once, programs))
    segment = max(256, next_power_of_2(cdiv(T, pieces)))
    return segment if segment < T else 0


def _fills(programs: int) -> bool:
    """Tell whether rounds of a program a SM leave few of them idle."""
    return programs >= 0.9 * cdiv(programs, one_round()) * one_round()


def _ssd_hopper(tokens: int, group: int, HV: int, K: int, V: int) -> SSDHopper:
    """16, 8, 4 or 2 heads of a group a program, which share products, by how many rounds of programs they make."""
    sizes = [heads for heads in (16, 8, 4, 2) if group % heads == 0 and K * V <= 128 * 64]
    if not sizes:
        return SSDHopper(1, 4)
    chunks = cdiv(tokens, 64) * HV
    # one program a SM; what it does once takes as long as half a head
    return SSDHopper(min(sizes, key=lambda heads: cdiv(chunks // heads, one_round()) * (2 * heads + 1)), 8)


def ssd_recurrent(sequence_heads: int, K: int, V: int) -> SSDRecurrent:
    """The tile of the SSD kernel that goes token by token."""
    columns = 8 if sequence_heads < one_round() else 32
    return SSDRecurrent(min(V, columns), 4 if K * columns >= 2048 else 1)


def ssd_step(sequence_heads: int, K: int, V: int) -> SSDRecurrent:
    """The same for one token: wide tiles, which read longer rows, where they make many rounds of programs."""
    columns = 64 if K == 128 and sequence_heads * V >= 64 * _MANY else 32
    return SSDRecurrent(min(V, columns), min(4, max(1, K // 32)))


class StateStep(NamedTuple):
    """BV columns of the state a program, of which BK rows at a time are in registers."""

    BV: int
    BK: int
    num_warps: int


# on Hopper, by the programs that 64 columns each would make, from many on: long rows pay where there are many rounds
STATE_STEPS: dict[str, dict[int, StateStep]] = {
    "gated_delta_rule": {1024: StateStep(64, 64, 4), 0: StateStep(32, 32, 2)},
    "ssd": {2048: StateStep(64, 32, 4), 1024: StateStep(32, 128, 2), 0: StateStep(32, 32, 2)},
}


def state_step(op: str, sequence_heads: int, K: int, V: int) -> StateStep | None:
    """The tile of one token of an operation in Gluon; None where it has no such kernel."""
    if K != 128 or V < 64:
        return None
    return next(tile for least, tile in STATE_STEPS[op].items() if sequence_heads * V >= 64 * least)


class ScanTile(NamedTuple):
    """BV columns of the state a program; for kernels that are not split along V, the tile they take at a time.

    At most so many registers a thread where `maxnreg` is a number.
    """

    BV: int
    num_warps: int
    num_stages: int
    BK: int = 256
    maxnreg: int | None = None


# by bytes of an element and key size, for the steps that run along a sequence: tiles from wide to narrow
_GATED_DELTA_RULE_SEQUENCE: dict[tuple[int, int], tuple[ScanTile, ...]] = {
    (2, 64): (ScanTile(64, 4, 2), ScanTile(32, 4, 3)),
    (2, 128): (ScanTile(64, 4, 2), ScanTile(32, 4, 3)),
    (2, 256): (ScanTile(32, 8, 2), ScanTile(16, 8, 2)),
    # float32 operands are split in parts, and 8 warps read past their tile where K is 256
    (4, 64): (ScanTile(32, 4, 1),),
    (4, 128): (ScanTile(32, 4, 1),),
    (4, 256): (ScanTile(32, 4, 1, maxnreg=ALL_REGISTERS),),
}
# the same where the state is held transposed: 64 columns are the rows of one warp group
_GATED_DELTA_RULE_TRANSPOSED = _GATED_DELTA_RULE_SEQUENCE | {
    (2, 64): (ScanTile(64, 4, 3),),
    (2, 128): (ScanTile(64, 4, 3),),
    (2, 256): (ScanTile(64, 4, 2),),
}
_GATED_DELTA_RULE: dict[str, dict[tuple[int, int], tuple[ScanTile, ...]]] = {
    # here the tile runs along K
    "prepare": {(size, K): (ScanTile(128 // size, 1, size // 2),) for size in (2, 4) for K in (64, 128, 256)},
    "forward": _GATED_DELTA_RULE_TRANSPOSED | {(2, 128): (ScanTile(64, 4, 2),), (2, 256): (ScanTile(128, 8, 2),)},
    "states": _GATED_DELTA_RULE_TRANSPOSED,
    "segment": _GATED_DELTA_RULE_TRANSPOSED,
    "entering": {(size, K): (ScanTile(16, 4, 2, 32),) for size in (2, 4) for K in (64, 128, 256)},
    "backward_state": _GATED_DELTA_RULE_SEQUENCE,
    "backward_chunk": {
        (2, 64): (ScanTile(32, 4, 2),),
        (2, 128): (ScanTile(64, 8, 2),),
        (2, 256): (ScanTile(64, 8, 2, 128),),
        (4, 64): (ScanTile(32, 8, 1, 64),),
        (4, 128): (ScanTile(32, 8, 1, 64),),
        (4, 256): (ScanTile(32, 8, 1, 64),),
    },
    "recurrent": {(size, K): (ScanTile(4096 // K, 1, 1),) for size in (2, 4) for K in (64, 128, 256)},
    # one token
    "step": {
        (size, K): tiles
        for size in (2, 4)
        for K, tiles in (
            (64, (ScanTile(32, 1, 1),)),
            (128, (ScanTile(64, 4, 1), ScanTile(32, 2, 1))),
            (256, (ScanTile(16, 2, 1),)),
        )
    },
}


def gated_delta_rule(step: str, K: int, V: int, element_size: int, heads: int) -> ScanTile:
    """The tile of a step for `heads` sequence-heads: the widest that still makes a program for every SM.

    One token, whose programs are short, takes wide tiles where these make many rounds of programs.
    """
    tiles, least = _GATED_DELTA_RULE[step][element_size, K], _MANY if step == "step" else 128
    return next((tile for tile in tiles if heads * (V // tile.BV) >= least), tiles[-1])


# bytes up to which the forward pass keeps R and the states of chunks, which else the backward pass makes anew
GATED_DELTA_RULE_KEEPS = 8 << 20


def gated_delta_rule_segment(sequences: int, HV: int, tokens: int, walks: int = 1) -> int:
    """Tokens of the segments that sequences are split into, a multiple of 64; 0 for whole sequences.

    Where `walks` programs share a value head, one round of them is better than several, if that leaves segments at all.
    """
    length = cdiv(tokens, sequences)
    pieces = one_round() // (sequences * HV)
    pieces = pieces // walks if pieces >= 2 * walks else pieces
    segment = max(1024, cdiv(cdiv(length, pieces), 64) * 64) if pieces > 1 else length
    return segment if segment < length else 0


def gated_delta_rule_columns(programs: int, V: int) -> int:
    """Columns of the state a program of the forward step on Hopper: half of them where that leaves one round."""
    return V // 2 if 2 * programs <= one_round() else V


def gated_delta_rule_backward_segment(sequences: int, HV: int, tokens: int, packed: bool, walks: int = 1) -> int:
    """The same for the reverse pass on Hopper, to which a segment costs only some chunks more.

    Packed sequences may be of any length: none is walked in pieces longer than a SM's share of the work.
    """
    segment = gated_delta_rule_segment(sequences, HV, tokens, walks)
    if packed:
        segment = segment or max(1024, cdiv(cdiv(tokens * HV, one_round()), 64) * 64)
    return segment if segment < tokens else 0


def gated_delta_rule_tiles(step: str, K: int, element_size: int) -> tuple[ScanTile, ...]:
    """All tiles that `gated_delta_rule` can choose: what a test has to cover."""
    return _GATED_DELTA_RULE[step][element_size, K]


class ShortConvRun(NamedTuple):
    """BT tokens, BU a step, by BD channels a warp."""

    BT: int
    BU: int
    BD: int


def short_conv(tokens: int, channels: int) -> ShortConvRun:
    """The runs of the short convolution's forward pass."""
    BT = next_power_of_2(cdiv(tokens * cdiv(channels, 128), 2048))
    BT = min(max(BT, 4), 32)
    return ShortConvRun(BT, min(BT, 8), 128)


def short_conv_backward_tiles(tokens: int, channels: int) -> ShortConvRun:
    """The runs of the short convolution's backward pass: long ones read few tokens twice, many fill the device."""
    BT = next_power_of_2(cdiv(tokens * cdiv(channels, 128), 4096))
    return ShortConvRun(min(max(BT, 16), 128), 4, 128)


class RowTile(NamedTuple):
    """BM rows of at most BD elements a step."""

    BM: int
    BD: int
    num_warps: int


def crowded(programs: int) -> bool:
    """Tell whether eight programs a SM wait, or more."""
    return programs >= 8 * one_round()


def registers_of_many(programs: int, registers: int) -> int | None:
    """So many registers a thread where programs crowd; None leaves it to the compiler.

    With fewer registers more programs run side by side, each more slowly, which few programs have nothing of.
    """
    return registers if crowded(programs) else None


class LinearsTile(NamedTuple):
    """BN rows of a weight a program, BD columns at a time."""

    BN: int
    BD: int
    num_warps: int
    num_stages: int


def fused_fused_linears(B: int, D: int, rows: int) -> LinearsTile:
    """The tile of products of B rows of x with weights of D columns and `rows` rows in all."""
    if B == 1:
        # a last round of few programs takes as long as another, where columns are many
        few = D >= 4096 and rows < 16_384
        return LinearsTile(8, 512, 8, 1) if few else LinearsTile(4, min(1024, next_power_of_2(D)), 4, 1)
    return LinearsTile(16, min(256, max(16, next_power_of_2(D))), 4, 3)


def row_tile(size: int) -> RowTile:
    """The tile of what works on whole rows of `size` elements, such as a norm: 4,096 elements, 16 a thread."""
    BD = next_power_of_2(size)
    BM = max(1, 4096 // BD)
    return RowTile(BM, BD, min(max(BM * BD // 512, 4), 16))


def row_programs(blocks: int) -> int:
    """Programs that walk so many blocks of rows, each with a sum of its own: two a SM."""
    return min(blocks, 2 * one_round())


# recorded calls are forgotten with every change of these
watch(__name__)
