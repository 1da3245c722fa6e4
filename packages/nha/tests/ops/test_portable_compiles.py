"""The kernels of the forget gates compile for Hopper, without a GPU."""

from __future__ import annotations

import sys

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

B, T, D = 8, 4096, 1024


def gates():
    from tokenmix_nha.ops import log_forget_gates

    f = torch.empty(B, T, D, dtype=torch.bfloat16).requires_grad_()
    y = log_forget_gates(f, normalizer=16.0, impl="triton")
    torch.autograd.grad(y, f, torch.empty_like(y))


def slots_step():
    from tokenmix_nha.ops import SlotWindowState, slot_window_attention_step

    q, k, v, f = (torch.empty(B, H, size, dtype=torch.float16) for H, size in ((16, 128), (4, 128), (4, 128), (4, 32)))
    state = SlotWindowState.zeros(B, 4, 32, 128, 128, 32, dtype=torch.float16)
    with torch.no_grad():
        slot_window_attention_step(q, k, v, f, state, normalizer=8.0, impl="triton")


def in_slots():
    from tokenmix_nha.ops import SlotWindowState, slot_window_attention_prefill, slot_window_attention_step

    H, T, S = 4, 512, 8
    tokens = {"q": (16, 128), "k": (H, 128), "v": (H, 128), "q_slots": (16, 128), "k_slots": (H, 128)}
    x = {name: torch.empty(1, T, *sizes, dtype=torch.bfloat16) for name, sizes in tokens.items()}
    x["f"] = torch.empty(1, T, H, 64)
    state = SlotWindowState.zeros(S, H, 64, 128, 128, 128, own_slot_keys=True, dtype=torch.bfloat16)
    slots, fresh = torch.tensor([3, -1, 5], dtype=torch.int32), torch.tensor([False, False, True])
    with torch.no_grad():
        cu_seqlens = torch.tensor([0, 100, 300, T], dtype=torch.int32)
        slot_window_attention_prefill(**x, state=state, slots=slots, fresh=fresh, cu_seqlens=cu_seqlens, impl="triton")
        token = {name: y[0, :3] for name, y in x.items()}
        slot_window_attention_step(**token, state=state, slots=slots, impl="triton")


CALLS = {"gates": gates, "slots, a token": slots_step}


@without_gpu
def test_the_kernels_of_calls_in_slots_compile_and_fit_on_an_sm():
    kernels = compiled_by(__file__, "in slots", every=True)
    assert {x["kernel"].rpartition(".")[2] for x in kernels} >= {
        "slot_gates_kernel", "slot_states_kernel", "slot_carry_kernel", "slot_window_forward_kernel",
        "slot_ring_kernel", "slot_window_step_kernel",
    }  # fmt: skip
    assert_all_fit(kernels)


@without_gpu
def test_every_kernel_compiles_and_fits_on_an_sm():
    kernels = compiled_by(__file__)
    assert len(kernels) == 3
    assert_all_fit(kernels)


if __name__ == "__main__":
    calls = {"in slots": in_slots} if "in slots" in sys.argv else CALLS
    compile_calls(calls, "tokenmix_core.ops", "tokenmix_nha.ops", portable=True)
