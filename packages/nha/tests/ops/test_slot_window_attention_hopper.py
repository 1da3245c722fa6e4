"""Slot-window attention's Hopper kernels on a CPU, in the Gluon emulator, against float64."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from tokenmix_core.kernels.launch.errors import NotCompiled
from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.testing import gluon_emulator
from tokenmix_core.testing.agreement import values_and_gradients
from tokenmix_core.testing.closeness import assert_within
from tokenmix_nha.ops import SlotWindowState, slot_window_attention
from tokenmix_nha.ops.slot_window import hopper, tuning
from tokenmix_nha.ops.slot_window.autograd import slot_window_attention_kernels
from tokenmix_nha.ops.slot_window.plan import GLUON

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

KERNELS = {
    "states": "hopper_slot_states_kernel",
    "forward": "hopper_window_forward_kernel",
    "backward_queries": "hopper_backward_queries_kernel",
    "backward_keys": "hopper_backward_keys_kernel",
    "backward_gates": "hopper_backward_gates_kernel",
    "backward_tokens": "hopper_backward_tokens_kernel",
}
STATE = ("slots_k", "slots_v", "ring_k", "ring_v", "ring_f", "ring_k_slots")


@pytest.fixture(scope="module")
def kernels():
    return gluon_emulator.load(hopper.__name__, *KERNELS, shared=("tokenmix_core.kernels.gluon.hopper",))


@pytest.fixture
def on_hopper(kernels, monkeypatch, override):
    """Emulate the kernels for `impl="gluon"`, with the tile sizes of 16-bit inputs; return the names of those run."""
    ran = set()

    class Counted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            ran.add(self.name)
            return self.kernel[grid]

    for name, module in zip(KERNELS, kernels, strict=True):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        kernel = KERNELS[name]
        monkeypatch.setattr(module, kernel, Counted(name, getattr(module, kernel)))
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    override(tuning, chunk_size=lambda dtype: 64)
    slot_tile = tuning.slot_tile
    override(tuning, slot_tile=lambda slots, dtype, *shape: slot_tile(slots, torch.bfloat16, *shape))
    return ran


def inputs(T, K, V, M, strong=False, own_keys=False, group=1):
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator)
    x = {"q": randn(1, T, group, K), "k": randn(1, T, 1, K), "v": randn(1, T, 1, V)}
    x["f"] = torch.nn.functional.logsigmoid(2 * randn(1, T, 1, M)) / (1 if strong else 16)
    return x | ({"q_slots": randn(1, T, group, K), "k_slots": randn(1, T, 1, K)} if own_keys else {})


def check(x, on_hopper, length=None, **options):
    """Check that errors against the eager form in float64 are at most twice those of the Triton kernels."""

    def run(impl):
        def o(**x):
            old = [x.pop(name) for name in STATE if name in x]
            state = SlotWindowState(*old, *[None] * (len(STATE) - len(old)), length) if old else None
            return Outputs(o=slot_window_attention(**x, **options, initial_state=state, impl=impl).o)

        return o

    plain, upstream = values_and_gradients(run("triton"), x)
    exact, _ = values_and_gradients(run("reference"), x, upstream, dtype=torch.float64)
    assert not on_hopper
    got, _ = values_and_gradients(run("gluon"), x, upstream)
    for name in exact:
        assert_within(name, got[name], exact[name], plain[name])
    narrow = x["f"].shape[-1] <= 32 and "q_slots" not in x and x["q"].shape[2] == x["k"].shape[2]
    assert on_hopper == set(KERNELS) - ({"backward_keys", "backward_gates"} if narrow else {"backward_tokens"})


class Outputs(dict):
    def _asdict(self):
        return dict(self)


CASES = {
    "window": (dict(T=150, K=64, V=64, M=64), 32),
    "wide window, fewer slots": (dict(T=140, K=64, V=128, M=32), 70),
    "slots alone, strong chunks": (dict(T=130, K=64, V=64, M=16, strong=True), 0),
    "own keys": (dict(T=150, K=128, V=64, M=64, own_keys=True), 40),
    "own keys, wide window": (dict(T=140, K=64, V=128, M=32, own_keys=True), 70),
    "own keys, slots alone": (dict(T=130, K=64, V=64, M=16, own_keys=True), 0),
    "grouped heads, own keys": (dict(T=100, K=64, V=64, M=64, own_keys=True, group=3), 32),
    "grouped heads, wide window": (dict(T=140, K=64, V=128, M=64, group=2), 70),
    "grouped heads, fewer slots": (dict(T=130, K=64, V=64, M=32, group=2), 20),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_agree_with_the_reference(case, on_hopper):
    sizes, window = CASES[case]
    check(inputs(**sizes), on_hopper, window=window)


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("carried", [40, 50])
def test_packed_sequences_with_carried_windows(carried, own_keys, on_hopper):
    N, W = 5, carried
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    slots, ring = (randn(N, 1, 16, 64) for _ in range(2)), (randn(N, W, 1, 64) for _ in range(2))
    state = (*slots, *ring, -randn(N, W, 1, 16).abs(), *[randn(N, W, 1, 64)] * own_keys)
    length = torch.tensor([W // 2, W, 3 * W + 1, 0, W // 2], dtype=torch.int32)[:, None]
    boundaries = torch.tensor([0, 0, 9, 80, 80, 100], dtype=torch.int32)
    x = inputs(100, 64, 64, 16, own_keys=own_keys) | dict(zip(STATE, state, strict=False))
    check(x, on_hopper, length, window=40, cu_seqlens=boundaries)


def test_triton_gradients_follow_gluon_outputs_if_the_gluon_backward_fails_to_compile(on_hopper, monkeypatch):
    """Triton's backward pass reads the activations that the Gluon forward pass has saved."""

    class Fails:
        def __getitem__(self, grid):
            raise NotCompiled("hopper_backward_queries_kernel does not compile", f"{hopper.__name__}.backward_queries")

    module = sys.modules[f"{hopper.__name__}.backward_queries"]
    monkeypatch.setattr(module, KERNELS["backward_queries"], Fails())
    monkeypatch.setattr(GluonForm, "limit", lambda *_: None)
    monkeypatch.setattr(GLUON, "failure", None)
    monkeypatch.setattr(GLUON, "_warned", False)
    x = inputs(T=150, K=64, V=64, M=64)

    def run(impl):
        leaves = [t.clone().requires_grad_() for t in x.values()]
        o, *_ = slot_window_attention_kernels(*leaves, *[None] * 6, 0, 32, 0.1, impl)
        return o, *torch.autograd.grad(o.square().sum(), leaves)

    expected = run("triton")
    assert not on_hopper
    with pytest.warns(UserWarning, match="slot_window_attention: .*backward_queries_kernel does not compile"):
        got = run(None)
    assert on_hopper == {"states", "forward"}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
