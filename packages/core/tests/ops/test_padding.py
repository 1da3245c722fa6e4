"""Test that helpers of packed batches leave out the tokens after the last boundary; operations have `PaddingTests`."""

import pytest
import torch

from tokenmix_core.chunking import chunk_places, packed_lengths
from tokenmix_core.integrations import reversed_tokens
from tokenmix_core.ops.padding import drops_padding, without_padding, zero_padding
from tokenmix_core.parallel import shift_tokens

T = 9
BOUNDARIES = torch.tensor([0, 3, 3, 5])


def rising():
    return torch.arange(1.0, T + 1).view(1, T, 1)


def test_padding_is_in_no_chunk():
    tokens, at = chunk_places(BOUNDARIES, T, 2)
    assert sorted(tokens[tokens >= 0].tolist()) == [0, 1, 2, 3, 4]
    assert (at[5:] == -1).all()
    assert packed_lengths(BOUNDARIES, T).tolist() == [3, 3, 3, 2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("last", [0, 5, T])
def test_nan_of_the_padding_reaches_neither_values_nor_gradients(last):
    x = rising()
    x[:, last:] = torch.nan
    for form in (without_padding, drops_padding("x")(lambda x, cu_seqlens: x.square())):
        leaf = x.clone().requires_grad_()
        y = form(leaf, torch.tensor([0, last]))
        (dx,) = torch.autograd.grad(y, leaf, torch.full_like(y, torch.nan).index_fill(1, torch.arange(last), 1.0))
        assert not y[:, last:].any()
        assert not dx[:, last:].any()
        assert y.isfinite().all()
        assert dx.isfinite().all()


def test_shifted_and_reversed_tokens():
    assert shift_tokens(rising(), cu_seqlens=BOUNDARIES).flatten().tolist() == [0, 1, 2, 0, 4, 0, 0, 0, 0]
    (back,), boundaries, _ = reversed_tokens((rising(),), BOUNDARIES, None)
    assert back.flatten()[:5].tolist() == [5, 4, 3, 2, 1]
    assert boundaries.tolist() == [0, 2, 2, 5]
    (again,), *_ = reversed_tokens((back,), boundaries, None)
    assert torch.equal(again, rising())


@pytest.mark.parametrize("last", [0, 1, 37, 1000, 1500])
@pytest.mark.parametrize("before", [0, 3])
def test_exactly_the_padding_is_zeroed(last, before):
    T, dtypes = 1500 + 2 * before, (torch.bfloat16, torch.float32)
    by_token = [torch.ones(1, T, *shape, dtype=dtype) for shape in [(), (3,), (5, 7)] for dtype in dtypes]
    tokens_last = [torch.ones(1, 600, T, dtype=dtype).transpose(1, 2) for dtype in dtypes]
    zero_padding(torch.tensor([0, 0, last], dtype=torch.int32), *by_token, None, *tokens_last, before=before)
    for x in by_token + tokens_last:
        assert (x[:, : last + 2 * before] == 1).all()
        assert not x[:, last + 2 * before :].any()
