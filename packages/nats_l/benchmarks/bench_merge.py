"""Time the merge of the outputs of NAtS-L's two operations in the 380M layer: our kernel, torch eager and compiled."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenmix_core.testing.benchmarking import first_call_seconds, measure
from tokenmix_nats_l.ops import merge_operations
from tokenmix_nats_l.ops.merge.reference import merge_reference

# batch, tokens, heads, channels
SHAPES = [(8, 4096, 12, 128), (1, 32768, 12, 128)]
CPU_SHAPES = [(1, 64, 4, 32)]
KINDS = ("each normed", "the sum normed", "no weights")

_FIRST_CALL = """
import torch
from tokenmix_nats_l.ops import merge_operations
linear, softmax = (torch.randn(8, 4096, 12, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "12")
gate = torch.randn(8, 4096, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
logits = torch.randn(8, 4096, 2, 12, device="cuda", dtype=torch.bfloat16, requires_grad=True)
norms = [torch.randn(128, device="cuda", requires_grad=True) for _ in "12"]
torch.cuda.synchronize()
"""
_CALL = """
y = merge_operations(linear, softmax, gate, *norms, logits, impl="triton")
torch.autograd.grad(y, (linear, softmax, gate, *norms, logits), torch.ones_like(y))
torch.cuda.synchronize()
"""


def rows(device: str) -> list[dict]:
    """Measure on `device`; return one row per implementation, kind and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        for kind in KINDS:
            out += _rows(shape, kind, device)
    return out


def _rows(shape: tuple[int, int, int, int], kind: str, device: str) -> list[dict]:
    B, T, H, V = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def random(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, requires_grad=True)

    gamma = random(V, dtype=torch.float32)
    other = None if kind == "the sum normed" else random(V, dtype=torch.float32)
    logits = None if kind == "no weights" else random(B, T, 2, H)
    tensors = (random(B, T, H, V), random(B, T, H, V), random(B, T, H * V), gamma, other, logits)
    leaves = tuple(x for x in tensors if x is not None)
    eager = functools.partial(merge_reference, *tensors, 1e-6)
    forwards = {
        "tokenmix": functools.partial(merge_operations, *tensors, impl=None if device == "cpu" else "triton"),
        "torch, eager": eager,
    }
    if device != "cpu":
        forwards["torch, compiled"] = functools.partial(torch.compile(merge_reference), *tensors, 1e-6)
    first = None
    if shape == SHAPES[0] and kind == KINDS[0]:
        first = {"tokenmix": functools.partial(first_call_seconds, _FIRST_CALL, _CALL)}
    return measure(f"merge, {kind}", f"B{B} T{T} H{H} V{V}", device, forwards, leaves, first_calls=first)
