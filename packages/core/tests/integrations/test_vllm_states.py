"""Mixers decode in the slots of a pool of bytes as on states of their own; vLLM is not needed."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.integrations.vllm.states import SLOT_DTYPE, SlotLayout, slot_elements
from tokenmix_core.nn.gated_delta_net import GatedDeltaNet
from tokenmix_core.nn.mamba2 import Mamba2
from tokenmix_core.nn.projections import join_weights
from tokenmix_core.nn.state import LayerState, Span
from tokenmix_core.testing.closeness import relative_error

MIXERS = {
    "GDN": lambda impl: GatedDeltaNet(32, num_heads=1, num_v_heads=2, head_dim=64, expand_v=1.0, impl=impl),
    "Mamba-2": lambda impl: Mamba2(32, head_dim=32, state_size=16, impl=impl),
}
# the second row is padding, as in a captured batch
SLOTS = (4, -1, 2)


def run(mixer, x, state: LayerState, past: int) -> torch.Tensor:
    state.span = Span(len(x), x.shape[1], x.device, past=past)
    return mixer(x, state=state)[0]


def layout_of(mixer, x, dtype: torch.dtype = torch.float32) -> SlotLayout:
    state = mixer.make_state()
    run(mixer, x[:1, :1], state, 0)
    return SlotLayout(state, dtype)


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_steps_in_slots_equal_steps_on_states(name, impl, dtype, joined, device):
    torch.manual_seed(0)
    mixer = MIXERS[name](impl).to(device).eval()
    x = torch.randn(2, 8, 32, device=device)
    layout, state = layout_of(mixer, x, dtype), mixer.make_state()
    run(mixer, x[:, :3], state, 0)
    if joined:
        join_weights([getattr(mixer, name) for name in mixer.joint_layers])
    # set all bits, which are then NaN, or a counter that has not been reset
    pool = torch.full((6, slot_elements({"": layout}) + 64), -1, dtype=SLOT_DTYPE, device=device)
    views = layout.views(pool)
    layout.scatter(state, views, torch.tensor([4, 2], device=device))
    others = pool[[0, 1, 3, 5]].clone()
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    for t in range(3, 8):
        wanted = run(mixer, x[:, t : t + 1], state, t)
        padded = torch.stack([x[0, t], torch.full_like(x[0, t], torch.nan), x[1, t]]).unsqueeze(1)
        before = pool.data_ptr()
        got = run(mixer, padded, layout.in_slots(views, slots.long(), constant=True, padded=slots), t)
        assert pool.data_ptr() == before
        assert relative_error(got[[0, 2]], wanted) < (1e-5 if dtype == torch.float32 else 5e-3)
    assert torch.equal(pool[[0, 1, 3, 5]], others)
    assert (pool[:, -64:] == -1).all()
    gathered = layout.gather(views, torch.tensor([4, 2], device=device))
    for part, held in state.parts.items():
        assert gathered.parts[part].value.dtype == held.value.dtype
        error = relative_error(gathered.parts[part].value, held.value)
        assert error < (1e-5 if dtype == torch.float32 else 5e-3), part


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_packed_prompts_in_slots_equal_prompts_alone(name, impl, device):
    torch.manual_seed(0)
    mixer = MIXERS[name](impl).to(device).eval()
    x = torch.randn(3, 80, 32, device=device)
    layout = layout_of(mixer, x)
    pool = torch.full((6, slot_elements({"": layout})), -1, dtype=SLOT_DTYPE, device=device)
    views, slots = layout.views(pool), torch.tensor([4, 0, 2], device=device)
    others = pool[[1, 3, 5]].clone()
    alone, past = [mixer.make_state() for _ in x], [0, 0, 0]
    # sequence 1 begins in the first call, sequences 0 and 2 in the second
    for indices, sizes in (((1,), (3,)), ((2, 1, 0), (1, 5, 70)), ((0, 1, 2), (2, 1, 3))):
        parts = [x[i, past[i] : past[i] + n] for i, n in zip(indices, sizes, strict=True)]
        fresh = torch.tensor([past[i] == 0 for i in indices], device=device)
        wanted = [run(mixer, part[None], alone[i], past[i])[0] for i, part in zip(indices, parts, strict=True)]
        packed = torch.cat(parts)[None]
        state = layout.in_slots(views, slots[list(indices)], constant=True, fresh=fresh if bool(fresh.any()) else None)
        state.span = Span(1, packed.shape[1], packed.device)
        ends = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
        got, _ = mixer(packed, state=state, cu_seqlens=ends)
        assert relative_error(got[0], torch.cat(wanted)) < 1e-5
        for i, n in zip(indices, sizes, strict=True):
            past[i] += n
    assert torch.equal(pool[[1, 3, 5]], others)
    gathered = layout.gather(views, slots)
    for part, held in gathered.parts.items():
        wanted = torch.cat([state.parts[part].value for state in alone])
        assert relative_error(held.value, wanted) < 1e-5, part


@torch.no_grad()
def test_states_of_16_bits_halve_the_slot(device):
    mixer, x = MIXERS["GDN"]("reference").to(device), torch.randn(1, 1, 32, device=device)
    wide, narrow = (layout_of(mixer, x, dtype) for dtype in (torch.float32, torch.bfloat16))
    state = 2 * 64 * 64
    assert wide.nbytes - narrow.nbytes == 2 * state
    assert [x.dtype for x in narrow.fields["recurrent"]] == [torch.bfloat16]
    assert [x.dtype for x in narrow.fields["arrivals"]] == [torch.int32]
