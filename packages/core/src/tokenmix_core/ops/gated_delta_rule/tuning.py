"""Tile sizes of the gated delta rule's kernels, and the lengths of the segments that sequences are split into."""

from __future__ import annotations

from typing import NamedTuple

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels.tuning import ALL_REGISTERS, one_wave
from tokenmix_core.ops.decode_tiles import MANY_PROGRAMS, StateStep


class ScanTile(NamedTuple):
    """Tile of BV columns of V, with launch options; a program computes one tile, or loops over all tiles of V.

    BK: rows of K per step of kernels that loop over K. `maxnreg` limits the registers per thread.
    """

    BV: int
    num_warps: int
    num_stages: int
    BK: int = 256
    maxnreg: int | None = None


# maps element size in bytes and K to the tiles of the kernels that scan a sequence, from wide to narrow
_SEQUENCE: dict[tuple[int, int], tuple[ScanTile, ...]] = {
    (2, 64): (ScanTile(64, 4, 2), ScanTile(32, 4, 3)),
    (2, 128): (ScanTile(64, 4, 2), ScanTile(32, 4, 3)),
    (2, 256): (ScanTile(32, 8, 2), ScanTile(16, 8, 2)),
    # float32: MMAs split operands into several tf32 terms, so tiles are small; 8 warps with K = 256 are excluded,
    # because the compiled kernels read past their tile
    (4, 64): (ScanTile(32, 4, 1),),
    (4, 128): (ScanTile(32, 4, 1),),
    (4, 256): (ScanTile(32, 4, 1, maxnreg=ALL_REGISTERS),),
}
# tiles of the scanning kernels whose state is transposed: 64 columns of V are the rows of one warpgroup's WGMMA
_TRANSPOSED = _SEQUENCE | {
    (2, 64): (ScanTile(64, 4, 3),),
    (2, 128): (ScanTile(64, 4, 3),),
    (2, 256): (ScanTile(64, 4, 2),),
}
_TILES: dict[str, dict[tuple[int, int], tuple[ScanTile, ...]]] = {
    # the kernel `prepare` has tiles of K: here BV is a number of columns of K
    "prepare": {(size, K): (ScanTile(128 // size, 1, size // 2),) for size in (2, 4) for K in (64, 128, 256)},
    "forward": _TRANSPOSED | {(2, 128): (ScanTile(64, 4, 2),), (2, 256): (ScanTile(128, 8, 2),)},
    "states": _TRANSPOSED,
    "segment": _TRANSPOSED,
    "entering": {(size, K): (ScanTile(16, 4, 2, 32),) for size in (2, 4) for K in (64, 128, 256)},
    "backward_state": _SEQUENCE,
    "backward_chunk": {
        (2, 64): (ScanTile(32, 4, 2),),
        (2, 128): (ScanTile(64, 8, 2),),
        (2, 256): (ScanTile(64, 8, 2, 128),),
        (4, 64): (ScanTile(32, 8, 1, 64),),
        (4, 128): (ScanTile(32, 8, 1, 64),),
        (4, 256): (ScanTile(32, 8, 1, 64),),
    },
    "recurrent": {(size, K): (ScanTile(4096 // K, 1, 1),) for size in (2, 4) for K in (64, 128, 256)},
    # decoding: a single token per sequence
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


def scan_tile(step: str, K: int, V: int, element_size: int, heads: int) -> ScanTile:
    """Return the widest tile of a step that gives at least 128 programs, about one per SM; else the narrowest.

    `heads` counts the value heads of all sequences. A decoding step ("step") uses wide tiles only with many waves of
    programs, because its programs are short.
    """
    tiles, least = _TILES[step][element_size, K], MANY_PROGRAMS if step == "step" else 128
    return next((tile for tile in tiles if heads * (V // tile.BV) >= least), tiles[-1])


def all_tiles(step: str, K: int, element_size: int) -> tuple[ScanTile, ...]:
    """Return every tile that `scan_tile` can choose, for tests that must cover them all."""
    return _TILES[step][element_size, K]


# tiles of the Gluon decoding kernel by minimum number of blocks (`gluon_step_tile`); wide tiles need many waves
STATE_STEPS: dict[int, StateStep] = {1024: StateStep(64, 64, 4), 0: StateStep(32, 32, 2)}

# with heads of 128, Gluon's forward pass saves the residuals R and the chunk states if both together take at most this
# many bytes; otherwise the backward pass recomputes them
MOST_SAVED_BYTES = 8 << 20


def segment_tokens(sequences: int, HV: int, tokens: int, programs: int = 1) -> int:
    """Return the length of the segments to split sequences into, a multiple of 64 from 1,024 tokens on; 0 for no split.

    If several `programs` share a value head, segments get longer so that all programs fit in one wave, provided that
    a sequence still has two segments.
    """
    length = cdiv(tokens, sequences)
    segments = one_wave() // (sequences * HV)
    segments = segments // programs if segments >= 2 * programs else segments
    segment = max(1024, cdiv(cdiv(length, segments), 64) * 64) if segments > 1 else length
    return segment if segment < length else 0


def backward_segment_tokens(sequences: int, HV: int, tokens: int, packed: bool, programs: int = 1) -> int:
    """Return the length of the reverse scan's segments on Hopper, where a split costs only a few chunks of extra work.

    Packed sequences may differ in length, so a segment is at most as long as one SM's share of the work.
    """
    segment = segment_tokens(sequences, HV, tokens, programs)
    if packed:
        segment = segment or max(1024, cdiv(cdiv(tokens * HV, one_wave()), 64) * 64)
    return segment if segment < tokens else 0


def forward_columns(programs: int, V: int) -> int:
    """Return state columns per program of the Hopper forward: V / 2 if all programs then fit in one wave, else V."""
    return V // 2 if 2 * programs <= one_wave() else V
