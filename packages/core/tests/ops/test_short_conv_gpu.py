"""The short convolution's kernels on a GPU: widths, dtypes, packing, large inputs, graphs, no stalls."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from support.streams import assert_replays, stalls_forbidden
from tokenmix_core.ops import short_conv, short_conv_step, short_convs
from tokenmix_core.ops.causal_conv1d import tuning
from tokenmix_core.testing.agreement import assert_agrees, values_and_gradients
from tokenmix_core.testing.closeness import relative_error

pytestmark = pytest.mark.gpu

PACKED = [0, 0, 3, 36, 36, 500, 1000]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def inputs(B, T, D, W, N=None, dtype=torch.bfloat16):
    """Random arguments by name; `N` adds an initial state of N sequences."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,)} | ({"initial_state": (N, D, W - 1)} if N else {})
    return {n: torch.randn(s, generator=generator, device="cuda").to(dtype) for n, s in shapes.items()}


def boundaries():
    return torch.tensor(PACKED, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("W", range(2, 9))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_width_and_dtype(W, dtype, packed, activation):
    options = {"activation": activation} | ({"cu_seqlens": boundaries()} if packed else {})
    x = inputs(1 if packed else 3, 1000, 260, W, N=6 if packed else 3, dtype=dtype)
    conv = partial(short_conv, **options)
    assert_agrees(partial(conv, impl="triton"), partial(conv, impl="reference"), x)


@pytest.mark.parametrize("T", [1, 2, 31, 32, 33, 131_072])
def test_every_length(T):
    x = inputs(1, T, 64, 4, N=1)
    conv = partial(short_conv, activation="silu")
    assert_agrees(partial(conv, impl="triton"), partial(conv, impl="reference"), x)


@pytest.mark.parametrize("BT", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_every_length_of_a_run(packed, BT, override):
    for run in "conv1d_forward_tile", "conv1d_backward_tile":
        tile = getattr(tuning, run)(1000, 260)._replace(BT=BT)
        override(tuning, {run: lambda tokens, channels, tile=tile: tile})
    conv = partial(short_conv, activation="silu", **({"cu_seqlens": boundaries()} if packed else {}))
    x = inputs(1, 1000, 260, 4, N=6 if packed else 1)
    assert_agrees(partial(conv, impl="triton"), partial(conv, impl="reference"), x)


@pytest.mark.parametrize(("W", "dtype"), zip(range(2, 9), itertools.cycle(DTYPES), strict=False), ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [(260, 260, 520), (256, 128, 1024), (7, 130)], ids=str)
def test_several_inputs_are_each_of_them(channels, packed, W, dtype, override):
    # runs of one length, as sums are taken over them
    for run in "conv1d_forward_tile", "conv1d_backward_tile":
        tile = getattr(tuning, run)(1000, 260)
        override(tuning, {run: lambda tokens, channels, tile=tile: tile})
    options = {"activation": "silu", "impl": "triton"} | ({"cu_seqlens": boundaries()} if packed else {})
    parts = [inputs(1 if packed else 3, 1000, D, W, N=6 if packed else 3, dtype=dtype) for D in channels]
    leaves = {n: [x[n].requires_grad_() for x in parts] for n in ("x", "weight", "initial_state")}
    together = short_convs(leaves["x"], leaves["weight"], initial_states=leaves["initial_state"], **options)
    each = [short_conv(x, w, initial_state=s, **options) for x, w, s in zip(*leaves.values(), strict=True)]
    results = []
    for found in (together, each):
        outputs = [y for part in found for y in part]
        into = [x for tensors in leaves.values() for x in tensors]
        results.append([*outputs, *torch.autograd.grad(outputs, into, [y.detach() for y in outputs])])
    for got, wanted in zip(*results, strict=True):
        assert relative_error(got, wanted) < torch.finfo(dtype).eps


def test_more_than_two_to_the_31_elements():
    T, D, tail = 2**19 + 100, 4096, 100
    assert T * D > 2**31
    x = inputs(1, T, D, 4)
    leaves = [value.requires_grad_() for value in x.values()]
    o, _ = short_conv(*leaves, activation="silu", impl="triton")
    upstream = torch.zeros_like(o)
    upstream[:, -tail:].normal_()
    dx, dweight, dbias = torch.autograd.grad(o, leaves, upstream)
    # the last inputs alone, with the three before them as the state
    alone = [leaves[0].detach()[:, -tail:].double(), *(leaf.detach().double() for leaf in leaves[1:])]
    alone = [value.requires_grad_() for value in alone]
    state = leaves[0].detach()[:, -tail - 3 : -tail].mT.double()
    expected, _ = short_conv(*alone, activation="silu", initial_state=state, impl="reference")
    grads = torch.autograd.grad(expected, alone, upstream[:, -tail:].double())
    assert relative_error(o[:, -tail:], expected) < 4e-3
    for got, wanted in zip((dx[:, -tail:], dweight, dbias), grads, strict=True):
        assert relative_error(got, wanted) < 4e-3


def train_step(x, upstream, cu_seqlens):
    outputs = short_conv(**x, activation="silu", cu_seqlens=cu_seqlens, impl="triton")
    return *outputs, *torch.autograd.grad(list(outputs), list(x.values()), upstream)


def test_training_and_decoding_never_stall_the_stream():
    x = {name: value.requires_grad_() for name, value in inputs(1, 1000, 256, 4, N=6).items()}
    cu_seqlens = boundaries()
    upstream = [torch.randn_like(y) for y in short_conv(**x, cu_seqlens=cu_seqlens, impl="triton")]
    token, state = torch.randn(2, 256, device="cuda").bfloat16(), torch.zeros(2, 256, 3, device="cuda").bfloat16()
    step = partial(short_conv_step, token, x["weight"], x["bias"], state)
    train_step(x, upstream, cu_seqlens)
    step()
    with stalls_forbidden():
        train_step(x, upstream, cu_seqlens)
        step()


def test_forward_and_backward_replay_from_a_graph():
    x = {name: value.requires_grad_() for name, value in inputs(1, 1000, 256, 4, N=6).items()}
    cu_seqlens = boundaries()
    upstream = [torch.randn_like(y) for y in short_conv(**x, cu_seqlens=cu_seqlens, impl="triton")]
    assert_replays(partial(train_step, x, upstream, cu_seqlens))


def test_compiles_into_one_graph():
    x = inputs(2, 100, 64, 4, N=2)
    conv = partial(short_conv, activation="silu", impl="triton")
    got, upstream = values_and_gradients(torch.compile(conv, fullgraph=True), x)
    expected, _ = values_and_gradients(conv, x, upstream)
    for name in expected:
        assert relative_error(got[name], expected[name]) < 1e-6, name
