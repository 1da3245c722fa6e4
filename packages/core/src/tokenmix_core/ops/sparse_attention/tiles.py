"""Tiles of keys, and the tiles that a query tile visits. The keys of a tile are called its columns.

A tile has contiguous local keys, or listed keys: retained keys, gathered by a list of their positions.
"""

import triton
import triton.language as tl

from tokenmix_core.ops.softmax_attention.listed_keys.lists import first_unit, listed_columns
from tokenmix_core.ops.sparse_attention.mask import left_of


@triton.jit
def tile_of_queries(tiles, HQ, H):
    """Return a program's batch row, query head and key head (int64), and query tile.

    The last query tiles, which see the most keys, start first, in all heads at once, because one head's list may be
    much longer than the others'.
    """
    pid = tl.program_id(0)
    i_h = (pid % HQ).to(tl.int64)
    i_t = tiles - 1 - pid // HQ % tiles
    i_b = (pid // HQ // tiles).to(tl.int64)
    return i_b, i_h, i_h // (HQ // H), i_t


@triton.jit
def local_tiles(first, last, window, keys, BN: tl.constexpr, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Find the local KV tiles of queries at positions `first` … `last`.

    Returns:
        `(n_min, full_min, full_max, n_max)`: masked tiles [n_min, full_min), unmasked tiles [full_min, full_max), and
        masked tiles [full_max, n_max).
    """
    n_max = tl.cdiv(tl.maximum(last + 1, 0), BN)
    n_min = tl.minimum(left_of(first, window, UNIT, WINDOW) // BN, n_max)
    full_min = tl.minimum(tl.cdiv(left_of(last, window, UNIT, WINDOW), BN), n_max)
    full_max = tl.minimum(tl.maximum(tl.maximum(first + 1, 0) // BN, full_min), n_max)
    return n_min, full_min, full_max, n_max


@triton.jit
def find_listed(ranks, lists, row, first, last, window, sizes, UNIT: tl.constexpr, WINDOW: tl.constexpr):
    """Find the listed keys that precede the local keys of queries at positions `first` … `last`.

    `row` is the batch row, the head of `keep`, the sequence and its first token; `sizes` are U and HM.

    Returns:
        `(p_list, begin, whole, count)`: the sequence's list, the index of its first unit, the number of listed keys
        that precede the local keys of every query, and the number that precede the local keys of at least one query.
    """
    i_b, i_m, i_n, start = row
    U, HM = sizes
    begin = first_unit(start, i_n, UNIT)
    p_rank = ranks + (i_b * HM + i_m) * (U + 1) + begin
    rank = tl.load(p_rank)
    whole = (tl.load(p_rank + left_of(first, window, UNIT, WINDOW) // UNIT) - rank) * UNIT
    count = (tl.load(p_rank + tl.cdiv(left_of(last, window, UNIT, WINDOW), UNIT)) - rank) * UNIT
    return lists + (i_b * HM + i_m) * U + rank, begin.to(tl.int32), whole, count


@triton.jit
def columns(p_list, begin, i, listed, count, first, BN: tl.constexpr, UNIT: tl.constexpr):
    """Return the positions of a tile's keys: the list's i-th tile if `listed`, else BN keys that start at `first`."""
    o_k = listed_columns(p_list, begin, i * BN, tl.where(listed, count, 0), BN, UNIT)
    return tl.where(listed, o_k, first + tl.arange(0, BN))
