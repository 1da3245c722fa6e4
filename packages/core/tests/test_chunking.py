import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmix_core import chunking

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=8)


def borders(lengths: list[int]) -> torch.Tensor:
    return chunking.cu_seqlens_from_lengths(torch.tensor(lengths))


@settings(deadline=None)
@given(LENGTHS)
def test_ids_and_positions_follow_the_borders(lengths):
    cu_seqlens, tokens = borders(lengths), sum(lengths)
    assert chunking.sequence_ids(cu_seqlens, tokens).tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert chunking.packed_positions(cu_seqlens, tokens).tolist() == [t for n in lengths for t in range(n)]


def test_small_integer_arithmetic():
    assert [chunking.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [chunking.next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
