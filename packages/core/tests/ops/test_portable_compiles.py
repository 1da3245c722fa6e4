"""Test that portable kernels compile for Hopper, by the installed Triton and without a GPU."""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

import torch

from tokenmix_core.kernels import tuning
from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

B, T, H, K, W = 8, 4096, 16, 64, 4

half = partial(torch.empty, dtype=torch.bfloat16)
long = partial(torch.empty, dtype=torch.float32)


def both(op, *leaves, **options):
    """Run a forward and a backward pass over tensors whose elements are not read."""
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    made = op(*leaves, impl="triton", **options)
    outputs = [made] if isinstance(made, torch.Tensor) else [y for y in made if y is not None]
    torch.autograd.grad(outputs, [x for x in leaves if x is not None], [torch.empty_like(y) for y in outputs])


def norms():
    from tokenmix_core.ops import gated_rms_norm, rms_norm

    both(rms_norm, half(B, T, 1024), long(1024), half(B, T, 1024))
    both(gated_rms_norm, half(B, T, 2048), half(B, T, 2048), long(256), size=256)


def rotation():
    from tokenmix_core.ops import rotate

    angles = [long(1, T, K // 2) for _ in range(2)]
    both(lambda x, weight, impl: rotate(x, *angles, weight, impl=impl), half(B, T, H, K), long(K))


def products():
    from tokenmix_core.ops import swiglu, swiglu_linear

    both(swiglu, half(B, T, 2816), half(B, T, 2816))
    both(swiglu_linear, half(B, T, 2816), half(B, T, 2816), half(1024, 2816))
    swiglu_linear(half(1, 1, 2816), half(1, 1, 2816), half(1024, 2816), half(1, 1, 1024), impl="triton")


def gates():
    from tokenmix_core.ops import delta_gates

    both(delta_gates, half(B, T, H), half(B, T, H), long(H), long(H))


def convolutions():
    from tokenmix_core.ops import short_conv_steps, short_convs

    widths = (1024, 1024, 2048)
    weights = [long(D, W) for D in widths]

    def convolve(*xs, impl):
        return [o for o, _ in short_convs(xs, weights, activation="silu", impl=impl)]

    both(convolve, *(half(B, T, D) for D in widths))
    with torch.no_grad():
        states = [half(B, D, W - 1) for D in widths]
        short_conv_steps([half(B, D) for D in widths], weights, states, activation="silu", impl="triton")


def layer_step():
    from tokenmix_core.ops import delta_layer_step

    weights = [long(H * 64, W), long(H * 64, W), long(H * 128, W)]
    inputs = [half(B, len(x), W - 1) for x in weights]
    tokens = half(B, H, 64), half(B, H, 64), half(B, H, 128), half(B, H), half(B, H), half(B, H, 128)
    arrivals = torch.zeros(B, H, dtype=torch.int32)
    parameters = long(H), long(H), long(128), long(B, H, 64, 128), arrivals
    delta_layer_step(*tokens, weights, inputs, *parameters, impl="triton")


def kept_keys():
    from tokenmix_core.ops import kept_attention

    # who is told to interpret refuses bfloat16
    q, k, v = (torch.empty(B, T, heads, K, dtype=torch.float16) for heads in (H, 4, 4))
    both(lambda *x, impl: kept_attention(*x, unit=64, impl=impl), q, k, v, long(B, T // 64, 4))
    both(lambda *x, impl: kept_attention(*x, keep_gradient="values", impl=impl), q, k, v, long(B, T, 4))


def sinks():
    from tokenmix_core.ops import attention

    q, k, v = (torch.empty(1, T, heads, K, dtype=torch.float16) for heads in (H, 4, 4))
    both(attention, q, k, v, window=256, sinks=4)


def layers():
    from tokenmix_core.ops import fused_linears

    x, *weights = (torch.empty(N, 1024, dtype=torch.float16) for N in (8, 768, 768, 1536, 6, 6, 1536))
    fused_linears(x, weights, impl="triton")
    fused_linears(x[:1], weights, impl="triton")


def rotation_step():
    from tokenmix_core.ops import rotate_step

    q, k, v = half(B, H, K), half(B, 4, K), half(B, 4, K)
    keys, values = half(B, T, 4, K), half(B, T, 4, K)
    places = torch.zeros(B, dtype=torch.int64)
    rotate_step(q, k, v, long(1, K // 2), long(1, K // 2), keys, values, places, impl="triton")
    rotate_step(q, k, v, None, None, keys, values, places, long(K), long(K), impl="triton")


def merging():
    from tokenmix_core.ops import merge_attention
    from tokenmix_core.ops.types import AttentionOutput

    merge_attention([AttentionOutput(half(B, 1, H, 128), long(B, 1, H)) for _ in range(2)], impl="triton")


def tokens():
    from tokenmix_core.ops import (
        attention_decode,
        gated_delta_rule_step,
        paged_attention_decode,
        short_conv_step,
        ssd_step,
    )

    # who is told to interpret refuses bfloat16
    q, k, v, cache = (torch.empty(*s, dtype=torch.float16) for s in ((B, H, K), (B, H, K), (B, H, K), (B, T, 4, K)))
    # a CPU would split nothing
    with patch.object(tuning, "splits", lambda *_: 8):
        attention_decode(q[:, None], cache, cache, torch.zeros(B, dtype=torch.int32), impl="triton")
        pages, table = cache.view(B, -1, 64, K), torch.zeros(B, 4, 16, dtype=torch.int32)
        paged_attention_decode(q[:, None], pages, pages, table, table[..., 0], impl="triton")
    gated_delta_rule_step(q, k, v, long(B, H), long(B, H), long(B, H, K, K), impl="triton")
    ssd_step(q, k, v, long(B, H), long(B, H, K, K), impl="triton")
    short_conv_step(half(B, 1024), long(1024, W), long(1024), half(B, 1024, W - 1), impl="triton")


def prefills(fresh):
    """Run the operations of whole sequences in slots, with or without the argument `fresh`."""
    from tokenmix_core import ops

    boundaries = torch.tensor([0, T // 2, T], dtype=torch.int32)
    slots = {"slots": torch.arange(2), "fresh": torch.zeros(2, dtype=torch.bool) if fresh else None}
    slots |= {"cu_seqlens": boundaries, "impl": "triton"}
    widths = (1024, 1024, 2048)
    weights, inputs = [long(D, W) for D in widths], [half(1, T, D) for D in widths]
    pools = [half(4, D, W - 1) for D in widths]
    # who is told to interpret refuses bfloat16
    q, k, v = (torch.empty(1, T, H, K, dtype=torch.float16) for _ in "qkv")
    with torch.no_grad():
        ops.short_conv_prefill(inputs[0], weights[0], long(1024), pools[0], activation="silu", **slots)
        ops.short_convs_prefill(inputs, weights, pools, activation="silu", **slots)
        for pool in (long(4, H, K, K), torch.empty(4, H, K, K, dtype=torch.float16)):
            ops.gated_delta_rule_prefill(q, k, v, long(1, T, H), long(1, T, H), pool, **slots)
            ops.ssd_prefill(q, k, v, long(1, T, H), pool, **slots)


def slot_steps():
    from tokenmix_core import ops

    slots, weights = torch.arange(B, dtype=torch.int32), [long(D, W) for D in (1024, 1024, 2048)]
    states = [half(16, len(w), W - 1) for w in weights]
    q, k, v = (torch.empty(B, H, K, dtype=torch.float16) for _ in "qkv")
    pool, gates = long(16, H, K, K), (long(B, H), long(B, H))
    with torch.no_grad():
        xs = [half(B, len(w)) for w in weights]
        ops.short_conv_steps(xs, weights, states, activation="silu", slots=slots, impl="triton")
        ops.gated_delta_rule_step(q, k, v, *gates, pool, slots=slots, impl="triton")
        ops.ssd_step(q, k, v, gates[0], pool, slots=slots, impl="triton")


CALLS = {
    "norms": norms, "rotation": rotation, "products": products, "gates": gates, "convolutions": convolutions,
    "layer's step": layer_step, "kept keys": kept_keys, "sinks": sinks,
    "layers": layers, "rotation's step": rotation_step, "merging": merging, "tokens": tokens,
}  # fmt: skip
# kernels of other calls, with slots
IN_SLOTS = {
    "prefills": partial(prefills, True),
    "prefills, none fresh": partial(prefills, False),
    "steps": slot_steps,
}


@without_gpu
def test_kernels_compile_with_slots():
    kernels = compiled_by(__file__, "slots", every=True)
    assert {x["call"] for x in kernels} == IN_SLOTS.keys()
    assert_all_fit(kernels)


@without_gpu
def test_every_kernel_compiles_and_fits_on_a_SM():
    kernels = compiled_by(__file__)
    assert {x["call"] for x in kernels} == CALLS.keys()
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(IN_SLOTS if "slots" in sys.argv else CALLS, "tokenmix_core.ops", portable=True)
