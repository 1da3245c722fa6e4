"""The kernels that merge both operations compile for Hopper, without a GPU."""

from __future__ import annotations

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

B, T, H, V = 8, 4096, 6, 256


def merging():
    from tokenmix_nats_l.ops import merge_operations

    shapes = (B, T, H, V), (B, T, H, V), (B, T, H * V), (V,), (V,), (B, T, 2, H)
    x = [torch.empty(s, dtype=torch.float32 if len(s) == 1 else torch.bfloat16).requires_grad_() for s in shapes]
    y = merge_operations(*x, impl="triton")
    torch.autograd.grad(y, x, torch.empty_like(y))


CALLS = {"merging": merging}


@without_gpu
def test_every_kernel_compiles_and_fits_on_a_SM():
    kernels = compiled_by(__file__)
    assert len(kernels) == 2
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(CALLS, "tokenmix_core.ops", "tokenmix_nats_l.ops", portable=True)
