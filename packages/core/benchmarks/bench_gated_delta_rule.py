"""Time the gated delta rule and those of flash-linear-attention, FlashQLA, FlashInfer and attn-gym, if installed.

README.md of this folder explains how to obtain each.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops import chunk_gated_delta_rule, gated_delta_rule_step
from tokenmix_core.testing.benchmarking import (
    document_boundaries,
    first_call_seconds,
    installed,
    measure,
    measure_forms,
    measure_forward,
    measure_step,
    mixed_lengths,
)

# batch, tokens, q/k heads, value heads, key size, value size, packed
SHAPES = [
    (8, 4096, 16, 16, 128, 128, False),
    (1, 32768, 16, 16, 128, 128, False),
    (1, 32768, 2, 8, 128, 128, False),
    (1, 65536, 16, 16, 128, 128, True),
    (1, 4096, 16, 16, 128, 128, False),
    (1, 512, 16, 16, 128, 128, False),
    (16, 1024, 16, 16, 128, 128, False),
    (8, 4096, 32, 32, 64, 64, False),
    (8, 4096, 6, 6, 256, 256, False),
]
# FLA autotunes for minutes at every new number of heads and head size; of SHAPES, it only runs these (heads, head size)
FLA_SIZES = {(16, 128), (32, 64)}
CPU_SHAPES = [(2, 256, 2, 2, 64, 64, False)]
# shapes that are not in SHAPES: few and many heads, K and V of 64 to 256 and unequal, 64 tokens and more
SWEEP = [
    (1, 64, 16, 16, 128, 128, False),
    (32, 64, 16, 16, 128, 128, False),
    (1, 256, 16, 16, 128, 128, False),
    (1, 1024, 16, 16, 128, 128, False),
    (4, 2048, 16, 16, 128, 128, False),
    (1, 16384, 1, 1, 128, 128, False),
    (2, 4096, 64, 64, 128, 128, False),
    (1, 8192, 16, 32, 128, 128, False),
    (1, 4096, 64, 64, 128, 128, False),
    (1, 16384, 16, 16, 128, 128, True),
    (4, 2048, 32, 32, 64, 64, False),
    (1, 1024, 32, 32, 64, 64, False),
    (2, 4096, 16, 16, 64, 128, False),
    (2, 4096, 16, 16, 128, 64, False),
    (2, 4096, 8, 8, 128, 256, False),
    (2, 4096, 8, 8, 256, 128, False),
    (2, 4096, 8, 8, 256, 256, False),
]
CPU_SWEEP = [(1, 64, 1, 2, 16, 32, False), (1, 4096, 1, 1, 16, 16, True)]
# batch, tokens, q/k heads, value heads, head size: from FlashQLA's tables, then FlashInfer's and attn-gym's
PREFILL_SHAPES = [
    (4, 8192, 32, 32, 128),
    (1, 32768, 16, 64, 128),
    (1, 32768, 2, 8, 128),
    (1, 8192, 2, 8, 128),
    (4, 8192, 8, 32, 128),
    (8, 4096, 4, 16, 128),
    (4, 2048, 8, 32, 128),
    (1, 65536, 2, 8, 128),
    (1, 4096, 64, 64, 128),
    (1, 4096, 8, 16, 128),
]
CPU_PREFILL_SHAPES = [(2, 64, 1, 2, 16)]
# batch, heads, key size, value size
DECODE_SHAPES = [(1, 16, 128, 128), (32, 16, 128, 128), (128, 16, 128, 128)]

_QLA = "flash_qla.ops.gated_delta_rule:chunk_gated_delta_rule"
_GYM = "attn_gym.linear.gdn:chunk_gdn"

_FIRST_CALL = """
import torch
{function}
x = torch.randn(8, 4096, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
g = -torch.rand(8, 4096, 16, device="cuda")
torch.cuda.synchronize()
"""
_OURS = """
from tokenmix_core.ops import chunk_gated_delta_rule
run = lambda: chunk_gated_delta_rule(x, x, x, g, -g, qk_l2norm=True).o
"""


def rows(device: str) -> list[dict]:
    """Measure training, prefill and decoding on `device`; return one row per implementation and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        out += _training_rows(shape, device)
    for shape in PREFILL_SHAPES if device != "cpu" else CPU_PREFILL_SHAPES:
        out += _prefill_rows(shape, device)
    for shape in DECODE_SHAPES if device != "cpu" else [(2, 2, 64, 64)]:
        out += _decode_rows(shape, device)
    return out


def sweep(device: str) -> list[dict]:
    """Measure training at the shapes of `SWEEP` with all baselines that support it; FLA autotunes for 30 minutes."""
    return [row for shape in (SWEEP if device != "cpu" else CPU_SWEEP) for row in _training_rows(shape, device)]


def versions(device: str) -> list[dict]:
    """Measure the Triton and the Gluon kernels on the installed Triton, at one shape and at 100 packed documents."""
    rows = []
    for B, T, documents in ((8, 4096, False), (1, 152_497, True)) if device != "cpu" else ((1, 200, False),):
        heads, size = (16, 128) if device != "cpu" else (1, 16)
        inputs = [x.requires_grad_() for x in _inputs(B, T, heads, heads, size, size, device)]
        boundaries = document_boundaries(device) if documents else None

        def forward(impl: str, inputs=inputs, boundaries=boundaries) -> Tensor:
            return chunk_gated_delta_rule(*inputs, cu_seqlens=boundaries, qk_l2norm=True, impl=impl).o

        name = f"B{B} T{T} H{heads} K{size} V{size}" + (", 100 documents" if documents else "")
        rows += measure_forms("gated_delta_rule", name, device, forward, inputs)
    return rows


def _training_rows(shape: tuple, device: str) -> list[dict]:
    B, T, H, HV, K, V, packed = shape
    q, k, v, g, beta = (x.requires_grad_() for x in _inputs(B, T, H, HV, K, V, device))
    cu_seqlens = cu_seqlens_from_lengths(mixed_lengths(T)).to(device) if packed else None
    ours = functools.partial(chunk_gated_delta_rule, q, k, v, g, beta, cu_seqlens=cu_seqlens, qk_l2norm=True)
    forwards: dict[str, Callable[[], Tensor]] = {"tokenmix": lambda: ours().o}
    first = None
    if device != "cpu":
        # first calls of baselines, which tune and compile for minutes, are not measured
        tuned = shape in SWEEP or ((HV, V) in FLA_SIZES and H == HV)
        if tuned and (fla := installed("fla.ops.gated_delta_rule:chunk_gated_delta_rule")):
            baseline = functools.partial(fla, q, k, v, g, beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)
            forwards[_fla_name(K, V)] = lambda: baseline()[0]
        if K == V == 128 and (qla := installed(_QLA)):
            boundaries = None if cu_seqlens is None else cu_seqlens.long()
            forwards["FlashQLA, without the norm"] = lambda: qla(q, k, v, g, beta, cu_seqlens=boundaries)[0]
        if K == V and K in (64, 128) and (gym := installed(_GYM)):
            forwards["attn-gym, without the norm"] = lambda: gym(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]
        if shape == SHAPES[0]:
            call = "torch.autograd.grad(run().sum(), x)\ntorch.cuda.synchronize()"
            setup = _FIRST_CALL.format(function=_OURS)
            first = {"tokenmix": functools.partial(first_call_seconds, setup, call)}
    name = f"B{B} T{T} H{H if H == HV else f'{H}/{HV}'} K{K} V{V}" + (", 32 sequences" if packed else "")
    return measure("gated_delta_rule", name, device, forwards, (q, k, v, g, beta), first_calls=first, alike=True)


def _prefill_rows(shape: tuple, device: str) -> list[dict]:
    """Measure forward passes without gradients that return their final state."""
    B, T, H, HV, D = shape
    q, k, v, g, beta = _inputs(B, T, H, HV, D, D, device)
    final = {"output_final_state": True}
    ours = functools.partial(chunk_gated_delta_rule, q, k, v, g, beta)
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: ours(qk_l2norm=True).o,
        "tokenmix, without the norm": lambda: ours().o,
    }
    if device != "cpu":
        if (HV, D) in {(32, 128), (64, 128)} and (fla := installed("fla.ops.gated_delta_rule:chunk_gated_delta_rule")):
            normed = {"use_qk_l2norm_in_kernel": True, **final}
            forwards[_fla_name(D, D)] = lambda: fla(q, k, v, g, beta, **normed)[0]
        if qla := installed(_QLA):
            forwards["FlashQLA, without the norm"] = lambda: qla(q, k, v, g, beta, **final)[0]
        if gym := installed(_GYM):
            forwards["attn-gym, without the norm"] = lambda: gym(q, k, v, g, beta, **final)[0]
        if infer := installed("flashinfer.gdn_prefill:chunk_gated_delta_rule"):
            # FlashInfer takes packed sequences, and decays as factors instead of their logarithms
            packed = [x.flatten(0, 1) for x in (q, k, v, g.exp(), beta)]
            boundaries = torch.arange(0, B * T + 1, T, device=device)
            prefill = functools.partial(infer, *packed, **final, cu_seqlens=boundaries)
            forwards["FlashInfer"] = lambda: prefill(use_qk_l2norm_in_kernel=True)[0].view_as(v)
            forwards["FlashInfer, without the norm"] = lambda: prefill()[0].view_as(v)
    name = f"B{B} T{T} H{H if H == HV else f'{H}/{HV}'} K{D} V{D}"
    return measure_forward("gated_delta_rule, prefill", name, device, forwards)


def _fla_name(K: int, V: int) -> str:
    """Return FLA's name in rows; FLA itself calls FlashQLA if that is installed and supports the sizes."""
    over = K == V == 128 and importlib.util.find_spec("flash_qla") is not None
    return "flash-linear-attention" + (" over FlashQLA" if over else "")


def _decode_rows(shape: tuple, device: str) -> list[dict]:
    B, H, K, V = shape
    q, k, v, g, beta = (x[:, 0].contiguous() for x in _inputs(B, 1, H, H, K, V, device))
    state = torch.randn(B, H, K, V, device=device)
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: gated_delta_rule_step(q, k, v, g, beta, state, qk_l2norm=True)
    }
    if device != "cpu" and (fla := installed("fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule")):
        # pass arguments by name: the fifth one by position is another gate, of shape [B, T, H, K]
        token = {name: x.unsqueeze(1) for name, x in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True)}
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        forwards["flash-linear-attention"] = lambda: fla(**token, **options)[0][:, 0]
    return measure_step("gated_delta_rule_step", f"B{B} H{H} K{K} V{V}", device, forwards)


def _inputs(B: int, T: int, H: int, HV: int, K: int, V: int, device: str) -> list[Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(B, T, heads, size, device=device, dtype=dtype) for heads, size in ((H, K), (H, K), (HV, V)))
    # vectors of length one, for baselines that omit the norm
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [q, k, v, -0.1 * torch.rand(B, T, HV, device=device), torch.rand(B, T, HV, device=device)]
