"""A layer's step on a GPU: every tile, many programs that count themselves, graphs, no stalls."""

from __future__ import annotations

import pytest
import torch

from support.streams import assert_replays, stalls_forbidden
from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.ops import delta_layer_step
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.testing.closeness import assert_within

pytestmark = pytest.mark.gpu


def inputs(B=2, H=2, HV=4, K=128, V=128, W=4, dtype=torch.bfloat16):
    """Arguments in their order; those written to are the last inputs of q, k and v, the state and the arrivals."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    channels = H * K, H * K, HV * V
    wide = torch.promote_types(dtype, torch.float32)
    return [
        *(randn(B, H, K), randn(B, H, K), randn(B, HV, V), randn(B, HV), randn(B, HV), randn(B, HV, V)),
        [randn(D, W) for D in channels],
        [randn(B, D, W - 1) for D in channels],
        *(randn(HV, dtype=wide), randn(HV, dtype=wide), randn(V)),
        HeadFit(K, V, (64, 128, 256)).states(randn(B, HV, K, V, dtype=wide)),
        torch.zeros(B, H, dtype=torch.int32, device="cuda"),
    ]


def copied(x, dtype=None):
    def copy(t):
        return t.to(dtype, copy=True) if dtype is not None and t.is_floating_point() else t.clone()

    return [[copy(t) for t in part] if isinstance(part, list) else copy(part) for part in x]


def results(x, **options):
    y = delta_layer_step(*x, **options)
    assert not x[-1].any()
    return {"y": y, "q": x[7][0], "k": x[7][1], "v": x[7][2], "state": x[-2]}


def check(x):
    exact, eager = results(copied(x, torch.float64), impl="reference"), results(copied(x), impl="reference")
    got = results(copied(x), impl="triton")
    dtype = x[0].dtype
    floor = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
    for name in got:
        assert_within(name, got[name], exact[name], eager[name], floor=floor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("V", [64, 128, 256, 512])
def test_every_tile(K, V, dtype, override):
    x = inputs(K=K, V=V, dtype=dtype)
    for tile in tuning.all_tiles("step", K, x[0].element_size()):
        override(tuning, scan_tile=lambda *args, tile=tile: tile)
        check(x)


@pytest.mark.parametrize("W", range(2, 9))
@pytest.mark.parametrize(("H", "HV", "K", "V"), [(1, 1, 40, 24), (3, 12, 192, 384), (2, 2, 100, 96)])
def test_every_width_with_heads_that_no_kernel_has(W, H, HV, K, V):
    check(inputs(H=H, HV=HV, K=K, V=V, W=W))


@pytest.mark.parametrize("B", [1, 64, 512])
def test_many_steps_end_bit_by_bit_alike(B):
    x = inputs(B=B, H=4, HV=8, V=256)
    ends = []
    for _ in range(2):
        y = copied(x)
        ends.append([results(y, impl="triton")["y"] for _ in range(200)] + [y[-2], *y[7]])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_step_never_stalls_the_stream_and_replays_from_a_graph():
    x = inputs()
    delta_layer_step(*x, impl="triton")
    with stalls_forbidden():
        delta_layer_step(*x, impl="triton")

    def step():
        y = copied(x)
        return delta_layer_step(*y, impl="triton"), y[-2], *y[7]

    assert_replays(step)
