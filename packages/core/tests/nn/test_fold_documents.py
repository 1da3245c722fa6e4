"""Short packed documents, folded into one sequence, give the same results as separate documents."""

import pytest
import torch

from tokenmix_core.nn.fold_documents import as_one_sequence
from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.mamba2 import Mamba2
from tokenmix_core.ops import chunk_gated_delta_rule, chunk_ssd
from tokenmix_core.testing.closeness import relative_error

# empty documents are at the front, in between and at the end
LENGTHS = [0, 3, 1, 17, 0, 40, 2, 9, 0]


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(dtype, K=64):
    generator = torch.Generator().manual_seed(0)
    q, k, v, gates = (torch.randn(1, sum(LENGTHS), 1, n, generator=generator) for n in (K, K, K, 2))
    # decay is slow, so that leakage between documents would be visible
    g, beta = -0.05 * gates[..., 0].abs(), gates[..., 1].sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v)] + [
        x.to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in (g, beta)
    ]


def delta_rule(q, k, v, g, beta, **options):
    return chunk_gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, **options).o


def ssd(q, k, v, g, beta, **options):
    return chunk_ssd(q, k / k.shape[-1], v, g, dt=beta, **options).o


def results(form, dtype, folded, impl):
    """Return the outputs and all gradients."""
    x = inputs(dtype)
    g, cu_seqlens = as_one_sequence(x[3], boundaries(), torch.bfloat16) if folded else (x[3], boundaries())
    assert (len(cu_seqlens) == 2) == folded
    o = form(*x[:3], g, x[4], cu_seqlens=cu_seqlens, impl=impl)
    upstream = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return o, *torch.autograd.grad(o, x, upstream)


@pytest.mark.parametrize("form", [delta_rule, ssd])
def test_folding_is_exact_in_float64(form):
    for got, exact in zip(
        *(results(form, torch.float64, folded, "reference") for folded in (True, False)), strict=True
    ):
        assert relative_error(got, exact) < 1e-10


@pytest.mark.parametrize("form", [delta_rule, ssd])
def test_kernel_errors_with_and_without_folding_are_equal(form):
    exact = results(form, torch.float64, False, "reference")
    apart, together = (results(form, torch.float16, folded, "triton") for folded in (False, True))
    for wanted, by_boundaries, got in zip(exact, apart, together, strict=True):
        assert relative_error(got.double(), wanted) < 2 * relative_error(by_boundaries.double(), wanted) + 1e-4


@pytest.mark.parametrize(
    "make",
    [
        lambda: GatedDeltaNet(32, num_heads=1, num_v_heads=2, head_dim=16),
        lambda: Mamba2(32, head_dim=16, state_size=16),
    ],
    ids=["gated delta net", "mamba2"],
)
@torch.no_grad()
def test_layers_separate_short_documents(make):
    torch.manual_seed(0)
    layer = make().to(torch.bfloat16).eval()
    x = torch.randn(1, sum(LENGTHS), 32, dtype=torch.bfloat16)
    together = layer(x, cu_seqlens=boundaries())[0]
    apart = torch.cat([layer(part)[0] for part in x.split(LENGTHS, 1) if part.shape[1]], 1)
    assert relative_error(together.float(), apart.float()) < 2e-2


def test_long_documents_and_float32_keep_boundaries():
    g = torch.zeros(1, 72, 2)
    for cu_seqlens, dtype in (
        (boundaries([72]), torch.bfloat16),
        (boundaries(), torch.float32),
        (None, torch.bfloat16),
    ):
        same, as_they_are = as_one_sequence(g, cu_seqlens, dtype)
        assert same is g
        assert as_they_are is cu_seqlens
