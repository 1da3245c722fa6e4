"""Time SSD and its decoding step, FLA's `chunk_simple_gla` and, with Δ, A and D, mamba_ssm's chunk scan."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops import chunk_ssd, ssd_step
from tokenmix_core.testing.benchmarking import (
    first_call_seconds,
    installed,
    measure,
    measure_forms,
    measure_step,
    mixed_lengths,
)

# batch, tokens, groups, heads, K, V, packed
SHAPES = [
    (8, 4096, 16, 16, 128, 128, False),
    (8, 4096, 1, 64, 128, 64, False),
    (1, 32768, 16, 16, 128, 128, False),
    (1, 32768, 1, 64, 128, 64, False),
    (1, 65536, 16, 16, 128, 128, True),
    (1, 4096, 16, 16, 128, 128, False),
    (1, 512, 16, 16, 128, 128, False),
]
CPU_SHAPES = [(2, 256, 2, 2, 32, 32, False), (2, 256, 1, 4, 32, 16, False)]
# shapes that are not in SHAPES: few and many heads, K and V of 64 to 256 and unequal, 64 tokens and more
SWEEP = [
    (1, 64, 16, 16, 128, 128, False),
    (32, 64, 16, 16, 128, 128, False),
    (1, 256, 16, 16, 128, 128, False),
    (1, 1024, 16, 16, 128, 128, False),
    (4, 2048, 16, 16, 128, 128, False),
    (1, 16384, 1, 1, 128, 128, False),
    (2, 4096, 64, 64, 128, 128, False),
    (1, 16384, 16, 16, 128, 128, True),
    (4, 2048, 32, 32, 64, 64, False),
    (2, 4096, 16, 16, 64, 128, False),
    (2, 4096, 16, 16, 128, 64, False),
    (2, 4096, 8, 8, 128, 256, False),
    (2, 4096, 8, 8, 256, 128, False),
    (2, 4096, 8, 8, 256, 256, False),
    (1, 64, 1, 64, 128, 64, False),
    (1, 1024, 1, 64, 128, 64, False),
    (1, 4096, 1, 64, 128, 64, False),
    (2, 4096, 8, 64, 64, 64, False),
]
CPU_SWEEP = [(1, 64, 1, 2, 16, 32, False), (1, 4096, 1, 1, 16, 16, True)]
# FLA autotunes for minutes at every new number of heads and head size; of SHAPES, it only runs these (heads, K, V)
FLA_SIZES = {(16, 128, 128)}
# batch, groups, heads, K, V
DECODE_SHAPES = [(1, 16, 16, 128, 128), (32, 16, 16, 128, 128), (128, 16, 16, 128, 128)]

_FIRST_CALL = """
import torch
from tokenmix_core.ops import chunk_ssd
q, k, v = (torch.randn(8, 4096, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
g = -torch.rand(8, 4096, 16, device="cuda")
torch.cuda.synchronize()
"""
_CALL = """
o = chunk_ssd(q, k, v, g).o
torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
torch.cuda.synchronize()
"""


def rows(device: str) -> list[dict]:
    """Measure training and decoding on `device`; return one row per implementation and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        out += _training_rows(shape, device)
    for shape in DECODE_SHAPES if device != "cpu" else [(2, 1, 4, 32, 16)]:
        out += _decode_rows(shape, device)
    return out


def sweep(device: str) -> list[dict]:
    """Measure training at the shapes of `SWEEP` with all baselines that support it; FLA autotunes for 30 minutes."""
    return [row for shape in (SWEEP if device != "cpu" else CPU_SWEEP) for row in _training_rows(shape, device)]


def versions(device: str) -> list[dict]:
    """Measure the Triton and the Gluon kernels on the installed Triton."""
    B, T, H, D = (8, 4096, 16, 128) if device != "cpu" else (1, 128, 1, 16)
    q, k = (_random(B, T, H, D, device=device).mul_(D**-0.5).requires_grad_() for _ in range(2))
    v = _random(B, T, H, D, device=device).requires_grad_()
    g = torch.rand(B, T, H, device=device).mul_(-0.1).requires_grad_()
    name = f"B{B} T{T} G{H} HV{H} K{D} V{D}"
    return measure_forms("SSD", name, device, lambda impl: chunk_ssd(q, k, v, g, impl=impl).o, (q, k, v, g))


def _training_rows(shape: tuple, device: str) -> list[dict]:
    B, T, G, HV, K, V, packed = shape
    q, k = (_random(B, T, G, K, device=device).mul_(K**-0.5).requires_grad_() for _ in range(2))
    v = _random(B, T, HV, V, device=device).requires_grad_()
    cu_seqlens = cu_seqlens_from_lengths(mixed_lengths(T)).to(device) if packed else None
    forwards: dict[str, Callable[[], Tensor]] = {}
    if G < HV:
        # if heads share q and k, measure Mamba-2's form, with step sizes Δ, decays Δ · A and a skip connection D
        dt = torch.rand(B, T, HV, device=device).mul_(0.1).requires_grad_()
        A = (-0.5 - torch.rand(HV, device=device)).requires_grad_()
        D = torch.randn(HV, device=device, requires_grad=True)
        inputs = (q, k, v, dt, A, D)
        forwards["tokenmix"] = lambda: chunk_ssd(q, k, v, dt * A, dt=dt, D=D, cu_seqlens=cu_seqlens).o
        mamba = installed("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined")
        if device != "cpu" and mamba and not packed:
            forwards["mamba_ssm"] = lambda: mamba(v, dt, A, k, q, chunk_size=128, D=D)
    else:
        g = torch.rand(B, T, HV, device=device).mul_(-0.1).requires_grad_()
        inputs = (q, k, v, g)
        forwards["tokenmix"] = lambda: chunk_ssd(q, k, v, g, cu_seqlens=cu_seqlens).o
        tuned = (HV, K, V) in FLA_SIZES or shape in SWEEP
        if device != "cpu" and tuned and (fla := installed("fla.ops.simple_gla:chunk_simple_gla")):
            baseline = functools.partial(fla, q, k, v, g=g, scale=1.0, cu_seqlens=cu_seqlens)
            forwards["FLA chunk_simple_gla"] = lambda: baseline()[0]
    first = {"tokenmix": functools.partial(first_call_seconds, _FIRST_CALL, _CALL)} if shape == SHAPES[0] else None
    name = f"B{B} T{T} G{G} HV{HV} K{K} V{V}" + (", 32 sequences" if packed else "")
    return measure("SSD", name, device, forwards, inputs, first_calls=first, alike=True)


def _decode_rows(shape: tuple, device: str) -> list[dict]:
    B, G, HV, K, V = shape
    q, k = (_random(B, G, K, device=device) for _ in range(2))
    v, g = _random(B, HV, V, device=device), -torch.rand(B, HV, device=device)
    state = torch.randn(B, HV, K, V, device=device)
    forwards: dict[str, Callable[[], Tensor]] = {"tokenmix": lambda: ssd_step(q, k, v, g, state)}
    if device != "cpu" and G == HV and (fla := installed("fla.ops.simple_gla:fused_recurrent_simple_gla")):
        token = tuple(x.unsqueeze(1) for x in (q, k, v))
        options = {"scale": 1.0, "initial_state": state, "output_final_state": True}
        forwards["FLA fused_recurrent_simple_gla"] = lambda: fla(*token, g=g.unsqueeze(1), **options)[0][:, 0]
    return measure_step("SSD, one step", f"B{B} G{G} HV{HV} K{K} V{V}", device, forwards)


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
