"""Means of blocks, and attention to complete blocks: the definition, later queries, and packed sequences."""

from __future__ import annotations

import itertools

import pytest
import torch

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops import attention
from tokenmix_lte.ops.pooled_blocks import compressed_attention, pool_blocks

BLOCK = 4


def inputs(B=2, T=23, HQ=4, H=2, K=6) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, h, K, generator=rng, dtype=torch.float64).requires_grad_() for h in (HQ, H, H)]


def literal(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to the means of complete blocks, query by query; return o and lse."""
    (T, HQ, K), H = q.shape[1:], k.shape[2]
    o, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
    for b, i, a in itertools.product(range(len(q)), range(T), range(HQ)):
        h, blocks = a * H // HQ, range((i + 1) // BLOCK)
        if blocks:
            keys, values = (torch.stack([x[b, c * BLOCK : (c + 1) * BLOCK, h].mean(0) for c in blocks]) for x in (k, v))
            s = keys @ q[b, i, a] * K**-0.5
            o[b, i, a], lse[b, i, a] = s.softmax(0) @ values, s.logsumexp(0)
    return o, lse


def gradients(o, lse, tensors):
    rng = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in (o, lse)]
    return torch.autograd.grad((o * weights[0]).sum() + (lse.clamp(min=-99) * weights[1]).sum(), tensors)


@pytest.mark.parametrize("T", [1, 3, 4, 23, 24])
def test_queries_attend_to_the_means_of_complete_blocks(T):
    tensors = inputs(T=T)
    q, k, v = tensors
    wanted = literal(q, k, v)
    got = compressed_attention(q, pool_blocks(k, BLOCK), pool_blocks(v, BLOCK), BLOCK)
    torch.testing.assert_close(tuple(got), wanted)
    if T >= BLOCK:
        torch.testing.assert_close(gradients(*got, tensors), gradients(*wanted, tensors))


@pytest.mark.parametrize("shift", [0, 2])
def test_kernels_agree_with_the_reference_for_queries_at_any_offset(shift, device):
    exact, (q, k, v) = inputs(T=15), (x.detach().float().to(device).requires_grad_() for x in inputs(T=15))
    found = {}
    for impl, (a, b, c) in {"reference": exact, "triton": (q, k, v)}.items():
        pooled = pool_blocks(b, BLOCK), pool_blocks(c, BLOCK)
        out = compressed_attention(a[:, shift:], *pooled, BLOCK, shift=shift, impl=impl)
        # the layer needs gradients of o alone, not of lse
        found[impl] = [*out, *torch.autograd.grad(out.o.square().sum(), (a, b, c))]
    for got, want in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(got.cpu(), want.float(), rtol=1e-4, atol=1e-5)


def test_the_last_queries_alone_give_the_same_outputs():
    q, k, v = inputs()
    pooled = pool_blocks(k, BLOCK), pool_blocks(v, BLOCK)
    whole = compressed_attention(q, *pooled, BLOCK)
    for start, stop in [(0, 2), (0, 3), (2, 9), (3, 4), (7, 8), (8, 20), (22, 23)]:
        got = compressed_attention(q[:, start:stop], *(x[:, : -(-stop // BLOCK)] for x in pooled), BLOCK, shift=start)
        torch.testing.assert_close(tuple(got), tuple(x[:, start:stop] for x in whole))


@pytest.mark.parametrize(
    "lengths", [(3, 0, 13, 1, 13), (2, 3, 1), (4,), (0, 8, 0), (1,) * 30, (5, 4, 3, 2, 12, 4, 7)], ids=str
)
def test_packed_sequences_do_not_share_blocks(lengths):
    tensors = inputs(B=1, T=sum(lengths))
    q, k, v = tensors
    boundaries = cu_seqlens_from_lengths(torch.tensor(lengths))
    got = compressed_attention(
        q, pool_blocks(k, BLOCK, boundaries), pool_blocks(v, BLOCK, boundaries), BLOCK, cu_seqlens=boundaries
    )
    parts = [literal(*(x[:, i:j] for x in tensors)) for i, j in itertools.pairwise(boundaries.tolist()) if j > i]
    wanted = [torch.cat(x, 1) for x in zip(*parts, strict=True)]
    torch.testing.assert_close(list(got), wanted)
    if wanted[1].isfinite().any():
        torch.testing.assert_close(gradients(*got, tensors), gradients(*wanted, tensors))


def test_short_packed_sequences_need_no_padding_to_blocks(monkeypatch):
    seen = []

    def attends(q, k, v, **options):
        seen.append((q.shape[1] * q.shape[2], k.shape[1], len(options["cu_seqlens"])))
        return attention(q, k, v, **options)

    monkeypatch.setattr("tokenmix_lte.ops.pooled_blocks.attention", attends)
    q, k, v = inputs(B=1, T=90)
    for lengths in ((3,) * 29 + (2, 1), (50, 40)):
        boundaries = cu_seqlens_from_lengths(torch.tensor(lengths))
        means = (pool_blocks(x, BLOCK, boundaries) for x in (k, v))
        compressed_attention(q, *means, BLOCK, cu_seqlens=boundaries)
    # queries, keys and boundaries of each call of attention: no more queries than tokens, no more sequences than keys
    rows = 90 // BLOCK
    assert seen == [(rows * BLOCK * q.shape[2], rows, n) for n in (rows + 1, 4)]


def test_an_incomplete_last_block_averages_its_own_tokens():
    x = torch.arange(10.0).view(1, 10, 1, 1)
    assert pool_blocks(x, BLOCK).flatten().tolist() == [1.5, 5.5, 8.5]
    assert pool_blocks(x, BLOCK, torch.tensor([0, 5, 10])).flatten().tolist() == [1.5, 4, 6.5, 9]
