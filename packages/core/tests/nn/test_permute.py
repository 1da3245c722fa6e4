"""`moved` equals indexing, forward and backward, also with rows that are missing."""

import pytest
import torch

from tokenmix_core.nn.permute import moved


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 5)])
def test_moved_equals_indexing(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(7)
    assert torch.autograd.gradcheck(lambda x: moved(x, order, order.argsort()), x)
    torch.testing.assert_close(moved(x, order, order.argsort()), x[order])


def test_missing_rows_read_zero_and_unread_rows_have_zero_gradient():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    source, back = torch.tensor([[3, -1, 0], [-1, 4, -1]]), torch.tensor([2, -1, -1, 0, 4])
    y = moved(x, source, back, holes=True)
    assert y.shape == (2, 3, 2)
    torch.testing.assert_close(y[source < 0], torch.zeros(3, 2, dtype=x.dtype))
    torch.testing.assert_close(y[source >= 0], x[source[source >= 0]])
    assert torch.autograd.gradcheck(lambda x: moved(x, source, back, holes=True), x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[:, 0].tolist() == [1, 0, 0, 1, 1]
