"""The installed Triton compiles slot-window attention's Gluon kernels for Hopper, without a GPU."""

from __future__ import annotations

import sys
from functools import partial

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

PACKED = dict(B=1, T=16384, H=4, boundaries=[0, 3000, 3000, 9000, 16384])


def attention(B=8, T=4096, H=16, group=1, K=128, V=128, M=32, w=32, own_keys=False, carried=False, boundaries=None):
    """Run forward and backward on tensors without data."""
    from tokenmix_nha.ops import SlotWindowState, slot_window_attention

    empty, long = partial(torch.empty, dtype=torch.bfloat16), partial(torch.empty, dtype=torch.float32)
    x = {"q": empty(B, T, H * group, K), "k": empty(B, T, H, K), "v": empty(B, T, H, V), "f": long(B, T, H, M)}
    if own_keys:
        x |= {"q_slots": empty(B, T, H * group, K), "k_slots": empty(B, T, H, K)}
    x = {name: value.requires_grad_() for name, value in x.items()}
    cu_seqlens, state = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32), None
    if carried:
        N = B if boundaries is None else len(boundaries) - 1
        ring = empty(N, w, H, K), empty(N, w, H, V), long(N, w, H, M), empty(N, w, H, K) if own_keys else None
        state = SlotWindowState(long(N, H, M, K), long(N, H, M, V), *ring, torch.zeros(N, H, dtype=torch.int32))
    o = slot_window_attention(**x, window=w, initial_state=state, cu_seqlens=cu_seqlens, impl="gluon").o
    torch.autograd.grad(o, list(x.values()), torch.empty_like(o))


def in_slots(K=128, M=64, w=32, own_keys=False):
    """Prefill packed prompts in slots, on tensors without data."""
    from tokenmix_nha.ops import SlotWindowState, slot_window_attention_prefill

    empty, H, T, S = partial(torch.empty, dtype=torch.bfloat16), 4, 16384, 16
    x = {"q": empty(1, T, H, K), "k": empty(1, T, H, K), "v": empty(1, T, H, K), "f": torch.empty(1, T, H, M)}
    if own_keys:
        x |= {"q_slots": empty(1, T, H, K), "k_slots": empty(1, T, H, K)}
    state = SlotWindowState.zeros(S, H, M, K, K, w, own_slot_keys=own_keys, dtype=torch.bfloat16)
    boundaries = torch.tensor(PACKED["boundaries"], dtype=torch.int32)
    slots, fresh = torch.tensor([3, -1, 5, 0], dtype=torch.int32), torch.tensor([False, False, True, False])
    slot_window_attention_prefill(**x, state=state, slots=slots, fresh=fresh, cu_seqlens=boundaries, impl="gluon")


# the first two calls launch every kernel: without `every`, only a kernel's first launch is compiled
CALLS = {"32 slots": attention, "64 slots": partial(attention, M=64)}
for K in (64, 128):
    for V in (64, 128):
        for M in (32, 64):
            sizes, name = dict(K=K, V=V, M=M), f"{K} {V}, {M} slots"
            CALLS[name] = partial(attention, **sizes)
            CALLS[f"{name}, no window"] = partial(attention, w=0, **sizes)
            CALLS[f"{name}, packed"] = partial(attention, **PACKED, carried=True, **sizes)
            CALLS[f"{name}, own keys"] = partial(attention, B=2, H=8, group=2, own_keys=True, w=128, **sizes)


IN_SLOTS = {
    "shared keys": in_slots, "own keys": partial(in_slots, own_keys=True), "heads of 64": partial(in_slots, K=64, M=32)
}  # fmt: skip


@without_gpu
def test_the_kernels_of_a_prefill_in_slots_compile_and_fit_on_an_sm():
    kernels = compiled_by(__file__, "in slots", every=True)
    names = {x["kernel"].rpartition(".")[2] for x in kernels}
    assert names == {"hopper_slot_states_kernel", "hopper_window_forward_kernel"}
    assert_all_fit(kernels)


@without_gpu
def test_every_kernel_compiles_and_fits_on_an_sm():
    kernels = compiled_by(__file__)
    assert len({x["kernel"] for x in kernels}) == 6
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(IN_SLOTS if "in slots" in sys.argv else CALLS, "tokenmix_core.ops", "tokenmix_nha.ops")
