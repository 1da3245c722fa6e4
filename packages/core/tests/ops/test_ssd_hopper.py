"""Test SSD's steps for Hopper on a CPU, by the Gluon emulator, against float64."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tokenmix_core.ops import chunk_ssd, ssd_prefill, ssd_step
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.ops.ssd import recurrent, tuning
from tokenmix_core.testing import gluon_emulator
from tokenmix_core.testing.agreement import assert_agrees
from tokenmix_core.testing.closeness import assert_within, relative_error
from tokenmix_core.testing.slot_contract import padded_rows, prefill_in_slots, step_in_slots

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

# shapes, heads a program that makes gradients, columns of one that makes outputs
CASES = {
    "ragged": (dict(B=2, T=70, G=2, HV=2), 1, 64, {}),
    "packed": (dict(B=1, T=130, G=1, HV=2, N=4), 2, 64, {"cu_seqlens": [0, 0, 1, 64, 130]}),
    "more keys than values": (dict(B=1, T=66, G=1, HV=4, K=128, N=1), 2, 64, {}),
    "more values than keys": (dict(B=1, T=66, G=1, HV=2, V=128), 1, 128, {}),
    "wide heads": (dict(B=1, T=66, G=1, HV=2, K=128, V=128), 1, 64, {}),
    "keys in two parts": (dict(B=1, T=130, G=1, HV=2, K=256, V=128, N=1, steps=True), 1, 128, {}),
    "steps and a skip": (dict(B=2, T=130, G=1, HV=2, N=2, steps=True), 1, 64, {}),
    "heads of a group, steps and a skip": (dict(B=1, T=130, G=1, HV=4, N=1, steps=True), 4, 64, {}),
    "packed, steps and a skip": (
        dict(B=1, T=130, G=1, HV=4, N=4, steps=True),
        2,
        64,
        {"cu_seqlens": [0, 0, 1, 64, 130]},
    ),
    "more keys than values, steps and a skip": (dict(B=1, T=66, G=1, HV=1, K=128, steps=True), 1, 64, {}),
}
STEPS = ("forward", "gradients", "backward_scan")


@pytest.fixture(scope="module")
def steps():
    """The modules of the steps, by what they launch."""
    return gluon_emulator.load("tokenmix_core", *(f"ops.ssd.hopper.{name}" for name in STEPS))


@pytest.fixture
def on_hopper(steps, monkeypatch):
    """Run these steps instead of Triton's, and return the names of those that ran."""
    ran = set()

    def note(name, run, *args, **options):
        ran.add(name)
        return run(*args, **options)

    for name, module in zip(STEPS, steps, strict=True):
        launcher = f"hopper_{name}"
        emulated = SimpleNamespace(**{launcher: partial(note, name, getattr(module, launcher))})
        monkeypatch.setitem(sys.modules, module.__name__, emulated)
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    return ran


def inputs(B, T, G, HV, K=64, V=64, N=None, steps=False):
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator)
    x = {"q": randn(B, T, G, K) / K**0.5, "k": randn(B, T, G, K), "v": randn(B, T, HV, V)}
    x["g"] = -0.2 * torch.rand(B, T, HV, generator=generator)
    if steps:
        x |= {"dt": 0.1 + torch.rand(B, T, HV, generator=generator), "D": randn(HV)}
    return x | ({"initial_state": randn(N, HV, K, V)} if N else {})


def plan_with(override, heads, columns, segment, scans, lookback=0):
    """Let every call use the shape's plan with these steps."""
    original = tuning.ssd_plan

    def plan(*shape):
        plan = original(*shape)
        forward = plan.forward._replace(hopper=columns, lookback=lookback)
        gradients = plan.gradients._replace(hopper=tuning.SSDHopper(heads, 4), scans=scans)
        return plan._replace(forward=forward, gradients=gradients, segment=segment)

    override(tuning, ssd_plan=plan)


@pytest.mark.parametrize("segment", [0, 64], ids=["whole", "segments"])
@pytest.mark.parametrize("scans", [False, True], ids=["chunks", "a reverse scan"])
@pytest.mark.parametrize("case", CASES)
def test_steps_agree_with_the_reference(case, scans, segment, on_hopper, override):
    shape, heads, columns, options = CASES[case]
    plan_with(override, heads, columns, segment, scans)
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor(options["cu_seqlens"], dtype=torch.int32)}
    ssd = partial(chunk_ssd, scale=0.7, **options)
    assert_agrees(partial(ssd, impl="gluon"), partial(ssd, impl="reference"), inputs(**shape))
    assert on_hopper == {"forward", "backward_scan" if scans else "gradients"}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "steps and a skip"])
def test_segments_that_look_back_agree_with_the_reference(weighted, on_hopper, override):
    plan_with(override, 1, 64, 64, False, lookback=128)
    x = inputs(B=2, T=200, G=1, HV=2, N=2, steps=weighted)
    ssd = partial(chunk_ssd, scale=0.7)
    assert_agrees(partial(ssd, impl="gluon"), partial(ssd, impl="reference"), x)
    assert on_hopper == {"forward", "gradients"}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "steps and a skip"])
@pytest.mark.parametrize("tile", tuning.STATE_STEPS.values(), ids=str)
def test_one_token(tile, weighted, monkeypatch, override):
    (module,) = gluon_emulator.load("tokenmix_core", "ops.ssd.hopper.step")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    monkeypatch.setattr(recurrent, "ssd_recurrent_kernel", None)
    override(tuning, STATE_STEPS={0: tile})
    x = inputs(B=3, T=1, G=2, HV=4, K=128, N=3, steps=weighted)
    x = {name: value if name in ("initial_state", "D") else value.squeeze(1) for name, value in x.items()}
    results = []
    for dtype, impl in ((torch.float32, "gluon"), (torch.float64, "reference"), (torch.float32, "reference")):
        token = {name: value.to(dtype, copy=True) for name, value in x.items()}
        state = token.pop("initial_state")
        results.append((ssd_step(**token, state=state, scale=0.7, impl=impl), state))
    for name, *values in zip(("o", "state"), *results, strict=True):
        assert_within(name, *values)


@pytest.mark.parametrize("segment", [0, 64], ids=["whole", "segments"])
@pytest.mark.parametrize(("K", "dtype"), [(64, torch.float32), (256, torch.float16)], ids=["one part", "two parts"])
def test_a_prefill_in_slots_equals_a_call_on_states(K, dtype, segment, on_hopper, override):
    plan_with(override, 1, 64, segment, False)
    x = inputs(B=1, T=203, G=1, HV=2, K=K, N=5, steps=True)
    state, x["cu_seqlens"] = x.pop("initial_state").to(dtype), torch.tensor([0, 0, 1, 64, 200, 203], dtype=torch.int32)
    before = state.float()
    before[:2] = 0
    wanted = chunk_ssd(**x, initial_state=before, impl="gluon")
    o, found = prefill_in_slots(ssd_prefill, x, state, torch.int32, "gluon")
    assert torch.equal(o, wanted.o)
    # if there are segments, another kernel computes the final states than in the call on states
    assert relative_error(found, wanted.final_state[1:]) < (1e-5 if dtype == torch.float32 else 5e-4)
    assert on_hopper == {"forward"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_token_in_slots(dtype, monkeypatch):
    (module,) = gluon_emulator.load("tokenmix_core", "ops.ssd.hopper.step")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    monkeypatch.setattr(recurrent, "ssd_recurrent_kernel", None)
    x = inputs(B=2, T=1, G=2, HV=4, K=128, N=2, steps=True)
    x = {name: value if name in ("initial_state", "D") else value.squeeze(1) for name, value in x.items()}
    step = partial(ssd_step, scale=0.7)
    state = x.pop("initial_state").float()
    rows = {name: value.float() if name == "D" else padded_rows(value.float()) for name, value in x.items()}
    true, exact = {name: value.double() for name, value in x.items()}, state.to(dtype).double()
    o = step(**true, state=exact, impl="reference")
    got, eager = (step_in_slots(step, rows, state, dtype, impl) for impl in ("gluon", "reference"))
    for name, *values in zip(("o", "state"), got, (o, exact), eager, strict=True):
        assert_within(name, *values)
