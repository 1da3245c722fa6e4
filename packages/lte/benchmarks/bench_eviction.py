"""Time one step of eviction, its eager form, and the attention that follows it, in the 1.4B model's layer."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenmix_core.ops import attention_decode
from tokenmix_core.testing.benchmarking import measure_step
from tokenmix_lte.ops import evict_step

# batch, key heads, query heads, head size
SHAPES = [(1, 8, 32, 64), (32, 8, 32, 64), (128, 8, 32, 64)]
CPU_SHAPES = [(2, 2, 4, 16)]
WINDOW, CAP, REACH = 768, 512, 76


def rows(device: str) -> list[dict]:
    """Return measurements on `device` with a full state; on a GPU steps are replayed as CUDA graphs."""
    return [row for shape in (CPU_SHAPES if device == "cpu" else SHAPES) for row in _rows(shape, device)]


def _rows(shape: tuple[int, int, int, int], device: str) -> list[dict]:
    N, H, HQ, K = shape
    S, dtype = WINDOW + CAP, torch.float32 if device == "cpu" else torch.bfloat16
    q, *new = (torch.randn(N, heads, K, device=device, dtype=dtype) for heads in (HQ, H, H, H))
    keys, values = (torch.randn(N, H, S, K, device=device, dtype=dtype) for _ in range(2))
    lengths = torch.full((N, H), S, dtype=torch.int32, device=device)
    ages = torch.arange(CAP, dtype=torch.int32, device=device).expand(N, H, CAP).contiguous()
    memory = keys, values, lengths, torch.rand(N, H, S, device=device), ages
    raws = torch.randn(N, REACH, H, K, device=device, dtype=dtype)
    before = torch.full((N,), 3 * S, device=device)
    step = functools.partial(evict_step, *new, *memory, raws, before, window=WINDOW, sinks=4)
    folded = (q.view(N * H, 1, HQ // H, K), *(x.flatten(0, 1).unsqueeze(2) for x in (keys, values)), lengths.flatten())

    def stepped(**options) -> Tensor:
        step(**options)
        return keys

    name = f"B{N} H{H} K{K} W{WINDOW} cap{CAP}"
    forwards = {
        "tokenmix": functools.partial(stepped, impl=None if device == "cpu" else "triton"),
        "tokenmix, eager": functools.partial(stepped, impl="reference"),
    }
    found = measure_step("eviction step", name, device, forwards)
    return found + measure_step("attention after it", name, device, {"tokenmix": lambda: attention_decode(*folded).o})
