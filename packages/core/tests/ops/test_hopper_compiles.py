"""Gluon kernels compile for Hopper, by the installed Triton and without a GPU."""

from __future__ import annotations

from functools import partial

import torch

from tokenmix_core.testing.compilation import assert_all_fit, compile_calls, compiled_by, without_gpu

BOUNDARIES = [0, 3000, 3000, 9000, 16384]
PACKED = dict(B=1, T=16384, boundaries=BOUNDARIES)


def tensors(dtype=torch.bfloat16, **shapes):
    """Differentiable tensors, of which nothing is read: by name, in float32 where a name says so."""
    return {
        name: torch.empty(shape, dtype=torch.float32 if name in FLOAT32 else dtype).requires_grad_()
        for name, shape in shapes.items()
    }


FLOAT32 = ("g", "beta", "dt", "D", "initial_state", "state", "writes")


def both(op, x, boundaries, **options):
    """A forward and a backward pass."""
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32)
    output = op(**x, cu_seqlens=cu_seqlens, impl="gluon", **options)
    torch.autograd.grad(list(output), list(x.values()), [torch.empty_like(y) for y in output])


def gated_delta_rule(
    B=8, T=4096, H=16, HV=None, K=128, V=None, N=0, boundaries=None, norm=True, withheld=False, dtype=torch.bfloat16
):  # fmt: skip
    from tokenmix_core.ops import chunk_gated_delta_rule

    V, HV = V or K, HV or H
    x = tensors(dtype, q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, HV), beta=(B, T, HV))
    x |= tensors(initial_state=(N, HV, K, V)) if N else {}
    x |= tensors(writes=(B, T // 64, HV)) if withheld else {}
    both(chunk_gated_delta_rule, x, boundaries, qk_l2norm=norm)


def ssd(B=8, T=4096, G=1, HV=16, K=128, V=128, N=0, boundaries=None, steps=False, dtype=torch.bfloat16):
    from tokenmix_core.ops import chunk_ssd

    x = tensors(dtype, q=(B, T, G, K), k=(B, T, G, K), v=(B, T, HV, V), g=(B, T, HV))
    x |= tensors(dt=(B, T, HV), D=(HV,)) if steps else {}
    x |= tensors(initial_state=(N, HV, K, V)) if N else {}
    both(chunk_ssd, x, boundaries)


def attention(
    B=8, T=4096, H=16, D=128, window=None, sinks=0, boundaries=None, dtype=torch.bfloat16, group=1, impl=None
):
    """What the operation runs: it takes no bfloat16 on a CPU itself."""
    from tokenmix_core.ops.softmax_attention.backward import attention_backward
    from tokenmix_core.ops.softmax_attention.forward import attention_forward
    from tokenmix_core.ops.softmax_attention.types import Mask

    q, do = (torch.empty(B, T, H * group, D, dtype=dtype) for _ in range(2))
    k, v = (torch.empty(B, T, H, D, dtype=dtype) for _ in range(2))
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32)
    rest = cu_seqlens, Mask(True, window, sinks), D**-0.5
    attention_backward(q, k, v, *attention_forward(q, k, v, *rest, impl=impl), do, None, *rest, impl=impl)


def kept_attention(
    B=8, T=4096, TQ=None, HQ=32, H=8, HM=8, K=64, V=64, unit=1, window=768, boundaries=None, through_keep=False,
    dtype=torch.bfloat16, keep_gradient="exponentials",
):  # fmt: skip
    """The same for listed keys."""
    from tokenmix_core.ops.sparse_attention import autograd

    q, k, v = (torch.empty(s, dtype=dtype) for s in ((B, TQ or T, HQ, K), (B, T, H, K), (B, T, H, V)))
    U = T // unit + (0 if boundaries is None or unit == 1 else len(boundaries) - 1)
    keep = torch.empty(B, U, HM)
    cu_seqlens = None if boundaries is None else torch.tensor(boundaries, dtype=torch.int32)
    rest = unit, window, K**-0.5, keep_gradient, "gluon"
    given = q, k, v, keep, None, cu_seqlens, *rest
    o, lse, *lists = autograd._forward(*given)
    autograd._backward(*given, o, lse, *lists, o, lse, through_keep)


def step(op, N=32, H=16, K=128, V=128, pool=None):
    from tokenmix_core import ops

    x = tensors(q=(N, H, K), k=(N, H, K), v=(N, H, V), g=(N, H), state=(N, H, K, V))
    x |= tensors(beta=(N, H)) if op == "gated_delta_rule_step" else {}
    if pool is not None:
        x |= {"state": torch.empty(N, H, K, V, dtype=pool), "slots": torch.arange(N, dtype=torch.int32)}
    with torch.no_grad():
        getattr(ops, op)(**x, impl="gluon")


def prefill(op, pool, H=16, K=128, V=128):
    from tokenmix_core import ops

    T, N = BOUNDARIES[-1], len(BOUNDARIES) - 1
    x = tensors(q=(1, T, H, K), k=(1, T, H, K), v=(1, T, H, V), g=(1, T, H))
    x |= tensors(beta=(1, T, H)) if op == "gated_delta_rule_prefill" else tensors(dt=(1, T, H), D=(H,))
    state, fresh = torch.empty(N, H, K, V, dtype=pool), torch.zeros(N, dtype=torch.bool)
    given = {"slots": torch.arange(N), "fresh": fresh, "cu_seqlens": torch.tensor(BOUNDARIES, dtype=torch.int32)}
    with torch.no_grad():
        getattr(ops, op)(**x, state=state, **given, impl="gluon")


# the first ones have every kernel
CALLS = {
    "gated delta rule": gated_delta_rule,
    "gated delta rule, narrow heads": partial(gated_delta_rule, B=2, K=64),
    "gated delta rule, wide heads": partial(gated_delta_rule, B=2, K=256),
    "gated delta rule, a token": partial(step, "gated_delta_rule_step"),
    "SSD": ssd,
    "SSD, narrow heads": partial(ssd, K=64, V=64),
    "SSD, a group a head": partial(ssd, B=2, G=16, steps=True),
    "SSD, a token": partial(step, "ssd_step"),
    "window": partial(attention, window=1024),
    "kept keys": kept_attention,
    "gated delta rule, few heads": partial(gated_delta_rule, B=1, T=32768, H=2),
    "gated delta rule, few heads, withheld": partial(gated_delta_rule, B=1, T=32768, H=6, V=256, withheld=True),
    "gated delta rule without norm": partial(gated_delta_rule, norm=False),
    "gated delta rule in float16": partial(gated_delta_rule, dtype=torch.float16),
    "SSD in float16": partial(ssd, dtype=torch.float16),
    "SSD, groups of heads": partial(ssd, HV=32, V=64, steps=True),
    "many sequences of a token": partial(step, "gated_delta_rule_step", N=256),
    "many sequences of a token, SSD": partial(step, "ssd_step", N=256),
}
for op in ("gated_delta_rule_step", "ssd_step"):
    for pool in (torch.float32, torch.bfloat16):
        CALLS[f"{op} in slots of {pool}"] = partial(step, op, pool=pool)
for op in ("gated_delta_rule_prefill", "ssd_prefill"):
    for pool in (torch.float32, torch.bfloat16):
        for H, K, V in ((16, 128, 128), (2, 128, 128), (2, 128, 256), (2, 256, 128), (2, 64, 64)):
            CALLS[f"{op} {H} {K} {V} in slots of {pool}"] = partial(prefill, op, pool, H, K, V)
for K in (64, 128, 256):
    for V in (64, 128, 256):
        sizes = dict(K=K, V=V)
        CALLS[f"gated delta rule {K} {V}"] = partial(gated_delta_rule, B=2, T=2048, **sizes)
        CALLS[f"gated delta rule {K} {V}, packed"] = partial(gated_delta_rule, **PACKED, H=2, HV=4, N=4, **sizes)
        CALLS[f"gated delta rule {K} {V}, withheld"] = partial(gated_delta_rule, B=2, T=2048, withheld=True, **sizes)
        CALLS[f"SSD {K} {V}"] = partial(ssd, **sizes)
        CALLS[f"SSD {K} {V}, packed"] = partial(ssd, **PACKED, HV=4, N=4, steps=True, **sizes)
        CALLS[f"SSD {K} {V}, short"] = partial(ssd, B=2, T=256, HV=8, N=2, **sizes)
for D in (64, 128):
    CALLS[f"attention {D}"] = partial(attention, D=D)
    CALLS[f"window and sinks {D}"] = partial(attention, B=1, T=32768, H=4, group=8, D=D, window=256, sinks=4)
    CALLS[f"packed windows {D}"] = partial(attention, **PACKED, D=D, window=512, dtype=torch.float16)
    CALLS[f"packed windows {D}, asked for"] = partial(attention, **PACKED, D=D, window=512, impl="gluon")
    for V in (64, 128):
        sizes = dict(K=D, V=V)
        CALLS[f"kept keys {D} {V}"] = partial(kept_attention, TQ=1000, dtype=torch.float16, **sizes)
        CALLS[f"marks of values {D} {V}"] = partial(kept_attention, through_keep=True, keep_gradient="values", **sizes)
        CALLS[f"kept keys {D} {V}, packed"] = partial(kept_attention, **PACKED, **sizes)
        CALLS[f"kept chunks {D} {V}"] = partial(kept_attention, unit=64, window=None, through_keep=True, **sizes)
        CALLS[f"kept chunks {D} {V}, packed"] = partial(
            kept_attention, **PACKED, unit=128, window=None, through_keep=True, **sizes
        )


@without_gpu
def test_every_kernel_compiles_and_fits_on_a_SM():
    kernels = compiled_by(__file__)
    assert len({x["kernel"] for x in kernels}) == 21
    assert_all_fit(kernels)


if __name__ == "__main__":
    compile_calls(CALLS, "tokenmix_core.ops")
