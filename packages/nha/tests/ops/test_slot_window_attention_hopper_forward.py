"""The Hopper forward kernels on a CPU, in the Gluon emulator, against the reference."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from test_slot_window_in_slots import FRESH, RAGGED, SLOTS, assert_unowned_untouched, compared, pool_of, ragged_call

from tokenmix_core.ops.dispatch import GluonForm
from tokenmix_core.testing import gluon_emulator
from tokenmix_nha.ops import SlotWindowState, slot_window_attention, slot_window_attention_prefill
from tokenmix_nha.ops.slot_window import tuning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU")

OP = "tokenmix_nha.ops.slot_window"
CASES = {
    "slots alone, ragged": dict(T=130, window=0),
    "grouped heads": dict(B=2, T=70, HQ=2, window=32),
    "more values than keys": dict(T=100, V=128, window=20),
    "more keys than values": dict(T=100, K=128, window=20),
    "wide window": dict(T=240, window=130, M=32),
    "strong gates": dict(T=150, window=20, gates=2.0),
    "own keys, strong gates": dict(B=2, T=150, HQ=2, window=70, gates=1.0, own_keys=True),
    "segments": dict(T=1050, window=8, M=16),
    "carried state": dict(B=3, T=70, window=40, carried=True),
    "packed, carried state": dict(T=140, window=40, carried=True, cu_seqlens=[0, 0, 70, 71, 140]),
    "packed, carried state, own keys": dict(
        T=140, window=40, carried=True, own_keys=True, cu_seqlens=[0, 0, 70, 71, 140]
    ),
}


@pytest.fixture
def on_hopper(monkeypatch, override):
    """Run the Hopper kernels instead of Triton's, in float32; return the names of those that ran."""
    hopper = gluon_emulator.load("tokenmix_core", "kernels.gluon.hopper")[0]
    monkeypatch.setitem(sys.modules, hopper.__name__, hopper)
    ran = []
    for module in gluon_emulator.load(f"{OP}.hopper", "gates", "states", "forward"):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in ("hopper_slot_states", "hopper_window_outputs"):
            if run := vars(module).get(name):
                monkeypatch.setattr(module, name, lambda *args, name=name, run=run: (ran.append(name), run(*args))[1])
    monkeypatch.setattr(GluonForm, "require", lambda *_: None)
    override(tuning, chunk_size=lambda dtype: 64)
    return ran


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_slots_agree_with_the_reference(on_hopper, case):
    sizes = dict(B=1, HQ=1, K=64, V=64, M=64, gates=0.1, own_keys=False, carried=False, cu_seqlens=None) | CASES[case]
    B, T, HQ, K, V, M, window = (sizes[name] for name in ("B", "T", "HQ", "K", "V", "M", "window"))
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    f = -sizes["gates"] * randn(B, T, 1, M).abs()
    cu = None if sizes["cu_seqlens"] is None else torch.tensor(sizes["cu_seqlens"], dtype=torch.int32)
    N = B if cu is None else len(cu) - 1
    state = None
    if sizes["carried"]:
        length = torch.tensor([(window // 2, window, 3 * window + 1, 0)[n % 4] for n in range(N)], dtype=torch.int32)
        ring_k_slots = randn(N, window, 1, K) if sizes["own_keys"] else None
        ring = randn(N, window, 1, K), randn(N, window, 1, V), -0.1 * randn(N, window, 1, M).abs()
        state = SlotWindowState(randn(N, 1, M, K), randn(N, 1, M, V), *ring, ring_k_slots, length[:, None])
    x = dict(q=randn(B, T, HQ, K), k=randn(B, T, 1, K), v=randn(B, T, 1, V), f=f)
    if sizes["own_keys"]:
        x |= dict(q_slots=randn(B, T, HQ, K), k_slots=randn(B, T, 1, K))
    got, exact = (
        slot_window_attention(**x, window=window, initial_state=state, cu_seqlens=cu, impl=impl)
        for impl in ("gluon", "reference")
    )
    assert set(on_hopper) == {"hopper_slot_states", "hopper_window_outputs"}
    torch.testing.assert_close(got.o, exact.o, rtol=1e-4, atol=1e-4)
    for name in ("slots_k", "slots_v"):
        torch.testing.assert_close(getattr(got[1], name), getattr(exact[1], name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("window", [0, 20, 70])
def test_a_ragged_prefill_in_slots_agrees_with_the_reference(on_hopper, window, own_keys):
    x, state = ragged_call(torch.float32, "cpu", window, own_keys=own_keys, M=32, H=1, HQ=2)
    cu, slots, fresh = torch.tensor(RAGGED, dtype=torch.int32), torch.tensor(SLOTS), torch.tensor(FRESH)
    pools = {impl: pool_of(state) for impl in ("gluon", "reference")}
    o, exact = (
        slot_window_attention_prefill(**x, state=pool, slots=slots, fresh=fresh, cu_seqlens=cu, impl=impl)
        for impl, (pool, _) in pools.items()
    )
    assert set(on_hopper) == {"hopper_slot_states", "hopper_window_outputs"}
    torch.testing.assert_close(o, exact, rtol=1e-4, atol=1e-4)
    found = []
    for pool, memory in pools.values():
        assert_unowned_untouched(memory, pool, [6, 3, 0, 5])
        found.append(compared(pool, [6, 3, 0, 5]))
    for name, true in found[1].items():
        torch.testing.assert_close(found[0][name], true, rtol=1e-4, atol=1e-4)
