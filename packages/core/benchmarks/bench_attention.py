"""Time attention and its baselines: cuDNN and FlashAttention-2 through torch, flash-attn 2 or 4, FlexAttention."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmix_core._utils.optional import is_installed
from tokenmix_core.chunking import cu_seqlens_from_lengths
from tokenmix_core.ops import attention, attention_decode
from tokenmix_core.ops.softmax_attention.backends import flash_attention
from tokenmix_core.ops.softmax_attention.implementations import load
from tokenmix_core.ops.softmax_attention.types import Mask
from tokenmix_core.testing.benchmarking import (
    document_boundaries,
    first_call_seconds,
    interleaved_medians,
    measure,
    measure_forms,
    measure_step,
    mixed_lengths,
)

# batch, tokens, query heads, key heads, K, V, window, packed
SHAPES = [
    (8, 4096, 16, 16, 128, 128, None, False),
    (1, 32768, 16, 16, 128, 128, None, False),
    (8, 4096, 32, 8, 128, 128, None, False),
    (8, 4096, 32, 32, 64, 64, None, False),
    (1, 1024, 16, 16, 128, 128, None, False),
    (8, 4096, 16, 16, 128, 128, 1024, False),
    (1, 32768, 16, 16, 128, 128, 1024, False),
    (8, 4096, 32, 8, 128, 128, 1024, False),
    (8, 4096, 32, 32, 64, 64, 1024, False),
    (8, 4096, 16, 16, 128, 128, 128, False),
    (8, 4096, 32, 8, 64, 64, None, False),
    (8, 4096, 32, 8, 64, 64, 768, False),
]
CPU_SHAPES = [(2, 256, 4, 2, 32, 32, None, False), (2, 256, 4, 2, 32, 32, 64, False)]
# shapes that are not in SHAPES: few and many heads, K and V of 64 to 256 and unequal, 64 tokens and more, packed
SWEEP = [
    (1, 64, 16, 16, 128, 128, None, False),
    (32, 64, 16, 16, 128, 128, None, False),
    (1, 512, 16, 16, 128, 128, None, False),
    (4, 2048, 16, 16, 128, 128, None, False),
    (1, 8192, 1, 1, 128, 128, None, False),
    (1, 4096, 64, 8, 128, 128, None, False),
    (4, 2048, 32, 32, 64, 64, None, False),
    (2, 4096, 16, 16, 128, 64, None, False),
    (2, 4096, 8, 8, 256, 256, None, False),
    (1, 16384, 16, 16, 128, 128, None, True),
    (1, 512, 16, 16, 128, 128, 256, False),
    (4, 2048, 16, 16, 128, 128, 512, False),
    (1, 16384, 1, 1, 128, 128, 1024, False),
    (2, 4096, 64, 8, 128, 128, 1024, False),
    (1, 8192, 8, 8, 64, 64, 256, False),
    (2, 4096, 16, 16, 128, 64, 1024, False),
    (2, 4096, 8, 8, 256, 256, 1024, False),
    (1, 16384, 16, 16, 128, 128, 1024, True),
]
CPU_SWEEP = [(1, 64, 2, 1, 16, 32, 16, False), (1, 4096, 1, 1, 16, 16, 64, True)]
# the same fields without V: shapes at which FlashAttention-4 is faster than our kernels
OWN = [
    (8, 4096, 16, 16, 128, 1024, False),
    (8, 4096, 32, 8, 64, None, False),
    (8, 4096, 32, 8, 64, 768, False),
    (1, 65536, 32, 4, 64, 256, False),
    (1, 152_497, 16, 16, 128, None, True),
    (1, 152_497, 16, 16, 128, 512, True),
]
# the same fields as in OWN: shapes at which the forward and the backward pass are timed separately
PASSES = [
    (8, 4096, 32, 8, 64, None, False),
    (8, 4096, 32, 8, 64, 768, False),
    (1, 65536, 32, 4, 64, 256, False),
    (8, 4096, 16, 16, 64, None, False),
    (1, 32768, 32, 8, 64, None, False),
    (4, 1024, 16, 16, 64, None, False),
    (1, 152_497, 32, 8, 64, None, True),
    (8, 4096, 16, 16, 128, None, False),
    (1, 32768, 16, 16, 128, None, False),
    (2, 2048, 16, 16, 128, None, False),
    (8, 4096, 16, 16, 128, 512, False),
    (8, 4096, 16, 16, 128, 1024, False),
    (1, 32768, 16, 16, 128, 1024, False),
    (1, 152_497, 16, 16, 128, None, True),
    (1, 152_497, 16, 16, 128, 512, True),
]
# batch, cache entries per sequence, query heads, key heads, head size
DECODE_SHAPES = [(1, 32768, 32, 8, 128), (32, 4096, 32, 8, 128), (32, 4096, 16, 16, 128), (128, 2048, 32, 8, 128)]

_FIRST_CALL = """
import torch
from tokenmix_core.ops import attention
x = torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
"""


def rows(device: str) -> list[dict]:
    """Measure attention and decoding on `device`; return one row per implementation and shape."""
    out = []
    for shape in SHAPES if device != "cpu" else CPU_SHAPES:
        out += _training_rows(shape, device)
    for shape in DECODE_SHAPES if device != "cpu" else [(2, 256, 4, 2, 32)]:
        out += _decode_rows(shape, device)
    return out


def sweep(device: str) -> list[dict]:
    """Measure training at the shapes of `SWEEP`, with every baseline that supports them."""
    return [row for shape in (SWEEP if device != "cpu" else CPU_SWEEP) for row in _training_rows(shape, device)]


def own(device: str) -> Iterator[dict]:
    """Measure our own kernels and FlashAttention-4 at `OWN`, since the default may itself run FlashAttention-4."""
    shapes = OWN if device != "cpu" else [(1, 128, 2, 1, 16, 32, False), (1, 300, 2, 1, 16, None, True)]
    for shape in shapes:
        yield from _own_rows(*shape, device=device)


def _own_rows(
    B: int, T: int, HQ: int, H: int, K: int, window: int | None, packed: bool, *, device: str
) -> list[dict]:  # fmt: skip
    q, k, v = (_random(B, T, heads, K, device=device).requires_grad_() for heads in (HQ, H, H))
    documents = document_boundaries(device, min(100, T // 64), T) if packed else None
    lengths = None if documents is None else documents.diff()
    names = {"gluon": "tokenmix", "triton": "tokenmix, portable"} if device != "cpu" else {"reference": "tokenmix"}

    def forward(impl: str) -> Tensor:
        return attention(q, k, v, window=window, cu_seqlens=documents, impl=impl).o

    forwards: dict[str, Callable[[], Tensor]] = {name: functools.partial(forward, impl) for impl, name in names.items()}
    if device != "cpu" and flash_attention() == 4:
        forwards["FlashAttention-4"] = _flash(q, k, v, window, lengths)
    mask = "causal" if window is None else f"window {window}"
    name = _name(B, T, HQ, H, K) + (f", {len(lengths)} documents" if lengths is not None else "")
    return measure(f"attention, {mask}, own kernels", name, device, forwards, (q, k, v), alike=True)


def passes(device: str) -> Iterator[dict]:
    """Time forward and backward passes separately, ours and libraries'; all backward passes get our o and lse."""
    shapes = PASSES if device != "cpu" else [(1, 128, 2, 2, 16, None, False), (1, 300, 2, 1, 16, 32, True)]
    for shape in shapes:
        yield from _passes_rows(*shape, device=device)


def _passes_rows(
    B: int, T: int, HQ: int, H: int, K: int, window: int | None, packed: bool, *, device: str
) -> list[dict]:  # fmt: skip
    q, k, v, do = (_random(B, T, heads, K, device=device) for heads in (HQ, H, H, HQ))
    boundaries = document_boundaries(device, min(100, T // 64), T) if packed else None
    impls = {"tokenmix": None, "cuDNN": "sdpa"} if device != "cpu" else {"tokenmix": "reference", "torch": "sdpa"}
    if device != "cpu" and (window is not None or packed):
        del impls["cuDNN"]
    if device != "cpu" and flash_attention() == 4:
        impls["FlashAttention-4"] = "flash_attn"
    call = dict(q=q, k=k, v=v, cu_seqlens=boundaries, mask=Mask(True, window, 0), scale=K**-0.5)
    backends = {name: load(impl) for name, impl in impls.items()}
    o, lse = (x.contiguous() for x in backends["tokenmix"].forward(**call))
    forwards = {name: functools.partial(backend.forward, **call) for name, backend in backends.items()}
    given = dict(o=o, lse=lse, do=do, dlse=None)
    backwards = {name: functools.partial(backend.backward, **call, **given) for name, backend in backends.items()}
    forward, backward = (interleaved_medians(runs, device) for runs in (forwards, backwards))
    op = "attention, causal" if window is None else f"attention, window {window}"
    name = _name(B, T, HQ, H, K) + (f", {len(boundaries) - 1} documents" if boundaries is not None else "")
    return [{"op": op, "shape": name, "impl": x, "fwd_ms": forward[x], "bwd_ms": backward[x]} for x in impls]


def versions(device: str) -> list[dict]:
    """Measure the Triton and the Gluon kernels on the installed Triton."""
    B, T, H, K, window = (8, 4096, 16, 128, 1024) if device != "cpu" else (1, 128, 1, 16, 32)
    q, k, v = (_random(B, T, H, K, device=device).requires_grad_() for _ in range(3))

    def forward(impl: str) -> Tensor:
        return attention(q, k, v, window=window, impl=impl).o

    return measure_forms(f"attention, window {window}", _name(B, T, H, H, K), device, forward, (q, k, v))


def _training_rows(shape: tuple, device: str) -> list[dict]:
    B, T, HQ, H, K, V, window, packed = shape
    q, k, v = (_random(B, T, heads, size, device=device).requires_grad_() for heads, size in ((HQ, K), (H, K), (H, V)))
    lengths = mixed_lengths(T) if packed else None
    cu_seqlens = None if lengths is None else cu_seqlens_from_lengths(lengths).to(device)
    ours = "tokenmix"
    forwards: dict[str, Callable[[], Tensor]] = {
        ours: lambda: attention(q, k, v, window=window, cu_seqlens=cu_seqlens).o
    }
    if device != "cpu":
        if window is None and not packed:
            forwards["cuDNN (SDPA)"] = functools.partial(_sdpa, q, k, v, SDPBackend.CUDNN_ATTENTION)
            forwards["FlashAttention-2 (SDPA)"] = functools.partial(_sdpa, q, k, v, SDPBackend.FLASH_ATTENTION)
        if flash_attention() and K == V:
            name = "FlashAttention-4" if flash_attention() == 4 else "flash-attn"
            forwards[name] = _flash(q, k, v, window, lengths)
        forwards["FlexAttention, compiled"] = _flex(q, k, v, window, lengths)
    mask = f", window={window}" if window else ""
    call = f"o = attention(x, x, x{mask}).o\ntorch.autograd.grad(o, x, torch.ones_like(o))\ntorch.cuda.synchronize()"
    measured = device != "cpu" and window is not None and shape in SHAPES
    first = {ours: functools.partial(first_call_seconds, _FIRST_CALL, call)} if measured else None
    op = "attention, causal" if window is None else f"attention, window {window}"
    name = _name(B, T, HQ, H, K) + (f" V{V}" if V != K else "") + (", 32 sequences" if packed else "")
    return measure(op, name, device, forwards, (q, k, v), first_calls=first, alike=True)


def _decode_rows(shape: tuple, device: str) -> list[dict]:
    B, S, HQ, H, K = shape
    q, k, v = (
        _random(B, 1, HQ, K, device=device),
        _random(B, S, H, K, device=device),
        _random(B, S, H, K, device=device),
    )
    lengths = torch.full((B,), S, dtype=torch.int32, device=device)
    forwards: dict[str, Callable[[], Tensor]] = {"tokenmix": lambda: attention_decode(q, k, v, lengths).o}
    if device != "cpu":
        forwards["FlashAttention-2 (SDPA)"] = functools.partial(
            _sdpa, q, k, v, SDPBackend.FLASH_ATTENTION, causal=False
        )
        if is_installed("flash_attn"):
            from flash_attn import flash_attn_with_kvcache

            split = functools.partial(flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, causal=True)
            forwards["flash-attn, split KV"] = split
    return measure_step("attention_decode", f"B{B} S{S} H{HQ}/{H} K{K}", device, forwards)


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)


def _name(B: int, T: int, HQ: int, H: int, K: int) -> str:
    return f"B{B} T{T} H{HQ if HQ == H else f'{HQ}/{H}'} K{K}"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, causal: bool = True) -> Tensor:
    grouped = q.shape[2] != k.shape[2]
    with sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int | None, lengths: Tensor | None) -> Callable[[], Tensor]:
    module = importlib.import_module("flash_attn.cute" if flash_attention() == 4 else "flash_attn")
    anything = None if flash_attention() == 4 else -1
    options = {"causal": True, "window_size": (anything, anything) if window is None else (window - 1, 0)}

    def output(result: Tensor | tuple) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    if lengths is None:
        return lambda: output(module.flash_attn_func(q, k, v, **options))
    boundaries, longest = cu_seqlens_from_lengths(lengths).int().to(q.device), int(lengths.max())
    options |= {
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    return lambda: output(module.flash_attn_varlen_func(q[0], k[0], v[0], **options))[None]


def _flex(q: Tensor, k: Tensor, v: Tensor, window: int | None, lengths: Tensor | None) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T = q.shape[1]
    sequence = torch.zeros(T, dtype=torch.int64) if lengths is None else torch.arange(32).repeat_interleave(lengths)
    sequence = sequence.to(q.device)

    def seen(b, h, i, j):
        inside = (j <= i) if window is None else (j <= i) & (i - j < window)
        return inside if lengths is None else inside & (sequence[i] == sequence[j])

    block_mask = create_block_mask(seen, None, None, T, T, device=q.device.type)
    # torch limits how often it recompiles a function, and earlier shapes count, so reset it for each shape
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = q.shape[2] != k.shape[2]
    return lambda: compiled(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=block_mask, enable_gqa=grouped
    ).transpose(1, 2)
