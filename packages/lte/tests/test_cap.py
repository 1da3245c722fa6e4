"""When far keys leave: as a decoder evicts them, as the definition counts better ones, in rows and packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenmix_lte import cap
from tokenmix_lte.cap import eviction_times, eviction_times_by_heap


def scores(B: int, T: int, H: int, *, share: float, ties: bool, seed: int = 0) -> Tensor:
    """Scores of which a share is kept, some of equal height, the first two never to leave."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(B, T, H, generator=rng)
    x = (x * 5).ceil() if ties else x
    x = x.masked_fill(torch.rand(B, T, H, generator=rng) > share, -torch.inf)
    x[:, :2] = torch.inf
    return x


def by_counting(x: Tensor, room: int, window: int) -> Tensor:
    """The definition: the window plus the position of the room-th key that is better."""
    B, T, H = x.shape
    times = torch.full((B, T, H), T + window, dtype=torch.int32)
    for b in range(B):
        for h in range(H):
            s = x[b, :, h]
            for j in range(T):
                older = torch.arange(T) < j
                better = (s > s[j]) | ((s == s[j]) & older)
                at = better.nonzero().squeeze(1)
                if len(at) >= room:
                    times[b, j, h] = at[room - 1] + window
    return times


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.02])
@pytest.mark.parametrize(("T", "room"), [(1, 1), (2, 2), (33, 3), (64, 5), (65, 64), (40, 100)])
def test_keys_leave_when_as_many_better_ones_have_come(T, room, share, ties):
    x = scores(2, T, 3, share=share, ties=ties)
    kept = x > -torch.inf
    expected = by_counting(x, room, 7)
    # a key that is never far has left before it would be: at the latest when it leaves the window itself
    far = expected > torch.arange(T).view(1, T, 1) + 7
    heap = eviction_times_by_heap(x, room, 7)
    got = eviction_times(x, room, 7)
    assert got.dtype == heap.dtype == torch.int32
    assert torch.equal(got[kept], expected[kept])
    assert torch.equal(heap[kept & far], expected[kept & far])
    # the heap turns a key away when it comes, the count may say earlier: neither is ever seen
    never = kept & ~far
    assert (heap[never] == (torch.arange(T).view(1, T, 1) + 7).expand_as(heap)[never]).all()


def test_no_more_keys_than_there_is_room_for_are_seen_at_any_time():
    x, room, window = scores(1, 300, 2, share=0.7, ties=True), 9, 4
    times = eviction_times(x, room, window)
    for i in range(window, 300):
        j = torch.arange(300).view(1, 300, 1)
        seen = (x > -torch.inf) & (j + window <= i) & (i < times)
        come = ((x > -torch.inf) & (j + window <= i)).sum(1)
        assert torch.equal(seen.sum(1), come.clamp(max=room))
        assert seen[:, :2].all() or i < window + 2


def test_packed_sequences_evict_for_themselves():
    x = scores(1, 90, 2, share=0.8, ties=True)
    borders = torch.tensor([0, 1, 1, 40, 90])
    x[:, [0, 1, 40, 41]] = torch.inf
    packed = eviction_times(x, 4, 6, borders)
    for start, stop in ((0, 1), (1, 40), (40, 90)):
        alone = eviction_times(x[:, start:stop], 4, 6)
        kept, T = x[:, start:stop] > -torch.inf, stop - start
        got, stays = packed[:, start:stop], alone == T + 6
        assert torch.equal(got[kept & ~stays], alone[kept & ~stays])
        assert (got[kept & stays] == 90 + 6).all()


def test_rows_are_ranked_in_pieces_as_they_are_together(monkeypatch):
    x = scores(3, 50, 2, share=0.6, ties=True)
    whole = eviction_times(x, 4, 6)
    monkeypatch.setattr(cap, "_AT_ONCE", 100)
    assert torch.equal(eviction_times(x, 4, 6), whole)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.02])
@pytest.mark.parametrize(("T", "room"), [(1, 1), (65, 3), (150, 70)])
def test_the_kernel_finds_the_times_that_the_matrix_finds(T, room, share, ties, device):
    x = scores(2, T, 3, share=share, ties=ties).to(device)
    kept = x > -torch.inf
    got, expected = (eviction_times(x, room, 7, impl=impl) for impl in ("triton", "reference"))
    assert got.dtype == torch.int32
    assert torch.equal(got[kept], expected[kept])


@pytest.mark.gpu
def test_thousands_of_keys_leave_by_the_kernel_as_by_the_matrix():
    x = scores(2, 20_000, 3, share=0.5, ties=True).cuda()
    kept = x > -torch.inf
    assert torch.equal(eviction_times(x, 512, 768)[kept], eviction_times(x, 512, 768, impl="reference")[kept])


def test_torch_checks_the_one_step_of_graphs():
    x = scores(1, 9, 2, share=0.6, ties=True)
    for borders in (None, torch.tensor([0, 4, 9])):
        given = x, 2, 3, borders, "reference"
        torch.library.opcheck(cap._one_step, given, test_utils=("test_schema", "test_faketensor"))


def test_many_keys_leave_as_from_the_heap():
    x = scores(1, 20_000, 1, share=0.5, ties=False)
    kept = x > -torch.inf
    heap, got = eviction_times_by_heap(x, 512, 768), eviction_times(x, 512, 768)
    far = heap > torch.arange(20_000).view(1, -1, 1) + 768
    assert (kept & ~far).sum() > 0
    assert torch.equal(got[kept & far], heap[kept & far])
