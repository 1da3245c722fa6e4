from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmix_core import chunking

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=8)


def boundaries(lengths: list[int]) -> torch.Tensor:
    return chunking.cu_seqlens_from_lengths(torch.tensor(lengths))


@settings(deadline=None)
@given(LENGTHS)
def test_ids_and_positions_follow_the_boundaries(lengths):
    cu_seqlens, tokens = boundaries(lengths), sum(lengths)
    assert chunking.sequence_ids(cu_seqlens, tokens).tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert chunking.packed_positions(cu_seqlens, tokens).tolist() == [t for n in lengths for t in range(n)]


def test_small_integer_arithmetic():
    assert [chunking.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [chunking.next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_the_inverse_says_who_stands_where():
    places = torch.tensor([4, -1, 0, -1, 2], dtype=torch.int32)
    assert chunking.inverse(places, 6).tolist() == [2, -1, 4, -1, 0, -1]
    order = torch.randperm(50)
    assert torch.equal(chunking.inverse(order, 50), order.argsort())


@settings(deadline=None)
@given(LENGTHS)
def test_chunks_of_packed_tokens_hold_each_token_once_in_order(lengths):
    cu_seqlens, tokens = boundaries(lengths), sum(lengths)
    places, back = chunking.chunk_places(cu_seqlens, tokens, 16)
    assert len(places) == chunking.chunk_slots(1, tokens, 16, cu_seqlens)
    wanted = [list(range(i, min(i + 16, end))) for start, end in pairwise(cu_seqlens.tolist())
              for i in range(start, end, 16)]  # fmt: skip
    assert [[t for t in row if t >= 0] for row in places.tolist() if max(row) >= 0] == wanted
    assert places.flatten()[back].tolist() == list(range(tokens))
