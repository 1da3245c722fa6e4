import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmix_core import chunking

LENGTHS = st.lists(st.integers(0, 200), min_size=1, max_size=8)


def borders(lengths: list[int]) -> torch.Tensor:
    return chunking.cu_seqlens_from_lengths(torch.tensor(lengths))


@settings(deadline=None)
@given(LENGTHS, st.sampled_from([1, 16, 64]))
def test_every_token_lies_in_exactly_one_chunk_of_its_own_sequence(lengths, chunk_size):
    cu_seqlens = borders(lengths)
    tokens = sum(lengths)
    layout = chunking.chunk_layout(tokens, chunk_size, cu_seqlens)
    owners = torch.full((tokens,), -1)
    for i_c in range(layout.chunks):
        i_n = int(layout.chunk_to_seq[i_c])
        if i_n == len(lengths):
            continue
        start = int(cu_seqlens[i_n]) + (i_c - int(layout.chunk_offsets[i_n])) * chunk_size
        end = min(start + chunk_size, int(cu_seqlens[i_n + 1]))
        assert start < end
        assert (owners[start:end] == -1).all()
        owners[start:end] = i_n
    assert owners.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]


def test_an_unpacked_row_needs_no_tables():
    assert chunking.chunk_layout(65, 64) == (None, None, 2)


@settings(deadline=None)
@given(LENGTHS)
def test_ids_and_positions_follow_the_borders(lengths):
    cu_seqlens, tokens = borders(lengths), sum(lengths)
    assert chunking.sequence_ids(cu_seqlens, tokens).tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
    assert chunking.packed_positions(cu_seqlens, tokens).tolist() == [t for n in lengths for t in range(n)]


def test_unpack_undoes_pack_and_zeroes_the_padding():
    x = torch.randn(3, 7, 2)
    mask = torch.rand(3, 7) < 0.6
    packed, cu_seqlens = chunking.pack(x, mask)
    assert packed.shape == (1, int(mask.sum()), 2)
    assert cu_seqlens.diff().tolist() == mask.sum(1).tolist()
    assert torch.equal(chunking.unpack(packed, mask), x * mask[..., None])


def test_small_integer_arithmetic():
    assert [chunking.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [chunking.next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
