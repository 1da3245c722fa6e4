"""Attention to listed blocks on a CUDA device: all tile sizes, determinism, compilation, large offsets."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.kernels.launch.cache.replay import invalidate
from tokenmix_core.ops import attention
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_lte.ops import block_attention, select_blocks
from tokenmix_lte.ops.selected_blocks import plan

pytestmark = pytest.mark.gpu

NAMES = ("o", "lse", "dq", "dk", "dv")
HALF = torch.bfloat16


def inputs(B=2, T=333, HQ=16, H=1, S=4, K=64, V=64, size=64, dtype=HALF, cu=None):
    rng = torch.Generator("cuda").manual_seed(0)
    shapes = (B, T, HQ, K), (B, T, H, K), (B, T, H, V)
    tensors = [torch.randn(s, generator=rng, device="cuda").to(dtype).requires_grad_() for s in shapes]
    blocks = torch.randint(-1, T // size + 2, (B, T, H, S), generator=rng, device="cuda")
    boundaries = None if cu is None else torch.tensor(cu, device="cuda")
    return tensors, {"blocks": blocks, "block_size": size, "cu_seqlens": boundaries}


def run(tensors, options):
    out = block_attention(*tensors, **options)
    rng = torch.Generator("cuda").manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=rng, device="cuda").to(x) for x in out)
    lse = out.lse.masked_fill(out.lse == -torch.inf, 0)
    return [out.o, lse, *torch.autograd.grad((out.o, lse), tensors, (do, dlse))]


SIZES = [
    *(dict(K=K, V=V) for K, V in ((64, 64), (128, 128), (64, 128), (40, 24))),
    *(dict(K=K, V=V, dtype=torch.float32) for K, V in ((64, 64), (128, 128), (40, 24))),
    *(dict(HQ=HQ, H=H) for HQ, H in ((2, 2), (6, 2), (32, 2), (48, 1))),
    *(dict(size=size) for size in (16, 32, 128)),
    dict(B=1, T=700, cu=[0, 1, 1, 130, 639, 700]),
    dict(dtype=torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_tile_errs_no_more_than_the_eager_reference(sizes):
    tensors, options = inputs(**sizes)
    got = run(tensors, options | {"impl": "triton"})
    exact = run([x.detach().double().requires_grad_() for x in tensors], options | {"impl": "reference"})
    eager = run(tensors, options | {"impl": "reference"})
    for name, *values in zip(NAMES, got, exact, eager, strict=True):
        assert_within(name, *values)


def test_results_are_bit_identical_in_every_run_and_agree_for_split_queries(monkeypatch):
    tensors, options = inputs(T=2000, S=8, H=2, HQ=32)
    first = run(tensors, options)
    for again in (run(tensors, options), run(tensors, options)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(plan, "_MAX_WORKSPACE", 1 << 24)
    assert len(list(plan.query_runs(tensors[0], 64, 8))) > 3
    invalidate()
    for a, b in zip(first, run(tensors, options), strict=True):
        assert relative_error(a, b) < 1e-2


SELECTIONS = [
    # up to 80 and 688 blocks of 16 keys, and 16 blocks of 64 keys
    dict(shift=380),
    dict(T=1000, U=688, shift=10_000),
    dict(B=8, T=1024, U=16, size=64),
    dict(T=1000, U=688, shift=10_000, count=100),
    dict(T=1000, U=688, shift=10_000, count=3),
    # one query, as in decoding
    dict(B=32, T=1, U=4096, shift=65_535),
    *(dict(HQ=HQ, H=H, shift=380) for HQ, H in ((2, 2), (6, 2), (48, 1), (64, 1))),
    *(dict(K=K, shift=380) for K in (40, 128)),
    *(dict(dtype=dtype, K=K, shift=380) for dtype in (torch.float32, torch.float16) for K in (64, 128)),
    dict(B=1, T=5000, U=317, cu=[0, 1, 1, 130, 4639, 5000]),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SELECTIONS, ids=str)
def test_selected_blocks_have_as_much_attention_as_the_reference_s(sizes):
    sizes = dict(B=2, T=900, U=80, HQ=32, H=2, K=64, size=16, shift=0, count=16, dtype=HALF, cu=None) | sizes
    B, T, U, HQ, H, K, size, shift, count, dtype, cu = sizes.values()
    rng = torch.Generator("cuda").manual_seed(0)
    q, pooled = (torch.randn(s, generator=rng, device="cuda").to(dtype) for s in ((B, T, HQ, K), (B, U, H, K)))
    lse = torch.randn(B, T, HQ, generator=rng, device="cuda") + 5
    boundaries = None if cu is None else torch.tensor(cu, device="cuda")
    options = {"block_size": size, "shift": shift, "cu_seqlens": boundaries}
    kernel, exact = (select_blocks(q, pooled, lse, count, impl=impl, **options) for impl in ("triton", "reference"))
    assert torch.equal(kernel < 0, exact < 0)
    # in ascending order, padded with −1
    assert (kernel.where(kernel >= 0, 1 << 30).diff(dim=-1) >= (kernel[..., 1:] >= 0)).all()
    assert (kernel != exact).float().mean() < 0.01
    if cu is None:
        # selections differ only between blocks whose attention is equal up to rounding
        scores = torch.einsum("bthgk,buhk->bthgu", q.double().unflatten(2, (H, -1)), pooled.double()) * K**-0.5
        attention = (scores - lse.double().unflatten(2, (H, -1)).unsqueeze(-1)).exp().sum(3)
        sums = [(attention.gather(-1, x.clamp(min=0).long()) * (x >= 0)).sum(-1) for x in (kernel, exact)]
        torch.testing.assert_close(*sums, rtol=1e-3, atol=0)


def test_it_compiles_into_one_graph():
    tensors, options = inputs(H=2)

    def loss(q, k, v):
        return block_attention(q, k, v, **options).o.float().square().sum()

    exact = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    for a, b in zip(got, exact, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_offsets_beyond_two_to_the_31():
    T = (1 << 20) + 64 + 60
    (q, k, v), options = inputs(B=1, T=T, HQ=32, H=2)
    own = torch.arange(T, device="cuda") // 64
    options["blocks"] = torch.stack((own * 0, own - 1, own), -1)[None, :, None].expand(-1, -1, 2, -1)
    got = block_attention(q, k, v, **options).o[:, -60:]
    # the last 60 queries share their own block
    keys, values = (torch.cat((x[:, :64], x[:, -124:]), 1) for x in (k, v))
    assert relative_error(got, attention(q[:, -60:], keys, values).o) < 1e-2
