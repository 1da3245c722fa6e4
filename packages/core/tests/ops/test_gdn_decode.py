"""A layer's step in one launch: reference against operations, kernel against float64, and mixers that take it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.head_padding import HeadFit
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.ops import (
    delta_gates,
    delta_layer_step,
    gated_delta_rule_step,
    gated_rms_norm,
    short_conv_step,
)
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.layout_contract import differently_laid
from tokenmix_core.testing.mixers import run_captured, run_in_parts, run_mixer
from tokenmix_core.testing.slot_contract import (
    HALF,
    SLOTS,
    assert_only_slots_written,
    padded_rows,
    poisoned_pool,
)

SIZES = (64, 128, 256)
WRITTEN = ("q_inputs", "k_inputs", "v_inputs", "state")


def inputs(B=2, H=1, HV=2, K=64, V=64, W=4, gate=True, dtype=torch.float64, device="cpu", seed=0):
    """Random tensors by name, the state padded and cut as kernels take it."""
    generator = torch.Generator(device).manual_seed(seed)
    randn = partial(torch.randn, generator=generator, device=device)
    shapes = {"q": (B, H, K), "k": (B, H, K), "v": (B, HV, V), "a": (B, HV), "b": (B, HV), "gate": (B, HV, V)}
    shapes |= {f"{name}_weight": (n, W) for name, n in (("q", H * K), ("k", H * K), ("v", HV * V))}
    shapes |= {f"{name}_inputs": (B, n, W - 1) for name, n in (("q", H * K), ("k", H * K), ("v", HV * V))}
    x = {name: randn(shape).to(dtype) for name, shape in shapes.items()}
    wide = torch.promote_types(dtype, torch.float32)
    x |= {name: randn(HV).to(wide) for name in ("A_log", "dt_bias")} | {"norm_weight": randn(V).to(dtype)}
    x["state"] = HeadFit(K, V, SIZES).states(randn(B, HV, K, V).to(wide))
    return x if gate else x | {"gate": None}


def run(x, **options):
    """y and what was written, by name; the tensors given stay as they are."""
    written = {name: x[name].clone() for name in WRITTEN}
    arrivals = torch.zeros(x["q"].shape[:2], dtype=torch.int32, device=x["q"].device)
    addresses = [t.data_ptr() for t in written.values()]
    y = step(x, written, arrivals, **options)
    assert not arrivals.any()
    assert [t.data_ptr() for t in written.values()] == addresses
    return {"y": y} | written


def step(x, written, arrivals, **options):
    return delta_layer_step(
        *(x[name] for name in ("q", "k", "v", "a", "b", "gate")),
        [x[f"{name}_weight"] for name in "qkv"],
        [written[f"{name}_inputs"] for name in "qkv"],
        *(x[name] for name in ("A_log", "dt_bias", "norm_weight")),
        written["state"],
        arrivals,
        **options,
    )


def test_the_reference_is_its_operations_one_after_the_other():
    x = inputs(H=2, HV=4, K=6, V=10, W=3)
    sizes = {"q": (2, 6), "k": (2, 6), "v": (4, 10)}
    whole = HeadFit(6, 10, SIZES).whole_states(x["state"], 4).contiguous()
    got = run(x, scale=0.3, max_beta=2.0, eps=1e-4)
    last = {name: x[f"{name}_inputs"].clone() for name in sizes}
    q, k, v = (
        short_conv_step(x[name].flatten(1), x[f"{name}_weight"], None, last[name], activation="silu").unflatten(1, size)
        for name, size in sizes.items()
    )
    gates = delta_gates(x["a"][:, None], x["b"][:, None], x["A_log"], x["dt_bias"], max_beta=2.0)
    g, beta = (t[:, 0] for t in gates)
    o = gated_delta_rule_step(q, k, v, g, beta, whole, scale=0.3, qk_l2norm=True)
    torch.testing.assert_close(got["y"], gated_rms_norm(o, x["gate"], x["norm_weight"], eps=1e-4))
    torch.testing.assert_close(got["state"], HeadFit(6, 10, SIZES).states(whole))
    for name in sizes:
        assert torch.equal(got[f"{name}_inputs"], last[name])


CASES = {
    "groups of heads": dict(H=2, HV=4),
    "several tiles": dict(K=128, V=256, HV=1),
    "wide keys, no gate": dict(B=1, K=256, V=64, HV=1, gate=False),
    "padded heads of two taps": dict(K=20, V=24, W=2, H=2, HV=2),
    "cut heads": dict(B=1, K=70, V=192, W=8, HV=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_the_kernel_agrees_with_the_reference(case, dtype, device):
    x = inputs(**CASES[case], dtype=dtype, device=device)
    options = {"max_beta": 2.0, "eps": 1e-5}
    got, eager = (run(x, impl=impl, **options) for impl in ("triton", "reference"))
    exact = run({name: None if t is None else t.double() for name, t in x.items()}, impl="reference", **options)
    # as `assert_agrees` has them
    floor = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
    for name in got:
        assert got[name].dtype == eager[name].dtype
        assert_within(name, got[name], exact[name], eager[name], floor=floor)
    for name in WRITTEN[:3]:
        assert torch.equal(got[name], eager[name])


@pytest.mark.parametrize("case", ["groups of heads", "padded heads of two taps", "cut heads"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_step_in_slots_equals_one_on_states(case, dtype, impl, device):
    x = inputs(**CASES[case] | {"B": 2}, dtype=dtype, device=device)
    x["state"] = x["state"].to(dtype)
    exact = run({name: t.double() for name, t in x.items()}, impl="reference")
    rows = x | {name: padded_rows(x[name]) for name in ("q", "k", "v", "a", "b", "gate")}
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    found = []
    for form in (impl, "reference"):
        pools = {name: poisoned_pool(x[name], dtype) for name in WRITTEN}
        # counters of slots without an owner are undefined
        arrivals = torch.full((5, 3 * x["q"].shape[1]), 7, dtype=torch.int32, device=device)[:, : x["q"].shape[1]]
        arrivals[[3, 1]] = 0
        y = step(rows, {name: pool for name, (pool, _) in pools.items()}, arrivals, slots=slots, impl=form)
        assert not y[[0, 2]].any()
        assert not arrivals[[3, 1]].any()
        assert (arrivals[[0, 2, 4]] == 7).all()
        for name, (_, memory) in pools.items():
            assert_only_slots_written(memory, x[name][0].numel())
        found.append({"y": y[[1, 3]]} | {name: pool[[3, 1]] for name, (pool, _) in pools.items()})
    floor = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 0.5)
    for name in exact:
        assert_within(name, found[0][name], exact[name], found[1][name], floor=floor)


def test_slices_of_wider_rows_are_read_where_they_lie(device):
    x = inputs(dtype=torch.float32, device=device)
    rows = torch.cat([x[name].flatten(1) for name in ("q", "k", "v", "gate", "a", "b")], 1)
    parts = rows.split([64, 64, 128, 128, 2, 2], 1)
    names = {"q": 1, "k": 1, "v": 2, "gate": 2}
    sliced = {name: part.unflatten(1, (n, 64)) for (name, n), part in zip(names.items(), parts[:4], strict=True)}
    sliced |= {"a": parts[4], "b": parts[5]}
    strided = {
        name: x[name].repeat_interleave(2, -1)[..., ::2] for name in ("q", "a", "gate", "q_weight", "norm_weight")
    }
    wanted = run(x, impl="triton")
    for other in (sliced, strided):
        got = run(x | other, impl="triton")
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.operation
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_results_do_not_depend_on_layouts(impl, device):
    x = inputs(dtype=torch.float32, device=device)
    # what is written must be contiguous
    given = {name: t for name, t in x.items() if name not in WRITTEN}
    differently_laid(lambda **laid: run(x | laid, impl=impl), given)


def test_extreme_gates_stay_finite(device):
    x = inputs(B=4, dtype=torch.float32, device=device)
    x["a"][:2], x["b"][:2] = 80, -80
    x["a"][2:], x["b"][2:] = -80, 80
    x["q"][0], x["k"][1], x["q_inputs"][0], x["k_inputs"][1] = 0, 0, 0, 0
    got, eager = (run(x, impl=impl) for impl in ("triton", "reference"))
    for name in got:
        torch.testing.assert_close(got[name], eager[name], rtol=1e-5, atol=1e-6)


def arguments(x):
    weights, last = ([x[f"{name}_{kind}"] for name in "qkv"] for kind in ("weight", "inputs"))
    parameters = (x[name] for name in ("A_log", "dt_bias", "norm_weight", "state"))
    arrivals = torch.zeros(x["q"].shape[:2], dtype=torch.int32, device=x["q"].device)
    return [*(x[name] for name in ("q", "k", "v", "a", "b", "gate")), *weights, *last, *parameters, arrivals]


def test_registered_as_a_torch_operator(device):
    from tokenmix_core.ops.fused.gdn_decode_kernel import delta_layer_step_op

    x = inputs(B=1, HV=1, dtype=torch.float32, device=device)
    tests = ("test_schema", "test_faketensor")
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    for given in ((), (slots,)):
        torch.library.opcheck(delta_layer_step_op, (*arguments(x), 0.5, 1.0, 1e-6, *given), test_utils=tests)


def prepared(**options):
    torch.manual_seed(0)
    mixer = GatedDeltaNet(32, impl="triton", **options)
    for module in mixer.modules():
        init_weights_(module, 0.2)
    torch.nn.init.uniform_(mixer.o_norm.weight, 0.5, 1.5)
    return mixer.eval()


# and in which pieces the tokens come
MIXERS = {
    "grouped values, reflecting": (dict(num_heads=1, num_v_heads=2, head_dim=16, allow_neg_eigval=True), [3, 1, 1]),
    "no gate, three taps": (dict(num_heads=2, head_dim=64, expand_v=1.0, output_gate=False, conv_size=3), [1] * 4),
    "cut heads": (dict(num_heads=1, head_dim=48, expand_v=4.0), [1] * 3),
}


@torch.no_grad()
@pytest.mark.parametrize("case", MIXERS)
def test_decoding_by_the_kernel_equals_the_forward_pass(case, device, monkeypatch):
    options, pieces = MIXERS[case]
    mixer = prepared(**options).to(device)
    plain = copy.deepcopy(mixer)
    for module in (plain, plain.q_conv, plain.k_conv, plain.v_conv):
        module.impl = "reference"
    x = torch.randn(2, sum(pieces), 32, generator=torch.Generator().manual_seed(1)).to(device)
    exact = run_mixer(copy.deepcopy(plain).double(), x.double())
    eager, cache = run_in_parts(plain, x, pieces)
    launched = []
    monkeypatch.setattr(
        "tokenmix_core.nn.gated_delta_net.delta_layer_step",
        lambda *args, **options: launched.append(args) or delta_layer_step(*args, **options),
    )
    got, other = run_in_parts(mixer, x, pieces)
    assert len(launched) == pieces.count(1)
    assert_within("outputs", got, exact, eager, floor=1e-6)
    for name, part in other.layers[0].parts.items():
        assert relative_error(part.value, cache.layers[0].parts[name].value) < 1e-5, name
    if device == "cpu":
        assert torch.equal(run_captured(mixer, x, pieces[0])[0], got)


@torch.no_grad()
def test_a_step_compiles_into_one_graph(device):
    mixer = prepared(num_heads=1, head_dim=64, expand_v=1.0).to(device)
    x = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(1)).to(device)
    wanted, cache = run_in_parts(mixer, x, [1, 1])
    compiled = copy.copy(mixer)
    compiled.forward = torch.compile(mixer.forward, fullgraph=True, backend="aot_eager")
    _, other = run_in_parts(mixer, x[:, :1], [1])
    other.begin(2, 1, x.device)
    got = compiled.forward(x[:, 1:], state=other.layers[0])[0]
    torch.testing.assert_close(got, wanted[:, 1:])
    torch.testing.assert_close(other.layers[0].recurrent.value, cache.layers[0].recurrent.value)


MALFORMED = {
    "heads that do not divide": (lambda x: x | {"q": x["q"].repeat(1, 3, 1), "k": x["k"].repeat(1, 3, 1)}, "q_weight"),
    "another token's gate": (lambda x: x | {"gate": x["gate"][:, :1]}, r"gate must have shape \[B, HV, V\]"),
    "one tap": (lambda x: x | {f"{n}_weight": x[f"{n}_weight"][:, :1] for n in "qkv"}, "from 2 to 8, got 1"),
    "inputs of another width": (lambda x: x | {"v_inputs": x["v_inputs"][..., 1:]}, "v_inputs must have shape"),
    "a small state": (lambda x: x | {"state": x["state"][:, :, :, :8].contiguous()}, "must hold heads of 64 × 64"),
    "slots that do not exist": (lambda x: x | {"slots": torch.tensor([0, 2], dtype=torch.int32)}, "the pool's 2 slots"),
    "slots of fewer rows": (lambda x: x | {"slots": torch.zeros(1, dtype=torch.int32)}, r"slots must have shape \[B\]"),
    "a state in bfloat16": (lambda x: x | {"state": x["state"].bfloat16()}, "state must be float32"),
    "a rotated state": (lambda x: x | {"state": x["state"].mT}, "state must be contiguous"),
    "values of another dtype": (lambda x: x | {"v": x["v"].half()}, "must share one dtype"),
    "an unknown implementation": (lambda x: x | {"impl": "cuda"}, "impl must be"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_calls_say_what_was_got_and_expected(case):
    change, message = MALFORMED[case]
    x = change(inputs(dtype=torch.float32))
    with pytest.raises(ValueError, match=message):
        run(x, impl=x.get("impl"), slots=x.get("slots"))


def test_a_state_of_other_sizes_is_refused_by_the_kernel(device):
    x = inputs(dtype=torch.float32, device=device)
    x["state"] = torch.zeros(2, 2, 72, 72, device=device)
    with pytest.raises(ValueError, match="heads of 64, 128 or 256"):
        run(x, impl="triton")


def test_slots_at_odd_distances_are_refused_by_the_kernel(device):
    x = inputs(dtype=torch.float32, device=device)
    written = {name: x[name].clone() for name in WRITTEN}
    written["state"] = torch.zeros(2, 2 * 64 * 64 + 8, device=device)[:, :-8].view(2, 2, 64, 64)
    slots, arrivals = torch.arange(2, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="a multiple of 16 elements apart, got 8200"):
        step(x, written, arrivals, slots=slots, impl="triton")
    assert step(x, written, arrivals, slots=slots - 2, impl="reference").shape == x["v"].shape
