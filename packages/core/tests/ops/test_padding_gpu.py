"""Test that one CUDA graph of a packed call, forward and backward, serves boundaries with more or less padding."""

import pytest
import torch

from tokenmix_core.ops import attention, chunk_gated_delta_rule, chunk_ssd, kept_attention, short_conv

pytestmark = pytest.mark.gpu
T, H, D = 700, 2, 64
BOUNDARIES = ([0, 70, 70, 700], [0, 130, 300, 500], [0, 0, 1, 65], [0, 0, 0, 0])


def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(1, T, *shape, device="cuda", dtype=dtype)


def gates():
    return -rand(H, dtype=torch.float32).sigmoid()


CALLS = {
    "gated delta rule": (
        lambda cu, q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, qk_l2norm=True).o,
        lambda: (*(rand(H, D) for _ in "qkv"), gates(), -gates()),
    ),
    "SSD": (
        lambda cu, q, k, v, g, dt, D: chunk_ssd(q, k, v, g, dt=dt, D=D, cu_seqlens=cu).o,
        lambda: (*(rand(H, D) for _ in "qkv"), gates(), gates().abs(), torch.ones(H, device="cuda")),
    ),
    "convolution": (
        lambda cu, x, weight: short_conv(x, weight, activation="silu", cu_seqlens=cu).o,
        lambda: (rand(H * D), torch.randn(H * D, 4, device="cuda", dtype=torch.bfloat16)),
    ),
    **{
        f"attention, {impl}": (
            lambda cu, q, k, v, impl=impl: attention(q, k, v, cu_seqlens=cu, impl=impl).o,
            lambda: tuple(rand(H, D) for _ in "qkv"),
        )
        for impl in (None, "gluon", "triton", "sdpa")
    },
    "retained keys": (
        lambda cu, q, k, v, keep: kept_attention(q, k, v, keep, window=9, cu_seqlens=cu).o,
        lambda: (*(rand(H, D) for _ in "qkv"), (rand(H, dtype=torch.float32) > 0).float()),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_serves_other_boundaries(call):
    run, make = CALLS[call]
    torch.manual_seed(0)
    given = [x.requires_grad_() for x in make()]
    cu_seqlens = torch.tensor(BOUNDARIES[0], device="cuda", dtype=torch.int32)
    do = torch.randn_like(run(cu_seqlens, *given))

    def step(inputs):
        o = run(cu_seqlens, *inputs)
        return o, *torch.autograd.grad(o, inputs, do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(given)
    whole = [x.detach().clone() for x in (*given, do)]
    for boundaries in BOUNDARIES:
        last = boundaries[-1]
        cu_seqlens.copy_(torch.tensor(boundaries))
        for x, full in zip((*given, do), whole, strict=True):
            x.data.copy_(full)
            if x.shape[:2] == (1, T):
                x.data[:, last:] = torch.nan
        graph.replay()
        if not last:
            assert not any(x.any() for x in found)
            continue
        tokens = [x.shape[:2] == (1, T) for x in given]
        short = [
            (x.detach()[:, :last] if of else x.detach()).requires_grad_() for x, of in zip(given, tokens, strict=True)
        ]
        o = run(cu_seqlens.clone(), *short)
        wanted = o, *torch.autograd.grad(o, short, do[:, :last])
        for got, exact in zip(found, wanted, strict=True):
            if got.shape != exact.shape:
                assert not got[:, last:].any()
                got = got[:, :last]
            torch.testing.assert_close(got, exact, rtol=2e-2, atol=2e-2)
