"""Test PagedKVState and RaggedKVState against lists in Python."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.nn.state import PagedKVState, Pages, RaggedKVState
from tokenmix_core.ops import attention

N, H, K, V, PAGE = 2, 3, 8, 4, 16


def tokens(runs, seed, share=0.4):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(N, runs * PAGE, H, size, generator=generator, dtype=torch.float64) for size in (K, V))
    return k, v, torch.rand(N, runs, H, generator=generator) < share


def paged() -> PagedKVState:
    return PagedKVState(H, K, V, page=PAGE)


def lists(kv):
    """Return the keys and values of each row and head, read through the table."""
    found = []
    for n, row in enumerate(kv.lengths.tolist()):
        pages = [kv.table[n, h, : m // PAGE].long() for h, m in enumerate(row)]
        assert len(torch.cat(pages).unique()) == sum(map(len, pages))
        found.append([(kv.keys[n, at].flatten(0, 1), kv.values[n, at].flatten(0, 1)) for at in pages])
    return found


def assert_equal_lists(got, expected):
    for heads, others in zip(got, expected, strict=True):
        for pair, other in zip(heads, others, strict=True):
            assert all(map(torch.equal, pair, other))


def taken(calls):
    """Return the keys and values that each head takes of several calls."""
    found = []
    for n in range(N):
        found.append([])
        for h in range(H):
            of = [(k[n, :, h], v[n, :, h], take[n, :, h].repeat_interleave(PAGE)) for k, v, take in calls]
            found[n].append(tuple(torch.cat([x[i][x[2]] for x in of]) for i in (0, 1)))
    return found


def assert_tight(kv):
    """Allocated are at most 1.1 of the bytes in use of the row that uses most, and a page of each head."""
    page = PAGE * (K + V) * kv.keys.element_size()
    used = int(kv.lengths.sum(1).max()) // PAGE * page
    tables = kv.table.nbytes + kv.lengths.nbytes
    # one page per row is for tokens that no head retains
    assert kv.allocated <= N * (1.1 * used + (H + 1) * page) + tables


@pytest.mark.parametrize("ask", [False, True])
def test_heads_keep_their_runs_in_order(ask):
    kv, calls = paged(), []
    for seed, runs in enumerate((1, 4, 1, 1, 60, 3, 1, 1, 1)):
        calls.append(tokens(runs, seed))
        # the host knows an upper bound
        pages = sum(take.sum(1) for *_, take in calls)
        known = Pages(int(pages.sum(1).max()), int(pages.max())) if ask else None
        kv.append(*calls[-1], known=known)
        if ask or seed > 3:
            assert_tight(kv)
    assert_equal_lists(lists(kv), taken(calls))
    keys, values = kv.lists()
    for n, heads in enumerate(lists(kv)):
        for h, (k, v) in enumerate(heads):
            assert torch.equal(keys[n, h, : len(k)], k)
            assert torch.equal(values[n, h, : len(v)], v)


def test_a_step_in_slots_of_pools_equals_one_on_a_state():
    kv = paged()
    kv.append(*tokens(3, 0))
    kv.fix(8 * PAGE, 5 * PAGE)
    slots = torch.tensor([4, 1], dtype=torch.int32)
    pools = [x.new_full((6, *x.shape[1:]), 1 << 20) for x in kv.tensors]
    for pool, x in zip(pools, kv.tensors, strict=True):
        pool[slots.long()] = x
    held, given = paged(), iter(pools)
    held.allocate(1, kv.keys)
    held.map_(lambda _: next(given))
    held.slots, held.fixed = slots, True
    others = [pool[[0, 2, 3, 5]].clone() for pool in pools]
    q = torch.randn(N, H, K, dtype=torch.float64)
    for seed in (1, 2):
        call = tokens(1, seed)
        kv.append(*call)
        held.append(*call)
        assert all(map(torch.equal, held.attend(q), kv.attend(q)))
        assert torch.equal(held.lengths[slots.long()], kv.lengths)
    for pool, before in zip(pools, others, strict=True):
        assert torch.equal(pool[[0, 2, 3, 5]], before)


def test_memory_follows_the_runs_that_heads_take():
    kv = paged()
    k, v, _ = tokens(1, 0)
    for _ in range(100):
        kv.append(k, v, torch.zeros(N, 1, H, dtype=torch.bool))
    assert kv.keys.shape[1] <= 2 * H + 1
    for _ in range(20):
        kv.append(k, v, torch.ones(N, 1, H, dtype=torch.bool))
        assert_tight(kv)
    assert kv.lengths.unique().tolist() == [20 * PAGE]


def test_one_head_that_keeps_everything_takes_its_own_memory_only():
    """131,072 tokens, one of six heads entirely softmax: in one call, and by steps from half of them on."""
    heads, page, runs = 6, 64, 2048
    take = torch.rand(1, runs, heads, generator=torch.Generator().manual_seed(0)) < 0.05
    take[..., 0] = True
    x = torch.randn(1, 1, heads, 1).expand(1, runs * page, heads, 1)
    pages = Pages(int(take.sum()), runs)
    for prompt, fixed in ((runs, False), (runs // 2, False), (runs // 2, True)):
        kv = PagedKVState(heads, 1, 1, page=page)
        half = take[:, :prompt]
        kv.append(x[:, : prompt * page], x[:, : prompt * page], half, known=Pages(int(half.sum()), prompt))
        free = 0
        for i in range(prompt, runs):
            if fixed and not free:
                kv.loosen()
                kv.fix(runs * page, 512)
            free = kv.free_tokens((runs - i) * page) - page if not free else free - page
            kv.append(x[:, :page], x[:, :page], take[:, i : i + 1])
        live = kv.held(0)
        assert live >= pages.row * page * 2 * 4
        rectangle = runs * page * heads * 2 * 4
        assert kv.allocated <= 1.1 * live + (heads + 1) * page * 2 * 4 + kv.table.nbytes < rectangle / 3
        assert int(kv.lengths.sum()) == pages.row * page


def test_fixed_tensors_keep_their_addresses():
    kv, other, calls = paged(), paged(), [tokens(5, 0)]
    kv.append(*calls[0])
    storage = kv.fix(40 * PAGE, 4 * PAGE)
    for seed in range(1, 5):
        assert kv.free_tokens(10 * PAGE) >= PAGE
        calls.append(tokens(1, seed, share=1.0))
        kv.append(*calls[-1])
    assert all(x is y for x, y in zip(kv.tensors, storage, strict=True))
    assert_equal_lists(lists(kv), taken(calls))
    # another state moves to the same storage, in which old pages hold other values
    for x in storage[:2]:
        x.fill_(torch.nan)
    other.append(*calls[0])
    assert all(x is y for x, y in zip(other.fix(40 * PAGE, PAGE, storage), storage, strict=True))
    other.append(*calls[1])
    assert_equal_lists(lists(other), taken(calls[:2]))
    other.loosen()
    for call in calls[2:]:
        other.append(*call)
    assert_equal_lists(lists(other), taken(calls))
    large = paged()
    large.append(*tokens(60, 9, share=1.0))
    with pytest.raises(ValueError, match=r"the storage has \d+ pages of a row, \d+ are needed"):
        large.fix(80 * PAGE, PAGE, storage)


@pytest.mark.parametrize("more", [0, 1])
def test_fixing_frees_pages_that_no_head_took(more):
    kv, call = paged(), tokens(30, 0, share=0.1)
    kv.append(*call)
    kv.fix(31 * PAGE, more * PAGE)
    assert kv.keys.shape[1] == kv.values.shape[1] == int(kv.lengths.sum(1).max()) // PAGE + more * H + 1 < 30
    assert_equal_lists(lists(kv), taken([call]))


def test_held_bytes_lie_within_the_bounds():
    kv, seen = paged(), 0
    for seed, runs in enumerate((1, 4, 7)):
        kv.append(*tokens(runs, seed))
        seen += runs * PAGE
        least, most = kv.bounds(seen, N, torch.float64)
        assert least <= kv.held(seen) <= most
    slots = RaggedKVState(H, K, V, 32)
    slots.allocate(N, torch.zeros(1, dtype=torch.float64))
    assert slots.held(8) == slots.allocated == slots.bounds(10**6, N, torch.float64).most


@torch.no_grad()
def test_a_query_attends_to_its_own_head_only():
    kv = paged()
    kv.append(*tokens(6, 0))
    kv.lengths[0, 1] = 0
    expected = lists(kv)
    q = torch.randn(N, 2 * H, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    slots = RaggedKVState(H, K, V, 6 * PAGE)
    slots.hold(*kv.lists(), kv.lengths)
    for o, lse in (kv.attend(q), slots.attend(q)):
        for n, heads in enumerate(expected):
            for h, (keys, values) in enumerate(heads):
                group = slice(2 * h, 2 * h + 2)
                alone = attention(q[None, n : n + 1, group], keys[None, :, None], values[None, :, None])
                assert torch.allclose(o[n, :, group], alone.o[0], rtol=1e-12)
                assert torch.allclose(lse[n, :, group], alone.lse[0], rtol=1e-12)


def test_rows_continue_separately_and_join():
    kv, whole = paged(), paged()
    for state in (kv, whole):
        state.append(*tokens(5, 0))
    k, v, take = tokens(30, 1)
    take[0] = False
    # more tokens for row 1 only, which then has more pages
    parts = []
    for row in (1, 0):
        parts.append(paged())
        parts[-1].gather_rows([(kv, [row])])
        parts[-1].append(k[row : row + 1], v[row : row + 1], take[row : row + 1])
    kv.gather_rows([(parts[1], [0]), (parts[0], [0])])
    whole.append(k, v, take)
    assert_equal_lists(lists(kv), lists(whole))
    more = tokens(3, 2)
    for state in (kv, whole):
        state.append(*more)
    assert_equal_lists(lists(kv), lists(whole))


def test_reordering_rows_reorders_their_lists():
    kv = paged()
    kv.append(*tokens(5, 0))
    before = lists(kv)
    kv.map_(lambda x: x.index_select(0, torch.tensor([1, 1])))
    assert_equal_lists(lists(kv), [before[1], before[1]])
    # each copy takes its own pages
    k, v, take = tokens(4, 1)
    kv.append(k, v, take)
    for n, heads in enumerate(taken([(k, v, take)])):
        for h, (keys, _) in enumerate(heads):
            assert torch.equal(lists(kv)[n][h][0], torch.cat((before[1][h][0], keys)))


def test_restored_lengths_drop_later_pages():
    kv, calls = paged(), [tokens(5, seed) for seed in range(3)]
    first = kv.snapshot()
    kv.append(*calls[0])
    second = kv.snapshot()
    assert second.allocated == kv.lengths.nbytes
    kv.append(*calls[1])
    kv.restore(second)
    kv.append(*calls[2])
    assert_equal_lists(lists(kv), taken([calls[0], calls[2]]))
    kv.restore(second)
    assert_equal_lists(lists(kv), taken(calls[:1]))
    kv.restore(first)
    assert not kv.tensors
