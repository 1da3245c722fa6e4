"""Prefills and steps in slots of a pool: they equal calls on states, and touch no other slot."""

from __future__ import annotations

import pytest
import torch
from test_slot_window_attention import carried, gate_rounding, inputs, scans_of_segments, token

from tokenmix_core.testing.closeness import assert_within
from tokenmix_nha.ops import (
    SlotWindowState,
    slot_window_attention,
    slot_window_attention_prefill,
    slot_window_attention_step,
)
from tokenmix_nha.ops.slot_window import tuning

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
# the interpreter has no bfloat16
FORMS = [("triton", torch.float32)]
FORMS += [("triton", torch.bfloat16)] * ON_GPU + [("gluon", torch.bfloat16)] * ON_HOPPER
# the slots of five sequences, in a pool of eight; the first sequence has none, and the second is fresh
SLOTS, FRESH = (-1, 6, 3, 0, 5), (False, True, False, False, False)
# kernels have chunks of 16 tokens in float32, and of 64 in 16 bits
RAGGED = [n * (7 if ON_GPU else 1) for n in (0, 9, 27, 27, 61, 66)]
KERNELS = dict(HQ=2, H=1, K=64, V=64, M=16)
CASES = {
    "a window": (dict(window=7), None),
    "grouped heads, own keys": (dict(window=20, HQ=4, H=2, own_keys=True), None),
    "no window": (dict(window=0), None),
    "a window of one token": (dict(window=1), None),
    "a window beyond all prompts": (dict(window=70), None),
    "hard gates": (dict(window=5, gates="hard"), None),
    "scans of segments": (dict(window=5, V=128), scans_of_segments),
    "tiles wider than the slots": (dict(window=9), lambda override: override(tuning, slot_tile=lambda n, *_: 2 * n)),
}


def pool_of(state: SlotWindowState, size: int = 8) -> tuple[SlotWindowState, list[torch.Tensor]]:
    """Return a pool with the states of the last three sequences in their slots, and the memory of its tensors.

    All other floating-point memory is NaN; other lengths are −9.
    """
    memory, pools = [], []
    for x in state:
        if x is None:
            pools.append(None)
            continue
        elements = x[0].numel()
        # the distance between slots exceeds their size
        held = torch.full((size, elements + 16), torch.nan if x.is_floating_point() else -9, dtype=x.dtype)
        held = held.to(x.device)
        pool = held[:, :elements].view(size, *x.shape[1:])
        pool[list(SLOTS[2:])] = x[2:]
        memory.append(held)
        pools.append(pool)
    return SlotWindowState(*pools), memory


def assert_unowned_untouched(memory: list[torch.Tensor], pool: SlotWindowState, owned: list[int]) -> None:
    """Assert that the pool's owned slots are finite, and that all other memory is as `pool_of` left it."""
    tensors = [x for x in pool if x is not None]
    for held, x in zip(memory, tensors, strict=True):
        free = [i for i in range(len(held)) if i not in owned]
        elements = x[0].numel()
        for rest in (held[free], held[:, elements:]):
            assert (rest.isnan() if rest.is_floating_point() else rest == -9).all()
        assert held[owned, :elements].isfinite().all()


def ragged_call(dtype, device, window, gates="mixed", own_keys=False, **sizes):
    """Return the tensors of a packed call of five sequences, and states of which two are empty."""
    sizes = KERNELS | sizes
    x = inputs(B=1, T=RAGGED[-1] + 3, gates=gates, own_keys=own_keys, dtype=dtype, device=device, **sizes)
    H, K, V, M = (sizes[name] for name in "HKVM")
    old, length = carried(5, H, K, V, M, window, own_keys, dtype=dtype, device=device)
    tensors = {name.removeprefix("ring_") if name != "ring_k_slots" else "k_slots": y for name, y in old.items()}
    state = SlotWindowState(**{"k_slots": None} | tensors, length=length)
    for y in state:
        if y is not None:
            y[:2] = 0
    return x, state


def exactly(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def compared(state: SlotWindowState, kept: list[int]) -> dict[str, torch.Tensor]:
    """Return the slots, and the tokens of the ring buffers, oldest first; unused entries become 0."""
    found = {"slots_k": state.slots_k[kept], "slots_v": state.slots_v[kept]}
    count = state.length[:, :1].clamp(max=state.window)
    used = torch.arange(state.window, device=count.device) < count
    for name, x in zip(("k", "v", "f", "k_slots"), state.unrolled(), strict=True):
        if x is not None and state.window:
            found[name] = x.masked_fill(~used[..., None, None], 0)[kept]
    return found


@pytest.mark.operation
@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("case", CASES)
def test_a_ragged_prefill_in_slots_equals_a_call_on_states(case, index, form, dtype, device, override):
    sizes, patch = CASES[case]
    if patch is not None:
        patch(override)
    x, state = ragged_call(dtype, device, **sizes)
    cu = torch.tensor(RAGGED, dtype=torch.int32, device=device)
    exact = {name: exactly(y) for name, y in x.items()}
    before = SlotWindowState._make(map(exactly, state))
    options = {"cu_seqlens": cu, "scale": 0.2}
    window = sizes["window"]
    wanted_o, wanted = slot_window_attention(**exact, window=window, initial_state=before, impl="reference", **options)
    slots = torch.tensor(SLOTS, dtype=index, device=device)
    results = []
    for impl in (form, "reference"):
        pool, memory = pool_of(state)
        fresh = torch.tensor(FRESH, device=device)
        o = slot_window_attention_prefill(**x, state=pool, slots=slots, fresh=fresh, impl=impl, **options)
        assert_unowned_untouched(memory, pool, [6, 3, 0, 5])
        assert not o[:, RAGGED[-1] :].any()
        lengths = pool.length[[6, 3, 0, 5]].clamp(max=window)
        assert torch.equal(lengths, wanted.reserve(window).length[1:])
        after = SlotWindowState._make(None if y is None else y[[6, 3, 0, 5]] for y in pool)
        results.append({"o": o} | compared(after, [0, 1, 2, 3]))
    true = {"o": wanted_o} | compared(wanted.reserve(window), [1, 2, 3, 4])
    assert results[0].keys() == true.keys()
    least = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    least = max(least, gate_rounding(x["f"]), gate_rounding(state.f) if window else 0.0)
    for name in true:
        assert_within(name, results[0][name], true[name], results[1][name], floor=least)


@pytest.mark.operation
@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("window", [0, 3, 12])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_chunks_and_steps_in_slots_equal_one_call(impl, window, own_keys, device):
    x = inputs(B=2, T=40, own_keys=own_keys, dtype=torch.float32, device=device, **KERNELS)
    whole, _ = slot_window_attention(**x, window=window, impl="reference")
    empty = SlotWindowState.zeros(6, 1, 16, 64, 64, window, own_slot_keys=own_keys, device=device)
    pool = SlotWindowState._make(
        None if y is None else torch.full_like(y, torch.nan if y.is_floating_point() else 9) for y in empty
    )
    slots, outputs = torch.tensor([4, 1], device=device), []
    for begin, end in ((0, 5), (5, 29), (29, 30)):
        chunk = {name: y[:, begin:end] for name, y in x.items()}
        fresh = torch.full((2,), begin == 0, device=device)
        outputs.append(slot_window_attention_prefill(**chunk, state=pool, slots=slots, fresh=fresh, impl=impl))
    padded = torch.tensor([-1, 4, -1, 1], dtype=torch.int32, device=device)
    for t in range(30, 40):
        rows = {
            name: y[[0, 0, 0, 1]].index_fill_(0, torch.tensor([0, 2]), torch.nan) for name, y in token(x, t).items()
        }
        o = slot_window_attention_step(**rows, state=pool, slots=padded, impl=impl)
        assert not o[[0, 2]].any()
        outputs.append(o[[1, 3]].unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-5, atol=1e-5)
    free = [0, 2, 3, 5]
    assert all((y[free].isnan() if y.is_floating_point() else y[free] == 9).all() for y in pool if y is not None)


def refused(change: dict, words: str) -> None:
    x, state = ragged_call(torch.float32, "cpu", window=5)
    pool, _ = pool_of(state)
    call = dict(**x, state=pool, slots=torch.arange(5), cu_seqlens=torch.tensor(RAGGED)) | change
    with pytest.raises(ValueError, match=words):
        slot_window_attention_prefill(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": torch.arange(4)}, r"slots must have shape \[N\] with N=5, got \[4\]"),
        ({"slots": torch.tensor([0, 1, 2, 3, 8])}, "slots must be less than the pool's 8 slots"),
        ({"slots": torch.tensor([0, 1, 2, 3, 3])}, "slots must differ unless they are negative"),
        ({"slots": torch.zeros(5)}, "slots must be int32, int64, got float32"),
        ({"slots": None}, r"slots must be a tensor of shape \[N\], got None"),
        ({"fresh": torch.zeros(5)}, "fresh must be bool, got float32"),
        ({"fresh": torch.zeros(4, dtype=torch.bool)}, r"fresh must have shape \[N\] with N=5, got \[4\]"),
        ({"state": torch.zeros(3)}, "the state must be a SlotWindowState, got Tensor"),
        ({"state": SlotWindowState.zeros(8, 1, 16, 64, 64, 5, own_slot_keys=True)}, "made with k_slots"),
        ({"state": SlotWindowState.zeros(8, 2, 16, 64, 64, 5)}, r"state.slots_k must have shape \[S, H, M, K\]"),
        ({"v": torch.zeros(1, RAGGED[-1] + 3, 1, 64, requires_grad=True)}, "v requires a gradient"),
    ],
)
def test_malformed_prefills_are_refused(change, words):
    refused(change, words)


def test_pools_that_are_not_contiguous_within_a_slot_are_refused():
    state = SlotWindowState.zeros(8, 1, 16, 64, 64, 5)
    wide = torch.zeros(8, 1, 16, 128)[..., :64]
    refused({"state": state._replace(slots_v=wide)}, "state.slots_v must be contiguous within a slot")


@pytest.mark.operation
def test_kernels_refuse_slots_that_are_not_aligned():
    state = SlotWindowState.zeros(8, 1, 16, 64, 64, 5)
    odd = torch.zeros(8, 5 * 64 + 1)[:, : 5 * 64].view(8, 5, 1, 64)
    refused({"state": state._replace(k=odd), "impl": "triton"}, "slots of state.k must begin at multiples of 16 bytes")
