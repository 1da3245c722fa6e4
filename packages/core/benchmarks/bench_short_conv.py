"""The short convolution beside FLA's and torch's grouped convolution."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.ops import short_conv
from tokenmix_core.testing.benchmarking import first_call_seconds, measure

# batch, tokens, channels, width
SHAPES = [(8, 4096, 4096, 4), (1, 32768, 4096, 4)]
CPU_SHAPES = [(2, 256, 64, 4)]

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
    """Measurements on `device`, one row an implementation and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        out += _rows(shape, device)
    return out


def _rows(shape: tuple, device: str) -> list[dict]:
    B, T, D, W = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(D, W, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(D, device=device, dtype=dtype, requires_grad=True)
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: short_conv(x, weight, bias, activation="silu").o,
        "torch conv1d": lambda: F.silu(F.conv1d(F.pad(x.mT, (W - 1, 0)), weight[:, None], bias, groups=D)).mT,
    }
    if device != "cpu" and importlib.util.find_spec("fla") is not None:
        from fla.modules.causal_conv1d import causal_conv1d

        forwards["FLA causal_conv1d"] = lambda: causal_conv1d(x, weight, bias, activation="silu")[0]
    first = {"tokenmix": functools.partial(first_call_seconds, _FIRST_CALL, _CALL)} if shape == SHAPES[0] else None
    return measure("short convolution", f"B{B} T{T} D{D} W{W}", device, forwards, (x, weight, bias), first_calls=first)
