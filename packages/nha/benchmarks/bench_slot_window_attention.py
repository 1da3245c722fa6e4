"""Time slot-window attention, FLA's `chunk_gsa` (only slots, in two passes) and cuDNN's causal attention."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmix_core.ops import attention
from tokenmix_core.testing.benchmarking import (
    first_call_seconds,
    installed,
    interleaved_medians,
    measure,
    measure_forms,
)
from tokenmix_nha.ops import SlotWindowState, slot_window_attention, slot_window_attention_step

# batch, tokens, heads, head size, slots, window
SHAPES = [
    (8, 4096, 16, 128, 32, 32),
    (8, 4096, 16, 128, 64, 32),
    (8, 4096, 16, 128, 32, 0),
    (8, 4096, 16, 128, 64, 0),
    (1, 32768, 16, 128, 32, 32),
    (16, 2048, 16, 128, 32, 32),
    (1, 131072, 16, 128, 32, 32),
    (8, 4096, 16, 128, 64, 4096),
]
CPU_SHAPES = [(2, 128, 2, 32, 8, 16)]
# batch, heads, head size, slots, window
DECODE_SHAPES = [(1, 16, 128, 64, 32), (32, 16, 128, 64, 32), (128, 16, 128, 64, 32)]
# FLA autotunes for minutes at the first call with each number of slots, so it runs only for these shapes
FLA_SHAPES = {SHAPES[2], SHAPES[3]}
# beyond this length quadratic attention takes seconds
_ATTENTION_TOKENS = 32768

_FIRST_CALL = """
import torch
from tokenmix_nha.ops import slot_window_attention
q, k, v = (torch.randn(8, 4096, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
f = (-torch.rand(8, 4096, 16, 64, device="cuda")).requires_grad_()
torch.cuda.synchronize()
"""
_CALL = """
o = slot_window_attention(q, k, v, f, window=32)[0]
torch.autograd.grad(o, (q, k, v, f), torch.ones_like(o))
torch.cuda.synchronize()
"""


def rows(device: str) -> list[dict]:
    """Measure training and decoding on `device`; return one row per implementation and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        out += _training_rows(shape, device)
    for shape in DECODE_SHAPES if device != "cpu" else [(2, 2, 32, 8, 16)]:
        out += _decode_rows(shape, device)
    return out


def versions(device: str) -> list[dict]:
    """Measure the Triton and the Gluon kernels on the installed Triton."""
    B, T, H, D, M, window = SHAPES[0] if device != "cpu" else CPU_SHAPES[0]
    q, k, v = (_random(B, T, H, D, device=device).requires_grad_() for _ in range(3))
    f = (torch.nn.functional.logsigmoid(torch.randn(B, T, H, M, device=device)) / 8).requires_grad_()

    def forward(impl: str) -> Tensor:
        return slot_window_attention(q, k, v, f, window=window, output_final_state=False, impl=impl).o

    name = f"B{B} T{T} H{H} D{D} M{M} w{window}"
    return measure_forms("slot-window attention", name, device, forward, (q, k, v, f))


def _training_rows(shape: tuple, device: str) -> list[dict]:
    B, T, H, D, M, window = shape
    q, k, v = (_random(B, T, H, D, device=device).requires_grad_() for _ in range(3))
    f = (torch.nn.functional.logsigmoid(torch.randn(B, T, H, M, device=device)) / 8).requires_grad_()
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: slot_window_attention(q, k, v, f, window=window, output_final_state=False).o
    }
    if shape in FLA_SHAPES and device != "cpu" and (fla := installed("fla.ops.gsa:chunk_gsa")):
        forwards["FLA chunk_gsa"] = lambda: fla(q, k, v, 1 - f.exp().to(q.dtype), f, scale=D**-0.5)[0]
    name = f"B{B} T{T} H{H} D{D} M{M} w{window}"
    first = {"tokenmix": functools.partial(first_call_seconds, _FIRST_CALL, _CALL)} if shape == SHAPES[1] else None
    # no token leaves a window of T, so the gates get no gradient
    inputs = (q, k, v) if window >= T else (q, k, v, f)
    out = measure("slot-window attention", name, device, forwards, inputs, first_calls=first)
    if T <= _ATTENTION_TOKENS:
        causal = {"causal attention": lambda: attention(q, k, v).o}
        out += measure("slot-window attention", name, device, causal, (q, k, v))
    return out


def _decode_rows(shape: tuple, device: str) -> list[dict]:
    B, H, D, M, window = shape
    q, k, v = (_random(B, H, D, device=device) for _ in range(3))
    f = -torch.rand(B, H, M, device=device)
    state = SlotWindowState.zeros(B, H, M, D, D, window, dtype=q.dtype, device=device)
    runs = {"tokenmix": lambda: slot_window_attention_step(q, k, v, f, state)}
    none = dict.fromkeys(("fwdbwd_ms", "peak_mb", "host_us", "first_call_s"))
    name = f"B{B} H{H} D{D} M{M} w{window}"
    times = interleaved_medians(runs, device)
    return [
        {"op": "slot-window attention, one step", "shape": name, "impl": impl, "fwd_ms": ms, **none}
        for impl, ms in times.items()
    ]


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
