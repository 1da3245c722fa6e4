"""Time attention to a window and retained keys at LTE's shapes, wider windows and full attention (Figure 4a)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import attention, kept_attention
from tokenmix_core.ops.types import Impl
from tokenmix_core.testing.benchmarking import measure
from tokenmix_lte.eviction import eviction_times


class Case(NamedTuple):
    """Sizes of a call: `kept` random keys per head have positive scores; evaluation retains `cap` of them.

    `wide` is the window of the baselines.
    """

    B: int
    T: int
    HQ: int = 32
    H: int = 8
    K: int = 64
    window: int = 768
    kept: int = 512
    cap: int = 512
    wide: int = 1024


# training with the layers of 1.4B (8 key heads) and 0.4B (16); LENGTHS are those of prompts as in Figure 4a
CASES = [Case(8, 4096), Case(1, 32768), Case(8, 4096, 16, 16), Case(1, 131072)]
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
CPU_CASES = [Case(1, 128, 4, 2, 16, 32, 16, 8, 48)]


def rows(device: str) -> Iterator[dict]:
    """Measure training at the paper's shapes, then prefill by length."""
    for case in CASES if device != "cpu" else CPU_CASES:
        yield from _training(case, device)
    for case in [Case(1, T, kept=min(T, 2048), cap=256) for T in LENGTHS] if device != "cpu" else CPU_CASES:
        yield from _prefill(case, device)


def _training(case: Case, device: str) -> Iterator[dict]:
    q, k, v, keep, _ = _inputs(case, device)
    forwards: dict[str, Callable[[], Tensor]] = {
        "tokenmix": lambda: kept_attention(q, k, v, keep, window=case.window).o,
        "everything kept, tokenmix": lambda: kept_attention(q, k, v, torch.ones_like(keep), window=case.window).o,
    }
    yield from measure("kept_attention, LTE", _name(case), device, forwards | _baselines(case, q, k, v), (q, k, v),
                       repeats=_repeats(device))  # fmt: skip


def _prefill(case: Case, device: str) -> Iterator[dict]:
    """Measure prefill as in evaluation, with eviction."""
    q, k, v, keep, ranks = _inputs(case, device)
    until = eviction_times(ranks, case.cap, case.window)

    def timed(impl: Impl | None) -> Tensor:
        times = eviction_times(ranks, case.cap, case.window, impl=impl)
        return kept_attention(q, k, v, keep, window=case.window, until=times).o

    forwards = {
        "tokenmix": lambda: kept_attention(q, k, v, keep, window=case.window, until=until).o,
        "with eviction times, tokenmix": lambda: timed(None),
        "with eviction times by the matrix, tokenmix": lambda: timed("reference"),
    }
    shape = f"{_name(case)}, {case.cap} held"
    yield from measure("kept_attention, LTE prefill", shape, device, forwards | _baselines(case, q, k, v), (q, k, v),
                       repeats=_repeats(device))  # fmt: skip


def _inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, the mask of retained keys, and their ranks."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(case.B, case.T, heads, case.K, device=device, dtype=dtype).requires_grad_()
        for heads in (case.HQ, case.H, case.H)
    )
    ranks = torch.rand(case.B, case.T, case.H, device=device)
    keep = ranks.argsort(1).argsort(1) >= case.T - case.kept
    return q, k, v, keep, ranks.masked_fill(~keep, -torch.inf)


def _baselines(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return baselines: a window alone and full attention, by our kernels and, if installed, FlashAttention-2."""
    baselines: dict[str, Callable[[], Tensor]] = {
        f"window {case.wide}, tokenmix": lambda: attention(q, k, v, window=case.wide).o,
        "all keys, tokenmix": lambda: attention(q, k, v).o,
    }
    try:
        flash = importlib.import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError):
        return baselines
    sides = (case.wide - 1, 0)
    baselines[f"window {case.wide}, flash-attn"] = lambda: flash(q, k, v, causal=True, window_size=sides)
    baselines["all keys, flash-attn"] = lambda: flash(q, k, v, causal=True)
    return baselines


def _name(case: Case) -> str:
    return f"B{case.B} T{case.T} H{case.HQ}/{case.H} K{case.K}, window {case.window}, {case.kept} kept"


def _repeats(device: str) -> int:
    return 3 if device == "cpu" else 50
