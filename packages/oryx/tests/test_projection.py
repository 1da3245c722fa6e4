"""Test that the grouped projection uses the weights of each token's mode, forward and backward."""

import pytest
import torch

from tokenmix_oryx.projection import can_group, project_by_mode, token_order


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_rows_and_tokens_are_inverse_with_linear_tokens_first(share):
    attends = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) < share
    tokens, rows, ends = token_order(attends)
    assert torch.equal(tokens[rows], torch.arange(150))
    sorted_modes = attends.flatten()[tokens]
    linear = int((~attends).sum())
    assert ends.tolist() == [linear, 150]
    assert not sorted_modes[:linear].any()
    assert sorted_modes[linear:].all()
    # tokens of one mode stay in their order
    assert (tokens[:linear].diff() > 0).all()
    assert (tokens[linear:].diff() > 0).all()


def test_each_token_has_the_weights_of_its_mode():
    torch.manual_seed(0)
    x, linear, attention, upstream = (torch.randn(*s) for s in ((2, 30, 16), (24, 16), (24, 16), (2, 30, 24)))
    attends = torch.rand(2, 30) < 0.4
    leaves = [t.requires_grad_() for t in (x, linear, attention)]
    exact = torch.where(attends[..., None], x @ attention.T, x @ linear.T)
    got = project_by_mode(x, linear, attention, token_order(attends))
    torch.testing.assert_close(got, exact)
    for g, e in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (got, exact)), strict=True):
        torch.testing.assert_close(g, e)


def test_autocast_decides_the_dtype():
    x, weight = torch.randn(1, 8, 16), torch.randn(16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            project_by_mode(x, weight, weight, token_order(torch.zeros(1, 8, dtype=torch.bool))).dtype == torch.bfloat16
        )


def test_only_plain_layers_on_a_gpu_are_grouped():
    layer = torch.nn.Linear(16, 16)
    assert not can_group(torch.zeros(1, 2, 16, dtype=torch.bfloat16), layer, layer)
