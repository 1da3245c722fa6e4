"""Test that torch's ways of differentiating and tracing operations give right results, or an error."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tokenmix_core.nn.loss import linear_cross_entropy
from tokenmix_core.ops import attention, kept_attention, short_conv


def convolution(x, device):
    return short_conv(x, x[0, :4].T, activation="silu", impl="triton").o


def plain_attention(x, device):
    q = x.unflatten(-1, (2, -1))
    return attention(q, q, q, impl="triton" if device == "cuda" else "sdpa").o


def sparse_attention(x, device):
    q = x.unflatten(-1, (2, -1))
    return kept_attention(q, q, q, q[..., :1, 0] > 0, window=2, impl="triton").o


def loss(x, device):
    return linear_cross_entropy(x.flatten(0, 1), x[0], torch.arange(x.shape[1], device=device))


OPS = [convolution, plain_attention, sparse_attention, loss]


@pytest.fixture
def x(device):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 6, 32, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("op", OPS)
def test_a_penalty_on_gradients_is_refused(op, x, device):
    # the gradient of a sum is a constant: what follows from it must not pass for one
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(op(x, device).sum(), x, create_graph=True)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_forward_mode_derivatives_are_refused(op, recorded, x, device):
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        tangent = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=r"forward.mode AD|forward AD"):
            op(tangent, device)


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_each_example_are_those_of_single_calls(op, x, device):
    examples = torch.stack([x.detach(), 2 * x.detach()])
    found = torch.vmap(torch.func.grad(lambda x: op(x, device).square().sum()))(examples)
    for example, got in zip(examples, found, strict=True):
        example.requires_grad_()
        torch.testing.assert_close(got, torch.autograd.grad(op(example, device).square().sum(), example)[0])


@pytest.mark.parametrize("op", OPS)
def test_activations_may_be_recomputed(op, x, device):
    y = op(x, device)
    (wanted,) = torch.autograd.grad(y.sum(), x)
    (got,) = torch.autograd.grad(checkpoint(op, x, device, use_reentrant=False).sum(), x)
    torch.testing.assert_close(got, wanted)


def test_what_recomputing_spares_may_be_chosen_by_operation(x, device):
    seen = []

    def policy(context, op, *args, **options):
        if "short_conv" in str(op):
            seen.append(str(op))
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(lambda x: convolution(x * 1, device), x, use_reentrant=False, context_fn=contexts)
    (got,) = torch.autograd.grad(y.sum(), x)
    assert seen
    torch.testing.assert_close(got, torch.autograd.grad(convolution(x, device).sum(), x)[0])


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("op", OPS[:3])
def test_a_traced_call_computes_anew(op, mode, x, device):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = x.detach()
    with torch.no_grad():
        traced = make_fx(lambda x: op(x, device), tracing_mode=mode)(x)
        torch.testing.assert_close(traced(x.flip(1)), op(x.flip(1), device))


def test_a_convolution_is_traced_with_sizes_that_are_not_known(device):
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(x, weight, state):
        return short_conv(x, weight, initial_state=state, impl="triton").o

    x, weight, state = (torch.randn(shape, device=device) for shape in ((2, 6, 16), (16, 3), (2, 16, 2)))
    traced = make_fx(run, tracing_mode="symbolic")(x, weight, state)
    longer = torch.randn(2, 9, 16, device=device)
    torch.testing.assert_close(traced(longer, weight, state), run(longer, weight, state))
