"""Eviction times of whole sequences in one launch; a key is evicted when its cap-th better key leaves the window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.kernels import cached_launch

# number of keys per program, and number of keys in a tile with which they are compared
_BT, _BN = 64, 64


@cached_launch
@triton.jit
def eviction_times_kernel(scores, times, cap, window, T, H, BT: tl.constexpr, BN: tl.constexpr):
    """Count each key's better keys tile by tile until there are `cap`; find the cap-th of them in the last tile.

    scores of a head:  | tile 0 | tile 1 | … | tile `tile` | …       `count` better keys before tile `tile`,
                                              ↑ cap-th better key     fewer than `cap`
    """
    i_bh = (tl.program_id(0) // tl.cdiv(T, BT)).to(tl.int64)
    p_row = (i_bh // H) * T * H + i_bh % H
    o_t, o_n = (tl.program_id(0) % tl.cdiv(T, BT)) * BT + tl.arange(0, BT), tl.arange(0, BN)
    m_t = o_t < T
    tiles = tl.cdiv(T, BN)
    b_s = tl.load(scores + p_row + o_t * H, mask=m_t, other=0.0)
    # `count`: number of better keys in the tiles before `tile`; `active`: keys with fewer than `cap` better keys so far
    active = (m_t & (b_s > float("-inf"))).to(tl.int32)
    count, tile = tl.zeros([BT], tl.int32), tl.zeros([BT], tl.int32)
    i, any_active = 0, tl.max(active, 0)
    while (i < tiles) & (any_active > 0):
        o_j = i * BN + o_n
        b_j = tl.load(scores + p_row + o_j * H, mask=o_j < T, other=float("-inf"))
        better = _better(b_j[None, :], o_j[None, :], b_s[:, None], o_t[:, None])
        more = count + tl.sum(better, 1)
        active = tl.where(more < cap, active, 0)
        count = tl.where(active > 0, more, count)
        tile += active
        any_active = tl.max(active, 0)
        i += 1
    o_j = tile[:, None] * BN + o_n[None, :]
    b_j = tl.load(scores + p_row + o_j * H, mask=o_j < T, other=float("-inf"))
    better = _better(b_j, o_j, b_s[:, None], o_t[:, None])
    before = tl.sum((count[:, None] + tl.cumsum(better, 1) < cap).to(tl.int32), 1)
    last = tl.where(tile < tiles, tile * BN + before, T)
    tl.store(times + p_row + o_t * H, last + window, mask=m_t)


@triton.jit
def _better(b_j, o_j, b_s, o_s):
    """Return 1 if a key with score b_j at position o_j is better than a key with score b_s at position o_s, else 0."""
    return ((b_j > b_s) | ((b_j == b_s) & (o_j < o_s))).to(tl.int32)


def eviction_times_triton(scores: Tensor, cap: int, window: int) -> Tensor:
    """Compute `eviction_times` for float32 scores `[B, T, H]` of rows that are not packed, T ≥ 1."""
    B, T, H = scores.shape
    scores = scores.contiguous()
    times = torch.empty_like(scores, dtype=torch.int32)
    eviction_times_kernel[(B * H * cdiv(T, _BT),)](
        scores=scores, times=times, cap=cap, window=window, T=T, H=H, BT=_BT, BN=_BN, num_warps=4
    )
    return times
