"""RaggedKVState against lists in Python."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.nn.state import RaggedKVState
from tokenmix_core.ops import attention
from tokenmix_core.testing.closeness import relative_error

N, H, K, V = 2, 3, 8, 4


def tokens(C, seed):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(N, C, H, size, generator=generator, dtype=torch.float64) for size in (K, V))
    return k, v, torch.rand(N, C, H, generator=generator) < 0.4


def lists(kv):
    return [[(kv.keys[n, h, :m], kv.values[n, h, :m]) for h, m in enumerate(kv.lengths[n].tolist())] for n in range(N)]


def test_heads_keep_their_tokens_in_order():
    kv = RaggedKVState(H, K, V)
    expected = [[([], []) for _ in range(H)] for _ in range(N)]
    for seed, C in enumerate((1, 64, 1, 5, 200, 64, 1, 64)):
        k, v, take = tokens(C, seed)
        kv.append(k, v, take)
        for n in range(N):
            for h in range(H):
                expected[n][h][0].extend(k[n, take[n, :, h], h])
                expected[n][h][1].extend(v[n, take[n, :, h], h])
    for rows, heads in zip(lists(kv), expected, strict=True):
        for (keys, values), (k, v) in zip(rows, heads, strict=True):
            assert torch.equal(keys, torch.stack(k))
            assert torch.equal(values, torch.stack(v))


def test_slots_follow_the_longest_list_given_by_the_host():
    kv, looks = RaggedKVState(H, K, V), RaggedKVState(H, K, V)
    longest = 0
    for seed, C in enumerate((300, 1, 500, 64)):
        k, v, take = tokens(C, seed)
        looks.append(k, v, take)
        longest = int(looks.lengths.max())
        kv.append(k, v, take, longest=longest)
        assert torch.equal(kv.lengths, looks.lengths)
        for got, expected in zip(lists(kv), lists(looks), strict=True):
            for pair in zip(got, expected, strict=True):
                assert all(map(torch.equal, *pair))
    assert longest < kv.num_slots <= longest + 64


def test_hold_replaces_the_contents():
    kv, other = RaggedKVState(H, K, V), RaggedKVState(H, K, V)
    kv.append(*tokens(100, 0))
    other.hold(*(x.clone() for x in kv.tensors))
    more = tokens(70, 1)
    kv.append(*more)
    other.append(*more)
    for got, expected in zip(lists(kv), lists(other), strict=True):
        for pair in zip(got, expected, strict=True):
            assert all(map(torch.equal, *pair))


def test_slots_follow_the_number_of_tokens():
    kv = RaggedKVState(H, K, V)
    k, v, _ = tokens(64, 0)
    nothing, everything = (torch.full((N, 64, H), x) for x in (False, True))
    for _ in range(100):
        kv.append(k, v, nothing)
    # slots for the newest call only, after 6,400 tokens
    assert kv.num_slots <= 128
    for _ in range(20):
        kv.append(k, v, everything)
    assert kv.lengths.unique().tolist() == [1280]
    kv.compact(torch.zeros(N, H, kv.num_slots, dtype=torch.bool))
    assert kv.lengths.unique().tolist() == [0]
    assert kv.num_slots == 64


def test_held_bytes_lie_within_the_bounds():
    kv = RaggedKVState(H, K, V)
    seen = 0
    for seed, C in enumerate((3, 64, 100)):
        kv.append(*tokens(C, seed))
        seen += C
        least, most = kv.bounds(seen, N, torch.float64)
        assert least <= kv.held(seen) <= most
    kv = RaggedKVState(H, K, V, capacity=32)
    kv.append(*tokens(8, 0))
    assert kv.held(8) == kv.allocated == kv.bounds(10**6, N, torch.float64).most


@pytest.mark.parametrize("C", [1, 3])
def test_tokens_beyond_the_capacity_raise_and_change_nothing(C):
    kv = RaggedKVState(H, K, V, capacity=4)
    k, v, _ = tokens(4, 0)
    kv.append(k, v, torch.ones(N, 4, H, dtype=torch.bool))
    before = [x.clone() for x in kv.tensors]
    k, v, _ = tokens(C, 1)
    kv.append(k, v, torch.zeros(N, C, H, dtype=torch.bool))
    take = torch.zeros(N, C, H, dtype=torch.bool)
    take[0, -1, 0] = True
    with pytest.raises(ValueError, match="keep at most 4 tokens"):
        kv.append(k, v, take)
    assert all(torch.equal(x, y) for x, y in zip(kv.tensors, before, strict=True))


def test_compacting_keeps_the_order():
    kv = RaggedKVState(H, K, V)
    kv.append(*tokens(100, 0))
    before = lists(kv)
    keep = torch.rand(N, H, kv.num_slots, generator=torch.Generator().manual_seed(1)) < 0.5
    kv.compact(keep)
    for n, rows in enumerate(lists(kv)):
        for h, (keys, values) in enumerate(rows):
            old_keys, old_values = before[n][h]
            assert torch.equal(keys, old_keys[keep[n, h, : len(old_keys)]])
            assert torch.equal(values, old_values[keep[n, h, : len(old_values)]])


def test_replace_overwrites_the_slot_in_selected_heads():
    kv = RaggedKVState(H, K, V, capacity=16)
    k, v, _ = tokens(16, 0)
    kv.append(k, v, torch.ones(N, 16, H, dtype=torch.bool))
    slot, where = torch.tensor([[0, 3, 15], [7, 7, 7]]), torch.tensor([[True, False, True], [False, True, False]])
    new_k, new_v = torch.ones(N, H, K, dtype=torch.float64), torch.full((N, H, V), 2.0, dtype=torch.float64)
    kv.replace(slot, new_k, new_v, where)
    for n in range(N):
        for h in range(H):
            expected = k[n, :, h].clone()
            if where[n, h]:
                expected[slot[n, h]] = 1.0
            assert torch.equal(kv.keys[n, h], expected)
            assert bool((kv.values[n, h, slot[n, h]] == 2.0).all()) == bool(where[n, h])


def test_a_query_attends_to_its_own_head_only():
    kv = RaggedKVState(H, K, V)
    kv.append(*tokens(90, 0))
    q = torch.randn(N, 2 * H, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    o, lse = kv.attend(q)
    for n, rows in enumerate(lists(kv)):
        for h, (keys, values) in enumerate(rows):
            group = slice(2 * h, 2 * h + 2)
            alone = attention(q[None, n : n + 1, group], keys[None, :, None], values[None, :, None])
            assert relative_error(o[n, :, group], alone.o[0]) < 1e-6
            assert relative_error(lse[n, :, group], alone.lse[0]) < 1e-6


def test_split_rows_continue_separately_and_join():
    kv, whole = RaggedKVState(H, K, V), RaggedKVState(H, K, V)
    for state in (kv, whole):
        state.append(*tokens(50, 0))
    # more tokens for row 1 only, which then has more slots
    k, v, take = tokens(300, 1)
    take[0] = False
    parts = [(rows, kv.rows(rows)) for rows in (torch.tensor([1]), torch.tensor([0]))]
    parts[0][1].append(k[1:], v[1:], take[1:])
    assert parts[0][1].num_slots > parts[1][1].num_slots
    kv.join(parts)
    whole.append(k, v, take)
    assert torch.equal(kv.lengths, whole.lengths)
    for got, expected in zip(lists(kv), lists(whole), strict=True):
        for pair in zip(got, expected, strict=True):
            assert all(map(torch.equal, *pair))


def test_reordering_rows_reorders_their_lists():
    kv = RaggedKVState(H, K, V)
    kv.append(*tokens(50, 0))
    before = lists(kv)
    kv.map_(lambda x: x.index_select(0, torch.tensor([1, 1])))
    for rows in lists(kv):
        for (keys, _), (old, _) in zip(rows, before[1], strict=True):
            assert torch.equal(keys, old)
