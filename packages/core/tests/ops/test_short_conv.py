"""The short convolution's contract, and what layouts, dtypes and several inputs at once add."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.ops import short_conv, short_conv_step, short_conv_steps
from tokenmix_core.ops.common import ScanOutput
from tokenmix_core.testing.agreement import gradients_through, values_and_gradients
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.operations import Call, KernelCase, OpContract

PACKED = [0, 0, 3, 36, 36, 37]


def inputs(B=2, T=38, D=6, W=4, N=None, bias=True, dtype=torch.float64, device="cpu", seed=0):
    """Random arguments by name; `N` adds an initial state of N sequences."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {"x": (B, T, D), "weight": (D, W)}
    shapes |= {"bias": (D,)} if bias else {}
    shapes |= {"initial_state": (N, D, W - 1)} if N else {}
    return {name: torch.randn(s, generator=generator, device=device).to(dtype) for name, s in shapes.items()}


def z(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


class TestShortConv(OpContract):
    covers = (short_conv, short_conv_step, short_conv_steps)
    forms: ClassVar = {"whole": short_conv}
    tokens = ("x",)
    state = ("initial_state", "final_state")
    shared = ("weight", "bias")
    step = (short_conv_step, dict(N=2, activation="silu"))
    malformed_steps: ClassVar = {
        "a state whose channels lie apart": ({"state": z(2, 3, 6).mT}, "state must be contiguous"),
        "a state of another dtype": ({"state": z(2, 6, 3, dtype=torch.float16)}, "dtype, got x float32, state float16"),
        "a list": ({"x": [1.0]}, "x must be a tensor of shape .*, got list"),
    }
    cases: ClassVar = {
        "width two": dict(T=9, W=2, N=2),
        "SiLU": dict(T=9, N=2, activation="silu"),
        "no bias, no state": dict(T=9, bias=False),
        "width eight": dict(T=9, W=8, activation="silu"),
    }
    lengths = (1, 2, 3, 4, 5)
    kernels: ClassVar = {
        "ragged, with states": KernelCase(dict(N=2, activation="silu")),
        "shorter than the width": KernelCase(dict(T=2, N=2, W=8, activation="silu")),
        "no bias, no activation, no state": KernelCase(dict(bias=False)),
        "packed": KernelCase(dict(N=5, activation="silu", borders=PACKED)),
        "packed, width two": KernelCase(dict(W=2, activation="silu", borders=PACKED)),
        "many channels": KernelCase(dict(T=3, D=130, activation="silu")),
    }
    pieces: ClassVar = {"of a sequence": dict(activation="silu")}
    packed: ClassVar = {"of documents": dict(N=5, activation="silu", borders=PACKED)}
    neighbours: ClassVar = dict(B=3, N=3, T=5)
    traced: ClassVar = dict(N=2, activation="silu")
    replayed: ClassVar = dict(T=5, N=2, activation="silu")
    valid: ClassVar = dict(T=5)
    malformed: ClassVar = {
        "a missing axis": ({"x": z(5, 6)}, r"x must have shape \[.*got \[5, 6\]"),
        "a list": ({"x": [1.0]}, "x must be a tensor of shape .*, got list"),
        "other channels": ({"weight": z(3, 4)}, r"weight must have shape \[.*got \[3, 4\]"),
        "no weight": ({"weight": None}, "weight must be a tensor .* got None"),
        "a bias per tap": ({"bias": z(4)}, r"bias must have shape \[.*got \[4\]"),
        "width one": ({"weight": z(6, 1)}, r"width W from 2 to 8, got \[6, 1\]"),
        "width nine": ({"weight": z(6, 9)}, r"width W from 2 to 8, got \[6, 9\]"),
        "an unknown activation": ({"activation": "gelu"}, "activation must be None or 'silu', got 'gelu'"),
        "a state of another width": ({"initial_state": z(2, 6, 4)}, r"initial_state must have .*got \[2, 6, 4\]"),
        "a state of another dtype": ({"initial_state": z(2, 6, 3, dtype=torch.float16)}, "share one dtype"),
        "integers": ({"x": z(2, 5, 6, dtype=torch.long)}, "x must be .*got int64"),
        "no tokens": ({"x": z(2, 0, 6)}, "at least one token"),
        "packed rows": ({"cu_seqlens": torch.tensor([0, 5])}, "B = 1"),
        "borders in a list": ({"cu_seqlens": [0, 5]}, r"cu_seqlens must be a tensor of shape \[.*\], got list"),
        "borders apart": ({"cu_seqlens": torch.tensor([0, 3, 5])[::2]}, "contiguous, got stride 2"),
        "an unknown implementation": ({"impl": "cuda"}, "impl must be"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, activation=None, borders=None, **sizes) -> Call:
        options = {"activation": activation}
        if borders is not None:
            options["cu_seqlens"] = torch.tensor(borders, dtype=torch.int32, device=device)
            sizes |= {"B": 1, "T": borders[-1]}
        return Call(inputs(**sizes, dtype=dtype, device=device, seed=seed), options)

    def definition(self, x, weight, bias=None, initial_state=None, *, activation):
        W, last, outputs = weight.shape[1], initial_state, []
        last = x.new_zeros(len(x), x.shape[2], W - 1) if last is None else last
        for t in range(x.shape[1]):
            last = torch.cat((last, x[:, t, :, None]), 2)
            o = (weight * last).sum(2) + (0 if bias is None else bias)
            outputs.append(o * o.sigmoid() if activation else o)
            last = last[..., 1:]
        return ScanOutput(torch.stack(outputs, 1), last)

    def operators(self, device):
        from tokenmix_core.ops.convolution import autograd

        x = inputs(T=3, N=2, dtype=torch.float32, device=device)
        leaves = [value.requires_grad_() for value in x.values()]
        yield autograd.short_conv_forward_op, (*leaves[:3], "silu", leaves[3], None)
        x, weight, bias, state = (value.detach() for value in leaves)
        yield autograd.short_conv_backward_op, (x, weight, bias, "silu", state, None, torch.ones_like(x), None)
        yield autograd.short_conv_step_op, (x[:, 0], weight, bias, state, None)
        several = (y for x in (x[:, 0], weight, state) for y in (x, x.clone(), None))
        yield autograd.short_conv_steps_op, (*several, "silu"), "test_schema", "test_faketensor"


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("channels", [(6, 6, 20), (300, 40), (7, 513, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_several_inputs_are_those_of_each(impl, channels, dtype, device):
    parts = [inputs(T=5, D=D, N=2, bias=False, dtype=dtype, device=device, seed=D) for D in channels]
    weights = [x["weight"] for x in parts]
    states, each = ([x["initial_state"].clone() for x in parts] for _ in range(2))
    addresses = [x.data_ptr() for x in states]
    for t in range(5):
        # one of them beside others in wider rows
        tokens = [torch.cat((x["x"][:, t], x["x"][:, t]), 1)[:, : x["x"].shape[2]] for x in parts]
        got = short_conv_steps(tokens, weights, states, activation="silu", impl=impl)
        for o, token, weight, state in zip(got, tokens, weights, each, strict=True):
            assert torch.equal(o, short_conv_step(token, weight, None, state, activation="silu", impl=impl))
    assert all(torch.equal(a, b) for a, b in zip(states, each, strict=True))
    assert [x.data_ptr() for x in states] == addresses


def test_steps_of_several_inputs_refuse_what_differs(device):
    x, other = (inputs(T=1, D=6, W=W, N=2, bias=False, dtype=torch.float32, device=device) for W in (4, 3))
    token = [x["x"][:, 0]] * 2
    with pytest.raises(ValueError, match="two or three inputs"):
        short_conv_steps(token[:1], [x["weight"]], [x["initial_state"]])
    weights, states = ([y[name] for y in (x, other)] for name in ("weight", "initial_state"))
    with pytest.raises(ValueError, match="one B, W, dtype and device"):
        short_conv_steps(token, weights, states)


def test_weights_may_be_kept_in_float32(device):
    x = inputs(dtype=torch.float16, device=device)
    x |= {name: x[name].float() for name in ("weight", "bias")}
    got, upstream = values_and_gradients(partial(short_conv, impl="triton"), x)
    exact, _ = values_and_gradients(partial(short_conv, impl="reference"), x, upstream, dtype=torch.float64)
    for name in got:
        assert relative_error(got[name], exact[name]) < 1e-3, name
    assert got["dweight"].dtype == torch.float32


def test_tensors_in_any_layout_are_read_right(device):
    conv = partial(short_conv, activation="silu", impl="triton")
    x = inputs(N=2, dtype=torch.float32, device=device)
    strided = {name: value.repeat_interleave(2, -1)[..., ::2] for name, value in x.items()}
    results = []
    for tensors in (x, strided):
        # no copy of them, which would be contiguous
        leaves = [value.requires_grad_() for value in tensors.values()]
        o, final_state = conv(**tensors)
        results.append((o, final_state, *torch.autograd.grad(o.sum() + final_state.sum(), leaves)))
    state = x["initial_state"].detach()
    results[0] += (short_conv_step(x["x"][:, 0], x["weight"], x["bias"], state.clone(), impl="triton"),)
    token = strided["x"][:, 0], strided["weight"], strided["bias"]
    results[1] += (short_conv_step(*token, state.clone(), impl="triton"),)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_token_may_lie_at_any_stride(device):
    x = inputs(T=1, dtype=torch.float32, device=device)
    results = []
    # contiguous as torch counts it, with a stride of 1 along time
    for lay in (lambda t: t, lambda t: t.mT.clone(memory_format=torch.contiguous_format).mT):
        leaves = {name: value.detach().requires_grad_() for name, value in (x | {"x": lay(x["x"])}).items()}
        o = short_conv(**leaves, activation="silu", impl="triton").o
        results.append((o, *torch.autograd.grad(o, list(leaves.values()), lay(torch.ones_like(o)))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_gradients_flow_through_either_result_alone(used, device):
    x = inputs(N=2, dtype=torch.float32, device=device)
    got, expected = (gradients_through(partial(short_conv, impl=impl), x, used) for impl in ("triton", "reference"))
    for name in x:
        assert relative_error(got[name], expected[name]) < 1e-5, name
