"""When keys of whole sequences leave, in one launch: each key looks for the position of its room-th better one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.launch.kernels import cached_launch

# keys of a program, and those that they are compared with at one time
_KEYS, _OTHERS = 64, 64


@cached_launch
@triton.jit
def eviction_times_kernel(scores, until, room, window, T, H, BT: tl.constexpr, BN: tl.constexpr):
    """Count better keys tile by tile until there are `room`, then find the one among the last tile's."""
    i_bh = tl.program_id(0).to(tl.int64)
    p_row = (i_bh // H) * T * H + i_bh % H
    o_t, o_n = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, BN)
    m_t = o_t < T
    tiles = tl.cdiv(T, BN)
    b_s = tl.load(scores + p_row + o_t * H, mask=m_t, other=0.0)
    # better ones in the tiles before `tile`, of those keys that have not found as many as there is room for
    looks = (m_t & (b_s > float("-inf"))).to(tl.int32)
    count, tile = tl.zeros([BT], tl.int32), tl.zeros([BT], tl.int32)
    i, looking = 0, tl.max(looks, 0)
    while (i < tiles) & (looking > 0):
        o_j = i * BN + o_n
        b_j = tl.load(scores + p_row + o_j * H, mask=o_j < T, other=float("-inf"))
        better = _better(b_j[None, :], o_j[None, :], b_s[:, None], o_t[:, None])
        more = count + tl.sum(better, 1)
        looks = tl.where(more < room, looks, 0)
        count = tl.where(looks > 0, more, count)
        tile += looks
        looking = tl.max(looks, 0)
        i += 1
    o_j = tile[:, None] * BN + o_n[None, :]
    b_j = tl.load(scores + p_row + o_j * H, mask=o_j < T, other=float("-inf"))
    better = _better(b_j, o_j, b_s[:, None], o_t[:, None])
    before = tl.sum((count[:, None] + tl.cumsum(better, 1) < room).to(tl.int32), 1)
    last = tl.where(tile < tiles, tile * BN + before, T)
    tl.store(until + p_row + o_t * H, last + window, mask=m_t)


@triton.jit
def _better(b_j, o_j, b_s, o_s):
    """1 where a key of score b_j at o_j ranks before one of b_s at o_s."""
    return ((b_j > b_s) | ((b_j == b_s) & (o_j < o_s))).to(tl.int32)


def eviction_times_triton(scores: Tensor, room: int, window: int) -> Tensor:
    """`cap.eviction_times` of rows `[B, T, H]`, float32, of T ≥ 1 tokens."""
    B, T, H = scores.shape
    scores = scores.contiguous()
    until = torch.empty_like(scores, dtype=torch.int32)
    eviction_times_kernel[(B * H, cdiv(T, _KEYS))](
        scores=scores, until=until, room=room, window=window, T=T, H=H, BT=_KEYS, BN=_OTHERS, num_warps=4
    )
    return until
