"""Time short convolutions: ours, FLA's and torch's grouped one; then ours of q, k and v, in one launch and in three."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops import short_conv, short_convs
from tokenmix_core.testing.benchmarking import first_call_seconds, installed, measure, mixed_lengths

# batch, tokens, channels, width, packed
SHAPES = [(8, 4096, 4096, 4, False), (1, 32768, 4096, 4, False)]
CPU_SHAPES = [(2, 256, 64, 4, False)]
# for q, k and v together: batch, tokens, channels of each, width
SEVERAL_SHAPES = [(8, 4096, (768, 768, 1536), 4), (8, 4096, (2048, 2048, 2048), 4), (1, 2048, (768, 768, 1536), 4)]
CPU_SEVERAL_SHAPES = [(2, 64, (16, 16, 32), 4)]
# shapes that are not in SHAPES: few and many channels, other widths, 64 tokens and more
SWEEP = [
    (1, 64, 4096, 4, False),
    (32, 64, 4096, 4, False),
    (1, 512, 4096, 4, False),
    (1, 2048, 1024, 4, False),
    (8, 4096, 1024, 4, False),
    (1, 32768, 256, 4, False),
    (2, 4096, 16384, 4, False),
    (4, 4096, 4096, 2, False),
    (4, 4096, 4096, 3, False),
    (1, 16384, 4096, 4, True),
]
CPU_SWEEP = [(1, 64, 16, 2, False), (1, 4096, 16, 4, True)]

_FIRST_CALL = """
import torch
from tokenmix_core.ops import short_conv
x = torch.randn(8, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(4096, 4, device="cuda", requires_grad=True)
torch.cuda.synchronize()
"""
_CALL = """
o = short_conv(x, weight, activation="silu").o
torch.autograd.grad(o, (x, weight), torch.ones_like(o))
torch.cuda.synchronize()
"""


def rows(device: str) -> list[dict]:
    """Measure on `device`; return one row per implementation and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        out += _rows(shape, device)
    for shape in SEVERAL_SHAPES if device != "cpu" else CPU_SEVERAL_SHAPES:
        out += _several_rows(shape, device)
    return out


def sweep(device: str) -> list[dict]:
    """Measure training at the shapes of `SWEEP`, with every baseline that supports them."""
    return [row for shape in (SWEEP if device != "cpu" else CPU_SWEEP) for row in _rows(shape, device)]


def _rows(shape: tuple, device: str) -> list[dict]:
    B, T, D, W, packed = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(D, W, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(D, device=device, dtype=dtype, requires_grad=True)
    cu_seqlens = cu_seqlens_from_lengths(mixed_lengths(T)).to(device) if packed else None
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: short_conv(x, weight, bias, activation="silu", cu_seqlens=cu_seqlens).o
    }
    if not packed:
        forwards["torch conv1d"] = lambda: F.silu(F.conv1d(F.pad(x.mT, (W - 1, 0)), weight[:, None], bias, groups=D)).mT
    if device != "cpu" and (causal_conv1d := installed("fla.modules.causal_conv1d:causal_conv1d")):
        baseline = functools.partial(causal_conv1d, x, weight, bias, activation="silu", cu_seqlens=cu_seqlens)
        forwards["FLA causal_conv1d"] = lambda: baseline()[0]
    first = {"tokenmix": functools.partial(first_call_seconds, _FIRST_CALL, _CALL)} if shape == SHAPES[0] else None
    name = f"B{B} T{T} D{D} W{W}" + (", 32 sequences" if packed else "")
    return measure("short convolution", name, device, forwards, (x, weight, bias), first_calls=first, alike=True)


class _First(torch.autograd.Function):
    """Returns the first of several tensors; in the backward the others get as gradients their own forward values."""

    @staticmethod
    def forward(ctx, first, *others):
        ctx.save_for_backward(*others)
        return first.view_as(first)

    @staticmethod
    def backward(ctx, do):
        return do, *ctx.saved_tensors


def _several_rows(shape: tuple, device: str) -> list[dict]:
    B, T, channels, W = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    xs = [torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True) for D in channels]
    weights = [torch.randn(D, W, device=device, dtype=dtype, requires_grad=True) for D in channels]
    impl = None if device == "cpu" else "triton"

    def together() -> Tensor:
        return _First.apply(*(o for o, _ in short_convs(xs, weights, activation="silu", impl=impl)))

    def each() -> Tensor:
        pairs = zip(xs, weights, strict=True)
        return _First.apply(*(short_conv(x, weight, activation="silu").o for x, weight in pairs))

    forwards = {"tokenmix": together, "tokenmix, a launch each": each}
    name = f"B{B} T{T} D{'+'.join(map(str, channels))} W{W}"
    return measure("short convolutions of q, k, v", name, device, forwards, (*xs, *weights), alike=True)
