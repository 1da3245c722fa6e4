"""When keys are evicted: at any time, a head retains the best `cap` of the keys that have left the window.

A key is better than another if its score is higher or, for equal scores, if it is older. A key is evicted when the
cap-th better key leaves the window. An evicted key never returns, so one number per key describes all evictions: the
first query that no longer sees it. With these eviction times, a forward pass over a whole sequence retains the same
keys as a decoder that evicts one key at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.ops import Impl, resolve_impl, without_padding

# maximum number of pairs of keys, over all rows and heads, that the kernel compares: it then takes about 2 ms on an
# H200, the time of the wavelet matrix's launches
_MAX_PAIRS = 1 << 33
# maximum number of keys ranked at once: ranking needs about ten tensors with 8 bytes per key
_MAX_RANKED_KEYS = 1 << 22


def eviction_times(
    scores: Float[Tensor, "B T H"],
    cap: int,
    window: int,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    *,
    impl: Impl | None = None,
) -> Int[Tensor, "B T H"]:
    """Return for each key, in int32, the first query after the window that does not see it; T + window if it stays.

    A key's eviction time is the window plus the position of its cap-th better key, that is the cap-th smallest position
    among the keys that are better. A wavelet matrix finds this order statistic of a prefix for all keys at once in
    ⌈log₂ T⌉ steps, without a loop over tokens and without comparing pairs. On a GPU these steps are about 270 launches
    for 16,384 tokens; up to 2³³ pairs (32,768 tokens of 8 heads), a single kernel that compares pairs is used instead.

    Args:
        scores: −∞ for keys that are not retained (their results have no meaning); +∞ for keys that must stay.
        cap: number of keys before the window that a head retains, at least 1.
        window: number of tokens in the window; the key at position p leaves it when query p + window comes.
        cu_seqlens: boundaries of packed sequences; positions count from each sequence's start.
        impl: "triton", "reference" (any device), or None: the kernel for CUDA tensors. Packed rows, more than 2³³
            pairs, and scores of other dtypes than float32 always use the reference.
    """
    # under torch.compile the whole function is one operator, because the number of steps depends on T
    find = _custom_op if torch.compiler.is_compiling() else _eviction_times
    return find(scores, cap, window, cu_seqlens, resolve_impl("eviction_times", impl, scores))


def _eviction_times(scores: Tensor, cap: int, window: int, cu_seqlens: Tensor | None, impl: str | None) -> Tensor:
    B, T, H = scores.shape
    if impl != "reference" and cu_seqlens is None and 0 < B * H * T * T <= _MAX_PAIRS and scores.dtype == torch.float32:
        from tokenmix_lte.ops.eviction.times import eviction_times_triton

        return eviction_times_triton(scores, cap, window)
    flat = scores.transpose(1, 2).reshape(B * H, T)
    starts = torch.zeros(T, dtype=torch.int64, device=scores.device)
    ids = None
    if cu_seqlens is not None:
        ids = sequence_ids(cu_seqlens, T)
        starts = cu_seqlens.long()[ids]
    rows = max(1, _MAX_RANKED_KEYS // max(1, T))
    times = [_times(part, cap, window, starts, ids) for part in flat.split(rows)]
    return without_padding(torch.cat(times).view(B, H, T).transpose(1, 2).contiguous(), cu_seqlens)


_custom_op = torch.library.custom_op("tokenmix_lte::eviction_times", _eviction_times, mutates_args=())


@_custom_op.register_fake
def _(scores, cap, window, cu_seqlens, impl):
    return scores.new_empty(scores.shape, dtype=torch.int32)


def _times(
    scores: Float[Tensor, "R T"], cap: int, window: int, starts: Int[Tensor, "T"], ids: Int[Tensor, "T"] | None
) -> Int[Tensor, "R T"]:
    """Return eviction times, by a wavelet matrix; `starts` and `ids` are start and index of each token's sequence."""
    T = scores.shape[1]
    # sort each sequence's keys by descending score; of equal scores, the older key comes first
    order = scores.argsort(dim=1, descending=True, stable=True)
    if ids is not None:
        order = order.gather(1, ids[order].argsort(dim=1, stable=True))
    ranks = torch.arange(T, device=scores.device)
    evicted = ranks - starts >= cap
    last = _smallest(order, starts.expand_as(order), ranks.expand_as(order), cap - 1)
    times = torch.where(evicted, last - starts, T) + window
    return torch.empty_like(times).scatter_(1, order, times).to(torch.int32)


def _smallest(
    values: Int[Tensor, "R T"], first: Int[Tensor, "R T"], stop: Int[Tensor, "R T"], k: int
) -> Int[Tensor, "R T"]:
    """Return the k-th smallest (from 0) of values[first:stop] in a row, for each pair of offsets `first` and `stop`.

    The wavelet matrix takes bits from the highest to the lowest. For each bit, a stable partition moves values without
    the bit before values with it, and both offsets move to the half with the k-th smallest value. If there are fewer
    than k + 1 values between the offsets, the result has no meaning.
    """
    T = values.shape[1]
    indices = torch.arange(T, device=values.device)
    rest, found = torch.full_like(values, k), torch.zeros_like(values)
    for bit in reversed(range(max(1, (T - 1).bit_length()))):
        zero = (values >> bit) & 1 == 0
        # for each index, the number of values before it without the bit
        before = F.pad(zero.cumsum(1), (1, 0))
        zeros = before[:, -1:]
        low, high = before.gather(1, first), before.gather(1, stop)
        among_zeros = rest < high - low
        found = torch.where(among_zeros, found, found | 1 << bit)
        rest = torch.where(among_zeros, rest, rest - (high - low))
        first = torch.where(among_zeros, low, zeros + first - low)
        stop = torch.where(among_zeros, high, zeros + stop - high)
        to = torch.where(zero, before[:, :-1], zeros + indices - before[:, :-1])
        values = torch.empty_like(values).scatter_(1, to, values)
    return found
