"""The gated delta rule's steps for Hopper on a CPU, run by the Gluon emulator, against float64."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tokenmix_core.ops import chunk_gated_delta_rule, gated_delta_rule_prefill, gated_delta_rule_step
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.gated_delta_rule import autograd, hopper, plan, rank_split, recurrent, tuning
from tokenmix_core.ops.gated_delta_rule.types import Inputs
from tokenmix_core.testing import gluon_emulator
from tokenmix_core.testing.agreement import RoundedProducts, assert_agrees, granted_to_sums, values_and_gradients
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.slot_contract import padded_rows, prefill_in_slots, step_in_slots

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

STEPS = ("prepare", "forward", "backward_state", "backward_chunk", "backward")
TILED = ("forward_tiled", "backward_state_tiled", "backward_chunk_tiled")


@pytest.fixture(scope="module")
def steps():
    return gluon_emulator.load(hopper.__name__, *STEPS, *TILED)


@pytest.fixture
def on_hopper(steps, monkeypatch):
    """Run these steps instead of Triton's, and return the names of those that ran."""
    ran = set()

    def run(name, step, *args, **options):
        ran.add(name)
        step(*args, **options)

    for name, module in zip((*STEPS, *TILED), steps, strict=True):
        step = getattr(module, name)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(hopper, name, module, raising=False)
        monkeypatch.setattr(module, name, partial(run, name, step))
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    monkeypatch.setattr(plan, "_BUSY", 0)
    return ran


def inputs(B, T, H, HV, K, V=None, N=None, decay=0.3):
    V = V or K
    generator = torch.Generator().manual_seed(0)
    randn, rand = partial(torch.randn, generator=generator), partial(torch.rand, generator=generator)
    x = {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, HV, V)}
    x |= {"g": -decay * rand(B, T, HV), "beta": 2 * rand(B, T, HV)}
    return x | ({"initial_state": randn(N, HV, K, V)} if N else {})


def check(x, half=False, **options):
    options = {"qk_l2norm": True} | options
    form = partial(chunk_gated_delta_rule, **options)
    function, reference = partial(form, impl="gluon"), partial(form, impl="reference")
    if x["q"].shape[-1] == x["v"].shape[-1] == 64 and not half:
        assert_agrees(function, reference, x, floor=granted_to_sums("dg"))
        return
    # other heads take k̂ · dk̂ as a difference of two sums: nothing to 16 bits, while float32 loses two of its own
    x = x | {name: x[name].half() for name in "qkv"}
    got, upstream = values_and_gradients(function, x)
    exact, _ = values_and_gradients(reference, x, upstream, dtype=torch.float64)
    with RoundedProducts(torch.float16):
        eager, _ = values_and_gradients(reference, x, upstream)
    for name, value in got.items():
        assert_within(name, value, exact[name], eager[name], floor=torch.finfo(torch.float16).eps / 2)


@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 64)])
def test_small_gradients_in_float16(K, V, on_hopper):
    # operands include norms of q and k, small for wide heads: without a factor float16 would underflow
    x = {name: value.half() if name in "qkv" else value for name, value in inputs(1, 70, 1, 1, K, V, N=1).items()}
    form = partial(chunk_gated_delta_rule, qk_l2norm=True)
    function, reference = partial(form, impl="gluon"), partial(form, impl="reference")
    small = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1)).half() / 256
    upstream = {"o": small, "final_state": torch.zeros(1, 1, K, V)}
    got, _ = values_and_gradients(function, x, upstream)
    exact, _ = values_and_gradients(reference, x, upstream, dtype=torch.float64)
    with RoundedProducts(torch.float16):
        eager, _ = values_and_gradients(reference, x, upstream)
    for name in ("dg", "dbeta", "dinitial_state"):
        assert_within(name, got[name], exact[name], eager[name], floor=torch.finfo(torch.float16).eps / 2)


@pytest.mark.parametrize(("K", "V", "least"), [(64, 64, 0), (128, 128, 0), (128, 128, 9), (128, 64, 0), (256, 64, 0)])
def test_decays_of_a_state_are_summed_before_its_gradient_is_rounded(K, V, least, on_hopper, monkeypatch):
    monkeypatch.setattr(plan, "_BUSY", least)
    x = {name: value.half() if name in "qkv" else value for name, value in inputs(1, 40, 1, 1, K, V, N=1).items()}
    x["beta"] *= 0
    if K == V:
        # where S is kept in 16 bits alone
        x["initial_state"] = x["initial_state"].half().float()
    form = partial(chunk_gated_delta_rule, qk_l2norm=True)
    # a separate draw: dg is a sum of terms with this gradient, which cancel for some draws
    final_state = torch.randn(1, 1, K, V, generator=torch.Generator().manual_seed(1))
    upstream = {"o": torch.zeros_like(x["v"]), "final_state": final_state}
    got, _ = values_and_gradients(partial(form, impl="gluon"), x, upstream)
    exact, _ = values_and_gradients(partial(form, impl="reference"), x, upstream, dtype=torch.float64)
    assert relative_error(got["dg"], exact["dg"]) < 1e-5


@pytest.mark.parametrize("D", [64, 128])
def test_packed_sequences_with_grouped_heads_and_states(D, on_hopper):
    x = inputs(1, 130, 1, 2, D, N=4)
    check(x, cu_seqlens=torch.tensor([0, 0, 1, 64, 130], dtype=torch.int32))
    # heads of 128 have steps of their own
    assert on_hopper == {"prepare"} | ({"forward", "backward"} if D == 128 else {"backward_state", "backward_chunk"})


@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64), (64, 256), (256, 128)])
def test_heads_whose_keys_and_values_differ_in_size(K, V, on_hopper):
    x = inputs(1, 130, 1, 2, K, V, N=4)
    check(x, cu_seqlens=torch.tensor([0, 0, 1, 64, 130], dtype=torch.int32))
    chunk = "backward_chunk" if max(K, V) == 128 else "backward_chunk_tiled"
    state = "backward_state" if V == 128 and K == 64 else "backward_state_tiled"
    assert on_hopper == {"prepare", state, chunk} | ({"forward_tiled"} if K > 64 else set())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_values_of_256_are_two_heads_of_128(qk_l2norm, gated, on_hopper):
    x = inputs(1, 130, 1, 2, 128, 256, N=4)
    if not qk_l2norm:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if gated:
        x["writes"] = torch.rand(1, 6, 2)
    check(x, cu_seqlens=torch.tensor([0, 0, 1, 64, 130], dtype=torch.int32), qk_l2norm=qk_l2norm)
    steps = {"backward"} if qk_l2norm and not gated else {"backward_state"}
    assert on_hopper == {"prepare", "forward"} | steps | ({"backward_chunk"} if qk_l2norm and gated else set())


def test_traced_calls_know_the_shapes_of_split_heads(on_hopper):
    x = inputs(1, 70, 1, 2, 128, 256, N=1) | {
        "writes": None, "cu_seqlens": None, "scale": 0.1, "qk_l2norm": True, "impl": "gluon",
    }  # fmt: skip
    x |= {name: x[name].half() for name in "qkv"}
    forward = autograd.chunk_op(**x)
    given = {"do": torch.zeros_like(x["v"]), "dfinal_state": None, "inverse": forward[2], "gates": forward[3]} | x
    backward = autograd.backward_op(**given)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        faked = {name: fake.from_tensor(t) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        shapes = [autograd.chunk_op(**{name: faked[name] for name in x}), autograd.backward_op(**faked)]
    for found, real in zip(shapes, (forward, backward), strict=True):
        assert [(y.shape, y.dtype) for y in found] == [(y.shape, y.dtype) for y in real]


def test_heads_of_256_without_norm_or_states(on_hopper):
    x = inputs(2, 70, 1, 1, 256)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    check(x, qk_l2norm=False, scale=0.3)
    # sums that cancel in dg are too coarse there for keys without the norm
    assert on_hopper == {"prepare", "forward_tiled", "backward_state_tiled"}


@pytest.mark.parametrize(("K", "V"), [(64, 128), (128, 64)])
@pytest.mark.parametrize("decay", [0.5, 0.001])
def test_segments_of_heads_whose_keys_and_values_differ_in_size(decay, K, V, on_hopper, override):
    override(tuning, segment_tokens=lambda *shape: 128)
    x = inputs(1, 300, 1, 2, K, V, N=3, decay=decay)
    check(x, cu_seqlens=torch.tensor([0, 40, 40, 300], dtype=torch.int32))


def test_few_programs_take_two_steps(on_hopper, monkeypatch):
    monkeypatch.setattr(plan, "_BUSY", 2)
    check(inputs(1, 70, 1, 1, 128))
    assert on_hopper == set(STEPS) - {"backward"}


# of the first 256 tokens and of the rest: over 128 tokens the decay is negligible, or near 1
DECAYS = [(0.5, 0.5), (0.001, 0.001), (0.5, 0.001), (0.001, 0.5)]
GATED = {
    "heads of 128": (dict(K=128), {"forward", "backward_state", "backward_chunk"}),
    "heads of 64": (dict(K=64), {"backward_state", "backward_chunk"}),
    "wide keys": (dict(K=128, V=64), {"forward_tiled", "backward_state_tiled", "backward_chunk"}),
    "wide values": (dict(K=64, V=256), {"backward_state_tiled", "backward_chunk_tiled"}),
    "without norm": (dict(K=128, norm=False), {"forward", "backward_state"}),
}


@pytest.mark.parametrize(("case", "decay", "signed"), [
    *((case, 0.5, True) for case in GATED), ("heads of 128", 0.5, False), ("wide keys", 0.001, False),
])  # fmt: skip
def test_gated_writes(case, decay, signed, on_hopper, override):
    # scans of segments start after negligible chunks if the factors let decays bound the state
    override(tuning, segment_tokens=lambda *shape: 128)
    sizes, ran = GATED[case]
    sizes = dict(sizes)
    norm = sizes.pop("norm", True)
    x = inputs(1, 230, 1, 1, N=3, decay=decay, **sizes)
    if not norm:
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    generator = torch.Generator().manual_seed(2)
    x["writes"] = (torch.randn if signed else torch.rand)(1, 230 // 64 + 3, 1, generator=generator)
    check(x, cu_seqlens=torch.tensor([0, 20, 20, 230], dtype=torch.int32), qk_l2norm=norm)
    assert on_hopper == {"prepare"} | ran


# decays do not bound writes with factors outside [0, 1]
@pytest.mark.parametrize(("decay", "then", "beyond", "forward"), [
    *((*decays, beyond, 128) for decays in DECAYS for beyond in ("no factor", "one factor")),
    (0.5, 0.5, "all factors", 128), (0.001, 0.5, "all factors", 128),
    # without segments of the forward pass there are no M
    (0.5, 0.5, "no factor", 0), (0.5, 0.5, "one factor", 0), (0.5, 0.001, "one factor", 0),
])  # fmt: skip
def test_segments_with_gated_writes(decay, then, beyond, forward, on_hopper, override):
    override(tuning, segment_tokens=lambda *shape: forward)
    override(tuning, backward_segment_tokens=lambda *shape: 128)
    x = inputs(1, 540, 1, 1, 64, N=3, decay=decay)
    x["g"][:, 256:] *= then / decay
    x["writes"] = torch.rand(1, 540 // 64 + 3, 1, generator=torch.Generator().manual_seed(2))
    if beyond == "one factor":
        x["writes"][:, 5] = -3.0
    elif beyond == "all factors":
        x["writes"] = 1.5 - 3 * x["writes"]
    check(x, half=True, cu_seqlens=torch.tensor([0, 40, 40, 540], dtype=torch.int32))
    assert on_hopper == {"prepare", "backward_state", "backward_chunk"}


def test_writes_of_several_chunks_are_refused(on_hopper, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("tokenmix_core.ops.dispatch.device_limit", lambda device: None)
    x = {name: value.half() if name in "qkv" else value for name, value in inputs(1, 200, 1, 1, 64).items()}
    with pytest.raises(ValueError, match="takes `writes` for chunks of 64 tokens alone"):
        chunk_gated_delta_rule(**x, writes=torch.ones(1, 2, 1), write_chunk=128, impl="gluon")


@pytest.mark.parametrize("D", [64, 128])
def test_without_norm_or_states(D, on_hopper):
    x = inputs(2, 70, 1, 1, D)
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    check(x, qk_l2norm=False, scale=0.3)


@pytest.mark.parametrize(("decay", "then"), DECAYS)
@pytest.mark.parametrize("boundaries", [None, [0, 40, 40, 540]])
def test_segments(decay, then, boundaries, on_hopper, override):
    override(tuning, segment_tokens=lambda *shape: 128)
    sequences = 1 if boundaries is None else len(boundaries) - 1
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32)
    x = inputs(1, 540, 1, 1, 64, N=sequences, decay=decay)
    x["g"][:, 256:] *= then / decay
    check(x, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("segment", [0, 128])
def test_saved_states_give_the_gradients_of_recomputed_states(segment, on_hopper, override):
    override(tuning, segment_tokens=lambda *shape: segment)
    x = inputs(1, 200, 1, 2, 128, N=3)
    x = {name: (value.half() if name in "qkv" else value).requires_grad_() for name, value in x.items()}
    cu_seqlens = torch.tensor([0, 40, 40, 200], dtype=torch.int32)
    gradients, kept = [], []
    for size in (0, 1 << 20):
        override(tuning, MOST_SAVED_BYTES=size)
        output = chunk_gated_delta_rule(**x, cu_seqlens=cu_seqlens, qk_l2norm=True, impl="gluon")
        kept.append(output.o.grad_fn.saved_tensors[8].numel())
        upstream = [value.detach().cos() for value in output]
        # saved tensors serve a second backward pass
        for again in (True, False):
            gradients.append(torch.autograd.grad(output, list(x.values()), upstream, retain_graph=again))
    assert kept[1] > kept[0]
    assert all(torch.equal(a, b) for others in gradients[1:] for a, b in zip(gradients[0], others, strict=True))


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("decay", [0.5, 0.001])
def test_segments_of_warp_specialised_heads(decay, columns, on_hopper, override):
    override(tuning, segment_tokens=lambda *shape: 128)
    override(tuning, forward_columns=lambda *programs: columns)
    x = inputs(1, 300, 1, 2, 128, N=3, decay=decay)
    check(x, cu_seqlens=torch.tensor([0, 40, 40, 300], dtype=torch.int32))
    assert on_hopper >= {"forward", "backward"}


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("V", [64, 128])
def test_one_token(V, qk_l2norm, monkeypatch, override):
    (module,) = gluon_emulator.load(hopper.__name__, "step")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    monkeypatch.setattr(recurrent, "recurrent_kernel", None)
    x = {name: value.squeeze(1) for name, value in inputs(3, 1, 1, 2, 128, V, N=3).items()}
    x["k"] *= 128**-0.5
    for tile in tuning.STATE_STEPS.values():
        override(tuning, STATE_STEPS={0: tile})
        results = []
        for dtype, impl in ((torch.float32, "gluon"), (torch.float64, "reference"), (torch.float32, "reference")):
            token = {name: value.to(dtype, copy=True) for name, value in x.items()}
            state = token.pop("initial_state")
            results.append((gated_delta_rule_step(**token, state=state, qk_l2norm=qk_l2norm, impl=impl), state))
        for name, *values in zip(("o", "state"), *results, strict=True):
            assert_within(name, *values)


@pytest.mark.parametrize(
    ("K", "V", "segment", "dtype"),
    [
        (128, 128, 0, torch.float32),
        (128, 128, 64, torch.float16),
        (128, 256, 64, torch.float32),
        (256, 128, 64, torch.float16),
        (256, 128, 0, torch.float32),
    ],
)
def test_a_prefill_in_slots_equals_a_call_on_states(K, V, segment, dtype, on_hopper, override):
    if segment:
        override(tuning, segment_tokens=lambda *_: segment)
    x = {name: value.half() if name in "qkv" else value for name, value in inputs(1, 203, 1, 2, K, V, N=5).items()}
    state, rest = x.pop("initial_state").to(dtype), {"qk_l2norm": True}
    x["cu_seqlens"] = torch.tensor([0, 0, 1, 64, 200, 203], dtype=torch.int32)
    before = state.float()
    before[:2] = 0
    wanted = chunk_gated_delta_rule(**x, **rest, initial_state=before, impl="gluon")
    o, found = prefill_in_slots(gated_delta_rule_prefill, x | rest, state, torch.int64, "gluon")
    assert torch.equal(o, wanted.o)
    assert torch.equal(found, wanted.final_state[1:].to(dtype))
    assert on_hopper == {"prepare", "forward" if K == 128 else "forward_tiled"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_token_in_slots(dtype, monkeypatch):
    (module,) = gluon_emulator.load(hopper.__name__, "step")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    monkeypatch.setattr(recurrent, "recurrent_kernel", None)
    x = {name: value.squeeze(1) for name, value in inputs(2, 1, 1, 2, 128, 64, N=2).items()}
    x["k"] *= 128**-0.5
    step = partial(gated_delta_rule_step, qk_l2norm=True)
    state = x.pop("initial_state").float()
    rows = {name: value.float() if name == "D" else padded_rows(value.float()) for name, value in x.items()}
    true, exact = {name: value.double() for name, value in x.items()}, state.to(dtype).double()
    o = step(**true, state=exact, impl="reference")
    got, eager = (step_in_slots(step, rows, state, dtype, impl) for impl in ("gluon", "reference"))
    for name, *values in zip(("o", "state"), got, (o, exact), eager, strict=True):
        assert_within(name, *values)


@pytest.mark.parametrize("decay", [0.01, 2.0])
@pytest.mark.parametrize("D", [64, 128])
def test_local_gradients_of_rows_are_those_of_their_initial_states(D, decay, on_hopper):
    # at the greater decay only the first of three chunks contributes
    x = inputs(2, 192, 1, 2, D, N=2, decay=decay)
    x |= {name: x[name].half() for name in "qkv"}
    do = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1)).half()
    given = Inputs(**x, writes=None, cu_seqlens=None, scale=0.3, qk_l2norm=True, impl="gluon")
    maps = rank_split.RowMaps(*rank_split.row_maps(*given))
    found = rank_split.local_gradients(do, maps.inverse, maps.gates, *given)
    assert "backward_state" not in on_hopper, "whole reverse scans ran"

    wide = {name: t.double() for name, t in x.items()}
    state = wide["initial_state"].requires_grad_()
    o = chunk_gated_delta_rule(**wide, scale=0.3, qk_l2norm=True, impl="reference").o
    (expected,) = torch.autograd.grad(o, state, do.double())
    assert relative_error(found, expected) < 2e-3
