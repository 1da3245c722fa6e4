"""Time LTE's scorer by our kernels and reference, and by torch's grouped convolutions in float32 and in k's dtype."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops.dispatch import device_limit
from tokenmix_core.testing.benchmarking import first_call_seconds, measure, mixed_lengths
from tokenmix_lte.ops import retention_logits
from tokenmix_lte.ops.scorer.reference import retention_logits_reference
from tokenmix_lte.scorers import ConvScorer

# batch, tokens, key heads, head size, packed: the paper's 1.4B and 0.4B layers
SHAPES = [(8, 4096, 8, 64, False), (8, 4096, 16, 64, False), (1, 32768, 8, 64, False), (1, 32768, 8, 64, True)]
# scoring in decoding: 64 tokens and the 12 tokens of their context
LAZY = [(32, 76, 8, 64, False), (1, 76, 8, 64, False)]
CPU_SHAPES = [(1, 64, 2, 16, False)]
DROPOUTS = (0.0, 0.1)

_FIRST_CALL = """
import torch
from tokenmix_lte.scorers import ConvScorer
scorer = ConvScorer(8, 128, dropout=0.1, causal=False, impl={impl!r}).cuda()
k, v = (torch.randn(8, 4096, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
torch.cuda.synchronize()
"""
_CALL = """
logits = scorer(k, v)
torch.autograd.grad(logits, (k, v, *scorer.parameters()), torch.ones_like(logits))
torch.cuda.synchronize()
"""


def grouped_convolutions(scorer: ConvScorer, k: Tensor, v: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Compute the scorer by torch's convolutions, with a group for each head, without sequence boundaries."""
    x = torch.cat((k, v), -1).flatten(2).transpose(1, 2).to(dtype)
    for kernel, bias in zip(scorer.kernels, scorer.biases, strict=True):
        x = F.dropout(x, dropout)
        weight, bias = kernel.flatten(0, 1).to(dtype), bias.flatten().to(dtype)
        x = F.silu(F.conv1d(x, weight, bias, padding=2, dilation=2, groups=len(kernel)))
    x = x.unflatten(1, (len(scorer.weight), -1)).float()
    return torch.einsum("bhct,hc->bth", x, scorer.weight) + scorer.bias


def rows(device: str) -> list[dict]:
    """Return measurements on `device`, one row for each implementation and shape."""
    cpu, out = device == "cpu", []
    for shape in CPU_SHAPES if cpu else SHAPES + LAZY:
        for dropout in DROPOUTS[:1] if shape in LAZY else DROPOUTS:
            out += _rows(shape, dropout, device)
    return out


def _rows(shape: tuple[int, int, int, int, bool], dropout: float, device: str) -> list[dict]:
    B, T, H, K, packed = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    scorer = ConvScorer(H, 2 * K, dropout=dropout, causal=False).to(device)
    k, v = (torch.randn(B, T, H, K, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    cu_seqlens = cu_seqlens_from_lengths(mixed_lengths(T)).to(device) if packed else None
    convs = list(zip(scorer.kernels, scorer.biases, strict=True))
    call = functools.partial(retention_logits, k, v, convs, scorer.weight, scorer.bias, cu_seqlens=cu_seqlens)
    forwards = {
        "tokenmix": functools.partial(call, dropout=dropout),
        "tokenmix, eager": functools.partial(call, dropout=dropout, impl="reference"),
    }
    if gluon := device_limit(torch.device(device)) is None:
        forwards["tokenmix, Gluon"] = functools.partial(call, dropout=dropout, impl="gluon")
    if not packed:
        forwards["torch conv1d, float32"] = lambda: grouped_convolutions(scorer, k, v, dropout, torch.float32)
        forwards["torch conv1d, dtype of k"] = lambda: grouped_convolutions(scorer, k, v, dropout, dtype)
    if device != "cpu" and not dropout:
        eager = torch.compile(retention_logits_reference)
        forwards["tokenmix, eager, compiled"] = functools.partial(
            eager, k, v, convs, scorer.weight, scorer.bias, offsets=scorer.offsets, cu_seqlens=cu_seqlens
        )
    first = None
    if shape == SHAPES[0] and dropout:
        forms = {"tokenmix": None} | ({"tokenmix, Gluon": "gluon"} if gluon else {})
        first = {
            name: functools.partial(first_call_seconds, _FIRST_CALL.format(impl=impl), _CALL)
            for name, impl in forms.items()
        }
    name = f"B{B} T{T} H{H} K{K}" + (", 32 sequences" if packed else "")
    leaves = (k, v, *scorer.parameters())
    return measure(f"scorer, dropout {dropout:g}", name, device, forwards, leaves, first_calls=first)
