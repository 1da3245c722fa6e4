"""Eviction times agree with a decoder's heap and with the definition, in rows and packed."""

from __future__ import annotations

import heapq
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tokenmix_core.testing.launch_spies import grids
from tokenmix_lte import eviction
from tokenmix_lte.eviction import eviction_times
from tokenmix_lte.ops.eviction.times import eviction_times_triton


def scores(B: int, T: int, H: int, *, share: float, ties: bool, seed: int = 0) -> Tensor:
    """Draw scores of which a share is retained, with equal ones if `ties`; the first two keys are never evicted."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(B, T, H, generator=rng)
    x = (x * 5).ceil() if ties else x
    x = x.masked_fill(torch.rand(B, T, H, generator=rng) > share, -torch.inf)
    x[:, :2] = torch.inf
    return x


def eviction_times_by_heap(scores: Tensor, cap: int, window: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Compute `eviction_times` on the CPU like a decoder: push each key on a heap of `cap` keys and pop the worst."""
    B, T, H = scores.shape
    times = torch.full((B, T, H), T + window, dtype=torch.int32)
    boundaries = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    values = scores.tolist()
    for b in range(B):
        for h in range(H):
            for start, stop in pairwise(boundaries):
                retained: list[tuple[float, int]] = []
                for j in range(start, stop):
                    if values[b][j][h] == -torch.inf:
                        continue
                    # the worst is popped first: the lowest score, and among equal scores the youngest key
                    heapq.heappush(retained, (values[b][j][h], -j))
                    if len(retained) > cap:
                        _, worst = heapq.heappop(retained)
                        times[b, -worst, h] = j - start + window
    return times


def by_counting(x: Tensor, capacity: int, window: int) -> Tensor:
    """Compute the definition: the window plus the position of the capacity-th better key."""
    B, T, H = x.shape
    times = torch.full((B, T, H), T + window, dtype=torch.int32)
    for b in range(B):
        for h in range(H):
            s = x[b, :, h]
            for j in range(T):
                older = torch.arange(T) < j
                better = (s > s[j]) | ((s == s[j]) & older)
                at = better.nonzero().squeeze(1)
                if len(at) >= capacity:
                    times[b, j, h] = at[capacity - 1] + window
    return times


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.02])
@pytest.mark.parametrize(("T", "capacity"), [(1, 1), (2, 2), (33, 3), (64, 5), (65, 64), (40, 100)])
def test_a_key_is_evicted_when_the_cap_th_better_key_leaves_the_window(T, capacity, share, ties):
    x = scores(2, T, 3, share=share, ties=ties)
    kept = x > -torch.inf
    expected = by_counting(x, capacity, 7)
    # other keys are evicted before they leave the window themselves
    retained = expected > torch.arange(T).view(1, T, 1) + 7
    heap = eviction_times_by_heap(x, capacity, 7)
    got = eviction_times(x, capacity, 7)
    assert got.dtype == heap.dtype == torch.int32
    assert torch.equal(got[kept], expected[kept])
    assert torch.equal(heap[kept & retained], expected[kept & retained])
    # the heap evicts such a key when it leaves the window, the definition maybe earlier: no query sees the difference
    never = kept & ~retained
    assert (heap[never] == (torch.arange(T).view(1, T, 1) + 7).expand_as(heap)[never]).all()


def test_the_grid_of_eight_million_tokens_can_be_launched():
    with grids() as launches:
        eviction_times_triton(torch.empty(2, 2**23, 1), 512, 768)
    assert launches == [("eviction_times_kernel", (2**18,))]


@pytest.mark.gpu
def test_eviction_times_beyond_four_million_tokens():
    # only the first keys are retained, so that few are compared
    x = torch.full((1, 2**22 + 64, 1), -torch.inf, device="cuda")
    x[:, :3] = torch.tensor([1.0, 3.0, 2.0], device="cuda").view(1, 3, 1)
    got = eviction_times_triton(x, 1, 7)
    assert got[0, :3, 0].tolist() == [8, 2**22 + 64 + 7, 8]


def test_each_query_sees_at_most_capacity_retained_keys():
    x, capacity, window = scores(1, 300, 2, share=0.7, ties=True), 9, 4
    times = eviction_times(x, capacity, window)
    for i in range(window, 300):
        j = torch.arange(300).view(1, 300, 1)
        seen = (x > -torch.inf) & (j + window <= i) & (i < times)
        come = ((x > -torch.inf) & (j + window <= i)).sum(1)
        assert torch.equal(seen.sum(1), come.clamp(max=capacity))
        assert seen[:, :2].all() or i < window + 2


def test_packed_sequences_evict_independently():
    x = scores(1, 90, 2, share=0.8, ties=True)
    boundaries = torch.tensor([0, 1, 1, 40, 90])
    x[:, [0, 1, 40, 41]] = torch.inf
    packed = eviction_times(x, 4, 6, boundaries)
    for start, stop in ((0, 1), (1, 40), (40, 90)):
        alone = eviction_times(x[:, start:stop], 4, 6)
        kept, T = x[:, start:stop] > -torch.inf, stop - start
        got, stays = packed[:, start:stop], alone == T + 6
        assert torch.equal(got[kept & ~stays], alone[kept & ~stays])
        assert (got[kept & stays] == 90 + 6).all()


def test_rows_ranked_in_parts_have_the_same_times(monkeypatch):
    x = scores(3, 50, 2, share=0.6, ties=True)
    whole = eviction_times(x, 4, 6)
    monkeypatch.setattr(eviction, "_MAX_RANKED_KEYS", 100)
    assert torch.equal(eviction_times(x, 4, 6), whole)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.02])
@pytest.mark.parametrize(("T", "capacity"), [(1, 1), (65, 3), (150, 70)])
def test_the_kernel_agrees_with_the_wavelet_matrix(T, capacity, share, ties, device):
    x = scores(2, T, 3, share=share, ties=ties).to(device)
    kept = x > -torch.inf
    got, expected = (eviction_times(x, capacity, 7, impl=impl) for impl in ("triton", "reference"))
    assert got.dtype == torch.int32
    assert torch.equal(got[kept], expected[kept])


@pytest.mark.gpu
def test_the_kernel_agrees_with_the_wavelet_matrix_for_thousands_of_keys():
    x = scores(2, 20_000, 3, share=0.5, ties=True).cuda()
    kept = x > -torch.inf
    assert torch.equal(eviction_times(x, 512, 768)[kept], eviction_times(x, 512, 768, impl="reference")[kept])


def test_torch_checks_the_custom_op():
    x = scores(1, 9, 2, share=0.6, ties=True)
    for cu_seqlens in (None, torch.tensor([0, 4, 9])):
        given = x, 2, 3, cu_seqlens, "reference"
        torch.library.opcheck(eviction._custom_op, given, test_utils=("test_schema", "test_faketensor"))


def test_the_matrix_agrees_with_the_heap_for_thousands_of_keys():
    x = scores(1, 20_000, 1, share=0.5, ties=False)
    kept = x > -torch.inf
    heap, got = eviction_times_by_heap(x, 512, 768), eviction_times(x, 512, 768)
    retained = heap > torch.arange(20_000).view(1, -1, 1) + 768
    assert (kept & ~retained).sum() > 0
    assert torch.equal(got[kept & retained], heap[kept & retained])
