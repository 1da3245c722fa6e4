"""The short convolution's contract, and what layouts, dtypes and several inputs at once add."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

from tokenmix_core.ops import (
    short_conv,
    short_conv_prefill,
    short_conv_step,
    short_conv_steps,
    short_convs,
    short_convs_prefill,
)
from tokenmix_core.ops.causal_conv1d import tuning
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.testing.agreement import assert_agrees, gradients_through, values_and_gradients, watched
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.layout_contract import differently_laid
from tokenmix_core.testing.operations import ALL_CHECKS, HALF, Call, KernelCase, OpContract
from tokenmix_core.testing.slot_contract import SLOTS, PrefillTests, padded_rows, poisoned_pool

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


def short_runs(override):
    """Runs of one or two tokens, so that the programs of a sequence are many."""
    override(tuning, conv1d_forward_tile=lambda *_: tuning.Conv1dTile(2, 1, 32))


class TestShortConv(PrefillTests, OpContract):
    covers = (short_conv, short_conv_prefill, short_convs_prefill, short_conv_step, short_conv_steps)
    prefill = (short_conv_prefill, dict(N=5, activation="silu", boundaries=PACKED))
    prefill_patches: ClassVar = {"short runs": short_runs}
    # the inputs before a sequence have the activations' dtype
    prefill_pools = (torch.float32,)
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
        "packed": KernelCase(dict(N=5, activation="silu", boundaries=PACKED)),
        "packed, width two": KernelCase(dict(W=2, activation="silu", boundaries=PACKED)),
        "many channels": KernelCase(dict(T=3, D=130, activation="silu")),
    }
    parts: ClassVar = {"of a sequence": dict(activation="silu")}
    packed: ClassVar = {"of documents": dict(N=5, activation="silu", boundaries=PACKED)}
    neighbours: ClassVar = dict(B=3, N=3, T=5)
    laid: ClassVar = {"one row": dict(B=1, N=1, T=3, activation="silu")}
    on_gpu: ClassVar = {"many channels": dict(T=150, D=256, N=2, activation="silu")}
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
        "boundaries in a list": ({"cu_seqlens": [0, 5]}, r"cu_seqlens must be a tensor of shape \[.*\], got list"),
        "boundaries apart": ({"cu_seqlens": torch.tensor([0, 3, 5])[::2]}, "contiguous, got stride 2"),
        "an unknown implementation": ({"impl": "cuda"}, "impl must be"),
    }

    def make(self, dtype=torch.float64, device="cpu", seed=0, activation=None, boundaries=None, **sizes) -> Call:
        options = {"activation": activation}
        if boundaries is not None:
            options["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32, device=device)
            sizes |= {"B": 1, "T": boundaries[-1]}
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
        from tokenmix_core.ops.causal_conv1d import autograd

        x = inputs(T=3, N=2, dtype=torch.float32, device=device)
        leaves = [value.requires_grad_() for value in x.values()]
        yield autograd.short_conv_forward_op, (*leaves[:3], "silu", leaves[3], None)
        x, weight, bias, state = (value.detach() for value in leaves)
        yield autograd.short_conv_backward_op, (x, weight, bias, "silu", state, None, torch.ones_like(x), None)
        slots = torch.tensor([1, -1], dtype=torch.int32, device=device)
        yield autograd.short_conv_step_op, (x[:, 0], weight, bias, state, None)
        yield autograd.short_conv_step_op, (x[:, 0], weight, bias, state, None, slots)
        several = [y for x in (x[:, 0], weight, state) for y in (x, x.clone(), None)]
        yield autograd.short_conv_steps_op, (*several, "silu"), "test_schema", "test_faketensor"
        yield autograd.short_conv_steps_op, (*several, "silu", slots), "test_schema", "test_faketensor"
        fresh = slots > 0
        yield autograd.short_conv_prefill_op, (x, weight, bias, state, slots, fresh, "silu", None)
        several = [y for x in (x, weight, state) for y in (x, x.clone(), None)]
        yield autograd.short_convs_prefill_op, (*several, slots, None, "silu", None), "test_schema", "test_faketensor"
        two, weights, states = ([t.clone().requires_grad_() for t in (y, y)] for y in (x, weight, state))
        several, tests = (*two, None, *weights, None, "silu", *states, None, None), ALL_CHECKS[:3]
        yield autograd.short_convs_forward_op, several, *tests
        several = (t.detach() if isinstance(t, Tensor) else t for t in several)
        gradients = torch.ones_like(x), x.clone(), None, None, None, None
        yield autograd.short_convs_backward_op, (*several, *gradients), *tests


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("channels", [(6, 6, 20), (300, 40), (7, 513, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
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


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_prefills_of_several_inputs_in_slots_are_those_of_each(impl, device):
    slots = torch.tensor([3, -1, 0], device=device)
    cu_seqlens = torch.tensor([0, 2, 5, 36], dtype=torch.int32, device=device)
    given = [inputs(B=1, T=38, D=D, N=4, dtype=torch.float32, device=device) for D in (6, 40, 6)]
    for number in (2, 3):
        xs, weights, states = ([x[name] for x in given[:number]] for name in ("x", "weight", "initial_state"))
        one, together = ([state.clone() for state in states] for _ in range(2))
        options = {"slots": slots, "fresh": slots == 0, "activation": "silu", "cu_seqlens": cu_seqlens, "impl": impl}
        got = short_convs_prefill(xs, weights, together, **options)
        wanted = [short_conv_prefill(x, w, None, s, **options) for x, w, s in zip(xs, weights, one, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip((*got, *together), (*wanted, *one), strict=True))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_steps_of_several_inputs_in_slots_are_those_of_each(impl, device):
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    parts = [inputs(T=1, D=D, N=2, bias=False, dtype=torch.float32, device=device, seed=D) for D in (300, 40, 6)]
    tokens, weights = [padded_rows(x["x"][:, 0]) for x in parts], [x["weight"] for x in parts]
    pools, each = ([poisoned_pool(x["initial_state"], torch.float32)[0] for x in parts] for _ in range(2))
    got = short_conv_steps(tokens, weights, pools, slots=slots, activation="silu", impl=impl)
    for o, token, weight, pool, other in zip(got, tokens, weights, pools, each, strict=True):
        assert torch.equal(o, short_conv_step(token, weight, None, other, slots=slots, activation="silu", impl=impl))
        torch.testing.assert_close(pool, other, rtol=0, atol=0, equal_nan=True)


def test_steps_of_several_inputs_refuse_what_differs(device):
    x, other = (inputs(T=1, D=6, W=W, N=2, bias=False, dtype=torch.float32, device=device) for W in (4, 3))
    token = [x["x"][:, 0]] * 2
    with pytest.raises(ValueError, match="two or three inputs"):
        short_conv_steps(token[:1], [x["weight"]], [x["initial_state"]])
    weights, states = ([y[name] for y in (x, other)] for name in ("weight", "initial_state"))
    with pytest.raises(ValueError, match="one B, T, W, dtype and device"):
        short_conv_steps(token, weights, states)


SEVERAL_CASES = {
    "ragged, with states": (dict(T=11, N=2, dtype=torch.float16), (6, 6, 20), {"activation": "silu"}),
    "two inputs, no state": (dict(T=9, W=2, dtype=torch.float16), (5, 130), {}),
    "packed": (dict(B=1, T=PACKED[-1], N=5), (6, 6, 20), {"activation": "silu", "cu_seqlens": PACKED}),
    "packed, two inputs, wide": (dict(B=1, T=PACKED[-1], W=8), (140, 3), {"cu_seqlens": PACKED}),
    "more than a block each": (dict(T=3), (130, 129, 257), {"activation": "silu"}),
}


def several(channels, **shape):
    """Random arguments by name: x, weight and initial_state of each input, with its number."""
    parts = [inputs(D=D, bias=False, seed=D, **shape) for D in channels]
    return {f"{name}{i}": value for i, part in enumerate(parts) for name, value in part.items()}


class Several(NamedTuple):
    o: torch.Tensor
    final_state: torch.Tensor


def convolve_several(call=short_convs, channels=3, **options):
    """`short_convs` of arguments by name; results of all inputs side by side."""

    def run(**x):
        xs, weights, states = ([x.get(f"{n}{i}") for i in range(channels)] for n in ("x", "weight", "initial_state"))
        found = call(xs, weights, initial_states=None if states[0] is None else states, **options)
        return Several(*(torch.cat(parts, dim) for dim, parts in zip((2, 1), zip(*found, strict=True), strict=True)))

    return run


def one_by_one(xs, weights, *, initial_states=None, **options):
    states = initial_states or [None] * len(xs)
    each = zip(xs, weights, states, strict=True)
    return [short_conv(x, weight, initial_state=state, **options) for x, weight, state in each]


@pytest.mark.parametrize("case", SEVERAL_CASES)
def test_several_inputs_agree_with_the_reference(case, device):
    shape, channels, options = SEVERAL_CASES[case]
    if "cu_seqlens" in options:
        options = options | {"cu_seqlens": torch.tensor(PACKED, dtype=torch.int32, device=device)}
    form = partial(convolve_several, channels=len(channels), **options)
    x = several(channels, **{"dtype": torch.float32} | shape, device=device)
    assert_agrees(form(impl="triton"), form(impl="reference"), x)


def test_several_inputs_are_each_of_them_bit_by_bit(device):
    x = several((6, 130, 20), T=5, N=2, dtype=torch.float32, device=device)
    # rows of wider tensors, and weights apart
    x["x1"] = torch.cat((x["x1"], x["x1"]), 2)[..., :130]
    x["weight2"] = x["weight2"].repeat_interleave(2, 1)[:, ::2]
    form = partial(convolve_several, activation="silu", impl="triton")
    got, upstream = values_and_gradients(form(), x)
    wanted, _ = values_and_gradients(form(one_by_one), x, upstream)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.operation
def test_several_results_do_not_depend_on_layouts(device):
    x = several((6, 130, 20), T=5, N=2, dtype=torch.float32, device=device)

    def found(**tensors):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        o, final_state = convolve_several(activation="silu", impl="triton")(**leaves)
        # gradients that are transposed, as of code that continues with the other axis first
        upstream = [torch.linspace(-1, 1, t.numel(), device=device).view(t.mT.shape).mT for t in (o, final_state)]
        grads = torch.autograd.grad([o, final_state], list(leaves.values()), upstream)
        return {"o": o, "final_state": final_state} | dict(zip(leaves, grads, strict=True))

    differently_laid(found, x)


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_gradients_flow_through_either_result_of_several_inputs(used, device):
    x = several((6, 5, 4), T=5, N=2, dtype=torch.float32, device=device)
    form = partial(convolve_several, activation="silu")
    got, expected = (gradients_through(form(impl=impl), x, used) for impl in ("triton", "reference"))
    for name in x:
        assert relative_error(got[name], expected[name]) < 1e-5, name


def test_one_result_of_several_inputs_may_be_used_alone(device):
    xs, weights, states = (
        [y[n] for y in (inputs(T=5, D=D, N=2, bias=False, dtype=torch.float32, device=device) for D in (6, 5, 4))]
        for n in ("x", "weight", "initial_state")
    )
    leaves = [x.requires_grad_() for x in (*xs, *weights, *states)]
    grads = []
    for call in (short_convs, one_by_one):
        _, (o, _), (_, final_state) = call(xs, weights, initial_states=states, impl="triton")
        grads.append(torch.autograd.grad(o.sum() + final_state.sum(), leaves, materialize_grads=True))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_several_inputs_take_one_launch_each_way(device):
    xs = [torch.randn(1, 3, D, device=device, requires_grad=True) for D in (6, 5, 4)]
    weights = [torch.randn(D, 4, device=device) for D in (6, 5, 4)]
    found, seen = watched(lambda: [o for o, _ in short_convs(xs, weights, impl="triton")])
    assert [name for name in seen if "tokenmix" in name] == ["tokenmix_core.short_convs_forward.default"]
    _, seen = watched(lambda: torch.autograd.grad([o.sum() for o in found], xs))
    assert [name for name in seen if "tokenmix" in name] == ["tokenmix_core.short_convs_backward.default"]


def test_several_inputs_refuse_what_differs():
    x, other = (inputs(T=T, bias=False, dtype=torch.float32) for T in (4, 5))
    xs, weights = [x["x"], x["x"]], [x["weight"]] * 2
    with pytest.raises(ValueError, match="short_convs: expected two or three inputs"):
        short_convs(xs[:1], weights[:1])
    with pytest.raises(ValueError, match="with a weight and a state for each, got 2, 2 and 1"):
        short_convs(xs, weights, initial_states=[torch.zeros(2, 6, 3)])
    with pytest.raises(ValueError, match="one B, T, W, dtype and device"):
        short_convs([x["x"], other["x"]], weights)
    with pytest.raises(ValueError, match="weight must be a tensor"):
        short_convs(xs, [x["weight"], None])


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
