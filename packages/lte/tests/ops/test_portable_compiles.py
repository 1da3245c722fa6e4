"""Every kernel of this package compiles for Hopper, without a GPU."""

from __future__ import annotations

from functools import partial

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

B, T, H, K = 8, 4096, 8, 64
DTYPES = (torch.float16, torch.float32)

# Triton's interpreter refuses bfloat16
half = partial(torch.empty, dtype=torch.float16)
whole = partial(torch.zeros, dtype=torch.int32)


def scorer(dtype=torch.float16):
    from tokenmix_lte.scorers import ConvScorer

    made = ConvScorer(H, 2 * K, dropout=0.1, causal=False, impl="triton")
    k, v = (torch.empty(B, T, H, K, dtype=dtype).requires_grad_() for _ in range(2))
    logits = made(k, v)
    torch.autograd.grad(logits, [k, v, *made.parameters()], torch.empty_like(logits))


def eviction(window=768, cap=512):
    from tokenmix_lte.ops import evict_step

    token, memory = (half(B, H, K) for _ in range(3)), (half(B, H, window + cap, K) for _ in range(2))
    scores, raws = torch.zeros(B, H, window + cap), half(B, 70, H, K)
    before = torch.zeros(B, dtype=torch.int64)
    evict_step(
        *token, *memory, whole(B, H), scores, whole(B, H, cap), raws, before, window=window, sinks=4, impl="triton"
    )


def eviction_times():
    from tokenmix_lte.eviction import eviction_times

    eviction_times(torch.zeros(B, T, H), 512, 768, impl="triton")


def selected_blocks(count=16):
    from tokenmix_lte.ops import block_attention, select_blocks

    q, k, v = (half(B, T, heads, K).requires_grad_() for heads in (32, 2, 2))
    o, lse = block_attention(q, k, v, whole(B, T, 2, count), impl="triton")
    torch.autograd.grad((o, lse), (q, k, v), (torch.empty_like(o), torch.empty_like(lse)))
    with torch.no_grad():
        select_blocks(q, half(B, T // 64, 2, K), lse, count, impl="triton")


def branches():
    from tokenmix_lte.ops import gated_sum

    given = [half(B, T, 32, channels).requires_grad_() for channels in (K, K, K, 3)]
    o = gated_sum(*given, impl="triton")
    torch.autograd.grad(o, given, torch.empty_like(o))


CALLS = {
    **{f"scorer in {dtype}": partial(scorer, dtype) for dtype in DTYPES},
    "eviction": eviction,
    "eviction times": eviction_times,
    "selected blocks": selected_blocks,
    "sum of branches": branches,
}


@without_gpu
def test_every_kernel_compiles_and_fits_on_an_sm():
    # all launches of each kernel, because a scorer's tiles, and so its shared memory, depend on its dtype
    kernels = compiled_by(__file__, every=True)
    assert {x["call"] for x in kernels} == CALLS.keys()
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(CALLS, "tokenmix_core.ops", "tokenmix_lte.ops", portable=True)
