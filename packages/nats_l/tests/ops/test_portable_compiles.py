"""The kernels that merge both operations compile for Hopper, without a GPU."""

from __future__ import annotations

import pytest
import torch

from tokenmix_core.testing.compilation import SHARED_MEMORY, compile_calls, compiled_by

B, T, H, V = 8, 4096, 6, 256


def merging():
    from tokenmix_nats_l.ops import merge_operations

    shapes = (B, T, H, V), (B, T, H, V), (B, T, H * V), (V,), (V,), (B, T, 2, H)
    x = [torch.empty(s, dtype=torch.float32 if len(s) == 1 else torch.bfloat16).requires_grad_() for s in shapes]
    y = merge_operations(*x, impl="triton")
    torch.autograd.grad(y, x, torch.empty_like(y))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there by all tests")
def test_every_kernel_compiles_and_fits_on_a_multiprocessor():
    kernels = compiled_by(__file__)
    assert len(kernels) == 2
    assert [x for x in kernels if x["error"] or x["shared"] > SHARED_MEMORY] == []


if __name__ == "__main__":
    compile_calls({"merging": merging}, "tokenmix_core.ops", "tokenmix_nats_l.ops", portable=True)
