"""The kernels of the forget gates compile for Hopper, without a GPU."""

from __future__ import annotations

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


CALLS = {"gates": gates, "slots, a token": slots_step}


@without_gpu
def test_every_kernel_compiles_and_fits_on_an_sm():
    kernels = compiled_by(__file__)
    assert len(kernels) == 3
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(CALLS, "tokenmix_core.ops", "tokenmix_nha.ops", portable=True)
