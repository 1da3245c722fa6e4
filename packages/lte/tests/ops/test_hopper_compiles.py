"""This package's Gluon kernels compile for Hopper with the installed Triton, without a GPU."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu


def scorer(B=8, T=4096, H=8, channels=(64, 64, 32, 16), offsets=(-2, 0, 2), dtype=torch.bfloat16, **options):
    """Compute logits and their gradients."""
    from tokenmix_lte.ops import retention_logits

    K, *outs = channels
    k, v = (torch.empty(B, T, H, K, dtype=dtype).requires_grad_() for _ in range(2))
    weights = [
        x.requires_grad_() for C, CO in pairwise((2 * K, *outs)) for x in (torch.empty(H, CO, C, 3), torch.empty(H, CO))
    ]
    last = [torch.empty(H, outs[-1]).requires_grad_(), torch.empty(H).requires_grad_()]
    convs = list(zip(weights[::2], weights[1::2], strict=True))
    logits = retention_logits(k, v, convs, *last, offsets=offsets, impl="gluon", **options)
    torch.autograd.grad(logits, [k, v, *weights, *last], torch.empty_like(logits))


CALLS = {
    "scorer": scorer,
    "of the past in float16, padded, with dropout": partial(
        scorer, offsets=(-4, -2, 0), dtype=torch.float16, begin=torch.zeros(8, dtype=torch.int64), dropout=0.1
    ),
    "packed, narrow keys of one head": partial(
        scorer, B=1, H=1, channels=(32, 64, 64, 64), cu_seqlens=torch.tensor([0, 1000, 4096], dtype=torch.int32)
    ),
}


@without_gpu
def test_every_kernel_compiles_and_fits_on_an_sm():
    # all launches of each kernel, because its shared memory depends on the channels
    kernels = compiled_by(__file__, every=True)
    assert {x["call"] for x in kernels} == CALLS.keys()
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(CALLS, "tokenmix_core.ops", "tokenmix_lte.ops")
