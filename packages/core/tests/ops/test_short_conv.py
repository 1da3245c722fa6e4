"""The short convolution: reference against torch's, kernels against float64; in the interpreter without a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tokenmix_core.ops import short_conv, short_conv_step, short_conv_steps
from tokenmix_core.testing.agreement import assert_agrees, gradients_through, values_and_gradients
from tokenmix_core.testing.closeness import relative_error

PACKED = [0, 0, 3, 36, 36, 38]


def inputs(B=2, T=38, D=6, W=4, N=None, bias=True, dtype=torch.float64, device="cpu", seed=0):
    """Random arguments by name; `N` adds an initial state of N sequences."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {"x": (B, T, D), "weight": (D, W)}
    shapes |= {"bias": (D,)} if bias else {}
    shapes |= {"initial_state": (N, D, W - 1)} if N else {}
    return {name: torch.randn(s, generator=generator, device=device).to(dtype) for name, s in shapes.items()}


def borders(values=PACKED, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("W", [2, 3, 4, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_reference_is_torchs_grouped_convolution(W, activation):
    x = inputs(W=W)
    o, final_state = short_conv(**x, activation=activation)
    padded = torch.nn.functional.pad(x["x"].mT, (W - 1, 0))
    expected = torch.nn.functional.conv1d(padded, x["weight"][:, None], x["bias"], groups=6).mT
    torch.testing.assert_close(o, torch.nn.functional.silu(expected) if activation else expected)
    torch.testing.assert_close(final_state, padded[..., -(W - 1) :])


def test_reference_gradients_are_those_of_finite_differences():
    leaves = [value.requires_grad_() for value in inputs(B=1, T=4, D=2, W=3, N=1).values()]
    assert torch.autograd.gradcheck(lambda x, w, b, s: short_conv(x, w, b, activation="silu", initial_state=s), leaves)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_packed_documents_never_mix(impl, device):
    x = inputs(B=1, N=5, dtype=torch.float32, device=device)
    o, final_state = short_conv(**x, activation="silu", cu_seqlens=borders(device=device), impl=impl)
    for n in range(5):
        begin, end = PACKED[n : n + 2]
        state = x["initial_state"][n : n + 1]
        if begin == end:
            torch.testing.assert_close(final_state[n], state[0])
            continue
        alone = x | {"x": x["x"][:, begin:end], "initial_state": state}
        expected = short_conv(**alone, activation="silu", impl="reference")
        torch.testing.assert_close(o[:, begin:end], expected.o)
        torch.testing.assert_close(final_state[n], expected.final_state[0])


@pytest.mark.parametrize("split", [1, 2, 20])
def test_a_sequence_in_two_pieces_equals_the_whole(split):
    x = inputs()
    whole = short_conv(**x)
    first = short_conv(**x | {"x": x["x"][:, :split]})
    rest = short_conv(**x | {"x": x["x"][:, split:]}, initial_state=first.final_state)
    torch.testing.assert_close(torch.cat([first.o, rest.o], 1), whole.o)
    torch.testing.assert_close(rest.final_state, whole.final_state)


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_steps_equal_the_whole_and_update_the_state_in_place(impl, W, device):
    x = inputs(T=10, W=W, N=2, dtype=torch.float32, device=device)
    whole = short_conv(**x, activation="silu", impl="reference")
    state = x["initial_state"].clone()
    address = state.data_ptr()
    for t in range(10):
        o = short_conv_step(x["x"][:, t], x["weight"], x["bias"], state, activation="silu", impl=impl)
        torch.testing.assert_close(o, whole.o[:, t])
    assert state.data_ptr() == address
    torch.testing.assert_close(state, whole.final_state)


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


KERNEL_CASES = {
    "ragged, with states": (dict(N=2), {"activation": "silu"}),
    "shorter than the width": (dict(T=2, N=2, W=8), {"activation": "silu"}),
    "no bias, no activation, no state": (dict(bias=False), {}),
    "packed": (dict(B=1, N=5), {"activation": "silu", "cu_seqlens": PACKED}),
    "packed, width two": (dict(B=1, W=2), {"activation": "silu", "cu_seqlens": PACKED}),
    "many channels": (dict(T=3, D=130), {"activation": "silu"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_kernels_agree_with_the_reference(case, dtype, device):
    shape, options = KERNEL_CASES[case]
    if "cu_seqlens" in options:
        options = options | {"cu_seqlens": borders(device=device)}
    conv = partial(short_conv, **options)
    assert_agrees(
        partial(conv, impl="triton"), partial(conv, impl="reference"), inputs(**shape, dtype=dtype, device=device)
    )


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


def test_custom_ops_pass_torchs_own_checks(device):
    from tokenmix_core.ops.convolution.autograd import (
        short_conv_backward_op,
        short_conv_forward_op,
        short_conv_step_op,
        short_conv_steps_op,
    )

    x = inputs(T=3, N=2, dtype=torch.float32, device=device)
    leaves = [value.requires_grad_() for value in x.values()]
    torch.library.opcheck(short_conv_forward_op, (*leaves[:3], "silu", leaves[3], None))
    x, weight, bias, state = (value.detach() for value in leaves)
    torch.library.opcheck(short_conv_backward_op, (x, weight, bias, "silu", state, None, torch.ones_like(x), None))
    torch.library.opcheck(short_conv_step_op, (x[:, 0], weight, bias, state, None))
    several = ((x, x.clone(), None) for x in (x[:, 0], weight, state))
    arguments = (*(x for tensors in several for x in tensors), "silu")
    torch.library.opcheck(short_conv_steps_op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles_into_one_graph(device):
    x = inputs(T=3, N=2, dtype=torch.float32, device=device)
    conv = partial(short_conv, activation="silu", impl="triton")
    got, upstream = values_and_gradients(torch.compile(conv, fullgraph=True, backend="aot_eager"), x)
    expected, _ = values_and_gradients(conv, x, upstream)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name])


MALFORMED = {
    "a missing axis": (lambda x: x | {"x": x["x"][0]}, "x must have shape"),
    "other channels": (lambda x: x | {"weight": x["weight"][:3]}, "weight must have shape"),
    "a bias per tap": (lambda x: x | {"bias": torch.zeros(4)}, "bias must have shape"),
    "width one": (lambda x: x | {"weight": torch.zeros(6, 1)}, "from 2 to 8"),
    "width nine": (lambda x: x | {"weight": torch.zeros(6, 9)}, "from 2 to 8"),
    "an unknown activation": (lambda x: x | {"activation": "relu"}, "activation must be"),
    "a state of another width": (lambda x: x | {"initial_state": torch.zeros(2, 6, 4)}, "initial_state must have"),
    "a state of another dtype": (lambda x: x | {"initial_state": torch.zeros(2, 6, 3).half()}, "share one dtype"),
    "integers": (lambda x: x | {"x": x["x"].long()}, "x must be"),
    "no weight": (lambda x: x | {"weight": None}, "weight must be a tensor .* got None"),
    "no tokens": (lambda x: x | {"x": x["x"][:, :0]}, "at least one token"),
    "packed rows": (lambda x: x | {"cu_seqlens": torch.tensor([0, 38])}, "B = 1"),
    "borders apart": (lambda x: x | {"cu_seqlens": torch.tensor([0, 9, 38, 38])[::2]}, "contiguous, got stride 2"),
    "an unknown implementation": (lambda x: x | {"impl": "cuda"}, "impl must be"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_calls_say_what_was_got_and_expected(case):
    change, message = MALFORMED[case]
    with pytest.raises(ValueError, match=message):
        short_conv(**change(inputs(dtype=torch.float32)))
