"""The causal cap: far keys are at any time the best `room` of those that have left the window so far.

A key is better than another if its score is higher, or equal and it is older. It leaves when the room-th better key
enters the far segment, which a key does when it leaves the window. What leaves never comes back, so the first query
that no longer sees a key is one number: a decoder that evicts one key at a time and a forward pass over the whole
sequence see the same.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.ops.common import Impl, resolve_impl

# pairs of keys, of all rows and heads, up to which they are compared: some 2 ms of an H200 by their instructions, which
# is what the matrix's launches take
_PAIRS = 1 << 33
# keys that are ranked at one time: their indices take some ten tensors of 8 bytes each
_AT_ONCE = 1 << 22


def eviction_times(
    scores: Float[Tensor, "B T H"],
    room: int,
    window: int,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    impl: Impl | None = None,
) -> Int[Tensor, "B T H"]:
    """The first query that no longer sees a key as a far one, int32; a query after all for keys that stay.

    The position of the room-th better key plus the window. That key is the room-th smallest position among those that
    rank before j, an order statistic of a prefix, which a wavelet matrix finds for all keys at once in ⌈log₂ T⌉ steps:
    nothing goes token by token and no pairs of tokens are formed. On a GPU these steps are some 270 launches for 16,384
    tokens: up to 2³³ pairs, 32,768 tokens of 8 heads, one kernel stands in for them, whose keys count better ones.

    Args:
        scores: −∞ for keys that are not kept, whose result means nothing; +∞ for those that must stay.
        room: far keys that a head holds, at least 1.
        window: keys of the window; position p enters the far segment when query p + window comes.
        cu_seqlens: borders of packed sequences; positions are counted from each one's start.
        impl: "triton", "reference" (any device), or None: the kernel for CUDA tensors. Packed rows, more pairs
            and float64 are the reference's in any case.
    """
    # its steps depend on the length: in a graph that torch.compile makes they are one
    find = _one_step if torch.compiler.is_compiling() else _eviction_times
    return find(scores, room, window, cu_seqlens, resolve_impl("eviction_times", impl, scores))


def _eviction_times(scores: Tensor, room: int, window: int, cu_seqlens: Tensor | None, impl: str | None) -> Tensor:
    B, T, H = scores.shape
    if impl != "reference" and cu_seqlens is None and 0 < B * H * T * T <= _PAIRS and scores.dtype == torch.float32:
        from tokenmix_lte.ops.eviction.times import eviction_times_triton

        return eviction_times_triton(scores, room, window)
    flat = scores.transpose(1, 2).reshape(B * H, T)
    starts = torch.zeros(T, dtype=torch.int64, device=scores.device)
    ids = None
    if cu_seqlens is not None:
        ids = sequence_ids(cu_seqlens, T)
        starts = cu_seqlens.long()[ids]
    rows = max(1, _AT_ONCE // max(1, T))
    times = [_times(part, room, window, starts, ids) for part in flat.split(rows)]
    return torch.cat(times).view(B, H, T).transpose(1, 2).contiguous()


_one_step = torch.library.custom_op("tokenmix_lte::eviction_times", _eviction_times, mutates_args=())


@_one_step.register_fake
def _(scores, room, window, cu_seqlens, impl):
    return scores.new_empty(scores.shape, dtype=torch.int32)


def _times(
    scores: Float[Tensor, "R T"], room: int, window: int, starts: Int[Tensor, "T"], ids: Int[Tensor, "T"] | None
) -> Int[Tensor, "R T"]:
    T = scores.shape[1]
    # by falling score, equal ones by age; sequences stay where they are
    order = scores.argsort(dim=1, descending=True, stable=True)
    if ids is not None:
        order = order.gather(1, ids[order].argsort(dim=1, stable=True))
    ranks = torch.arange(T, device=scores.device)
    full = ranks - starts >= room
    last = _smallest(order, starts.expand_as(order), ranks.expand_as(order), room - 1)
    times = torch.where(full, last - starts, T) + window
    return torch.empty_like(times).scatter_(1, order, times).to(torch.int32)


def _smallest(
    values: Int[Tensor, "R T"], first: Int[Tensor, "R T"], stop: Int[Tensor, "R T"], k: int
) -> Int[Tensor, "R T"]:
    """The k-th smallest (from 0) of values[first:stop] of a row, for each pair of borders, by a wavelet matrix.

    Bit by bit from the highest, values are parted stably into those without the bit and those with it, and borders
    follow the part where the k-th smallest lies. Where fewer than k + 1 values lie between borders any number comes.
    """
    T = values.shape[1]
    places = torch.arange(T, device=values.device)
    rest, found = torch.full_like(values, k), torch.zeros_like(values)
    for bit in reversed(range(max(1, (T - 1).bit_length()))):
        zero = (values >> bit) & 1 == 0
        # zeros before each place
        before = F.pad(zero.cumsum(1), (1, 0))
        zeros = before[:, -1:]
        low, high = before.gather(1, first), before.gather(1, stop)
        among_zeros = rest < high - low
        found = torch.where(among_zeros, found, found | 1 << bit)
        rest = torch.where(among_zeros, rest, rest - (high - low))
        first = torch.where(among_zeros, low, zeros + first - low)
        stop = torch.where(among_zeros, high, zeros + stop - high)
        to = torch.where(zero, before[:, :-1], zeros + places - before[:, :-1])
        values = torch.empty_like(values).scatter_(1, to, values)
    return found


def eviction_times_by_heap(
    scores: Float[Tensor, "B T H"], room: int, window: int, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None
) -> Int[Tensor, "B T H"]:
    """`eviction_times` as a decoder goes: key after key enters a heap of `room`, and the worst leaves. On the host."""
    B, T, H = scores.shape
    times = torch.full((B, T, H), T + window, dtype=torch.int32)
    borders = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    values = scores.tolist()
    for b in range(B):
        for h in range(H):
            for start, stop in pairwise(borders):
                held: list[tuple[float, int]] = []
                for j in range(start, stop):
                    if values[b][j][h] == -torch.inf:
                        continue
                    # the worst first: the lowest score, and of equal ones the youngest
                    heapq.heappush(held, (values[b][j][h], -j))
                    if len(held) > room:
                        _, worst = heapq.heappop(held)
                        times[b, -worst, h] = j - start + window
    return times
