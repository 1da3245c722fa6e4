"""Softmax attention in eager PyTorch: the specification of outputs and gradients, on any device, also in float64.

Each block of queries is computed with only the keys that its rows may see: memory is linear in the sequence length, and
time is linear in the window.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.ops.padding import drops_padding
from tokenmix_core.ops.types import AttentionOutput

# maximum number of scores of one block of queries: 2²⁴ scores take 64 MiB in float32
_BLOCK_SCORES = 1 << 24


@drops_padding("q", "k", "v", results=2)
def attention_reference(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
) -> AttentionOutput:
    """Compute attention as `attention` defines it, differentiable by autograd.

    Scores, softmax and log-sum-exp are in float32 at least; probabilities are rounded to the dtype of v before the
    matmul with v, as on Tensor Cores.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    found = []
    for queries, keys in sequences(q.shape[1], k.shape[1], cu_seqlens):
        for block in _blocks(q[:, queries], k[:, keys], causal, window, sinks):
            b_q, b_k, b_v = q[:, queries][:, block.rows], block.gather(k[:, keys]), block.gather(v[:, keys])
            found.append(attended(b_q, b_k, b_v, block.mask, scale))
    return joined(found, q, v)


@torch.no_grad()
@drops_padding("q", "k", "v", "o", "do", "dlse", results=3)
def attention_reference_backward(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    o: Float[Tensor, "B TQ HQ V"],
    do: Float[Tensor, "B TQ HQ V"],
    dlse: Float[Tensor, "B TQ HQ"] | None,
    *,
    causal: bool,
    window: int | None,
    sinks: int,
    scale: float,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by the formulas of the kernels (README.md), block by block."""
    delta = (wide(o) * do).sum(-1)
    delta = delta if dlse is None else delta - dlse
    dq, dk, dv = (torch.zeros_like(wide(x)) for x in (q, k, v))
    heads, group = k.shape[2], q.shape[2] // k.shape[2]
    for queries, keys in sequences(q.shape[1], k.shape[1], cu_seqlens):
        for block in _blocks(q[:, queries], k[:, keys], causal, window, sinks):
            b_q, b_k, b_v = q[:, queries][:, block.rows], block.gather(k[:, keys]), block.gather(v[:, keys])
            b_do = wide(do[:, queries][:, block.rows]).unflatten(2, (heads, group))
            b_delta = delta[:, queries][:, block.rows].unflatten(2, (heads, group)).permute(0, 2, 3, 1).unsqueeze(-1)
            p, _ = softmax(b_q, b_k, block.mask, scale)
            ds = p * (torch.einsum("bihgv,bjhv->bhgij", b_do, wide(b_v)) - b_delta) * scale
            dq[:, queries][:, block.rows] = torch.einsum("bhgij,bjhk->bihgk", ds, wide(b_k)).flatten(2, 3)
            b_q = wide(b_q).unflatten(2, (heads, group))
            block.scatter(dk[:, keys], torch.einsum("bhgij,bihgk->bjhk", ds, b_q))
            block.scatter(dv[:, keys], torch.einsum("bhgij,bihgv->bjhv", p, b_do))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attention_decode_reference(
    q: Float[Tensor, "B TQ HQ K"],
    k_cache: Float[Tensor, "B S H K"],
    v_cache: Float[Tensor, "B S H V"],
    cache_seqlens: Int[Tensor, "B"],
    *,
    window: int | None = None,
    sinks: int = 0,
    scale: float | None = None,
) -> AttentionOutput:
    """Compute attention of the last TQ tokens of each sequence to its cache, as `attention_decode` defines it."""
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    tq, keys = q.shape[1], k_cache.shape[1]
    if not q.is_cuda:
        keys = int(cache_seqlens.max()) if len(cache_seqlens) else 0
    k, v = k_cache[:, :keys], v_cache[:, :keys]
    o_k = torch.arange(keys, device=q.device)
    o_q = cache_seqlens[:, None] - tq + torch.arange(tq, device=q.device)
    mask = visible(o_q.flatten(), o_k, True, window, sinks).view(len(q), 1, 1, tq, keys)
    # zero the unused rows of the cache, which may hold NaN: 0 times NaN would be NaN
    v = v.masked_fill((o_k >= cache_seqlens[:, None])[:, :, None, None], 0.0)
    return attended(q, k, v, mask, scale)


def paged_attention_decode_reference(
    q: Float[Tensor, "B TQ HQ K"],
    k_pages: Float[Tensor, "B P page K"],
    v_pages: Float[Tensor, "B P page V"],
    page_table: Int[Tensor, "B H columns"],
    lengths: Int[Tensor, "B H"],
    *,
    scale: float | None = None,
    slots: Int[Tensor, "B"] | None = None,
) -> AttentionOutput:
    """Compute attention of the last TQ tokens to lists of pages, as `paged_attention_decode` defines it."""
    (B, TQ, HQ, K), H = q.shape, page_table.shape[1]
    rows = (torch.arange(B, device=q.device) if slots is None else slots.long()).view(B, 1, 1)
    # clamp page indices, because table entries beyond a list's end may have any value
    at = page_table.long().clamp(0, k_pages.shape[1] - 1)
    k, v = (x[rows, at].flatten(2, 3).flatten(0, 1).unsqueeze(2) for x in (k_pages, v_pages))
    folded = q.unflatten(2, (H, HQ // H)).transpose(1, 2).reshape(B * H, TQ, HQ // H, K)
    o, lse = attention_decode_reference(folded, k, v, lengths.flatten(), scale=scale)
    o, lse = (x.unflatten(0, (B, H)).transpose(1, 2).flatten(2, 3) for x in (o, lse))
    return AttentionOutput(o.contiguous(), lse.contiguous())


def visible(o_q: Tensor, o_k: Tensor, causal: bool, window: int | None, sinks: int) -> Tensor:
    """Return whether the query at position `o_q[i]` sees the key at `o_k[j]`, by the rules of `Mask`, as `[i, j]`."""
    o_q, o_k = o_q[:, None], o_k[None, :]
    mask = (o_k <= o_q) if causal else torch.ones_like(o_k <= o_q)
    return mask if window is None else mask & ((o_k > o_q - window) | (o_k < sinks))


class _Block(NamedTuple):
    """Consecutive queries, and the keys that any of them may see: the first `sinks` keys and `[start, stop)`."""

    rows: slice
    sinks: int
    start: int
    stop: int
    mask: Tensor

    def gather(self, x: Tensor) -> Tensor:
        near = x[:, self.start : self.stop]
        return torch.cat([x[:, : self.sinks], near], 1) if self.sinks else near

    def scatter(self, x: Tensor, dx: Tensor) -> None:
        x[:, : self.sinks] += dx[:, : self.sinks]
        x[:, self.start : self.stop] += dx[:, self.sinks :]


def sequences(tq: int, tk: int, cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """Yield the token slices of queries and of keys for each packed sequence; one pair of full slices if unpacked."""
    boundaries = [0, tq] if cu_seqlens is None else cu_seqlens.tolist()
    for start, stop in itertools.pairwise(boundaries):
        rows = slice(start, stop)
        yield rows, (slice(0, tk) if cu_seqlens is None else rows)


def _blocks(q: Tensor, k: Tensor, causal: bool, window: int | None, sinks: int) -> Iterator[_Block]:
    (batch, tq, heads, _), tk = q.shape, k.shape[1]
    shift = tk - tq
    seen = tk if window is None else min(tk, 2 * window + sinks)
    size = max(16, _BLOCK_SCORES // max(1, batch * heads * seen))
    size = size if window is None else min(size, max(16, window))
    for first in range(0, tq, size):
        last = min(first + size, tq) - 1
        stop = max(0, min(tk, last + shift + 1)) if causal else tk
        start = 0 if window is None else min(stop, max(0, first + shift - window + 1))
        far = 0 if window is None else min(sinks, start)
        o_q = torch.arange(first, last + 1, device=q.device) + shift
        o_k = torch.arange(start, stop, device=q.device)
        if far:
            o_k = torch.cat([torch.arange(far, device=q.device), o_k])
        yield _Block(slice(first, last + 1), far, start, stop, visible(o_q, o_k, causal, window, sinks))


def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, bias: Tensor | float = 0.0
) -> AttentionOutput:
    """Compute attention of some queries to the keys in the bool `mask`, with `bias` added to scores; see `softmax`."""
    p, lse = softmax(q, k, mask, scale, bias)
    o = torch.einsum("bhgij,bjhv->bihgv", p.to(v.dtype), v).flatten(2, 3)
    return AttentionOutput(o, lse.flatten(1, 2).transpose(1, 2).contiguous())


def joined(parts: Sequence[AttentionOutput], q: Tensor, v: Tensor) -> AttentionOutput:
    """Concatenate the results of consecutive blocks of queries; if there are no blocks, return o = 0 and lse = −∞."""
    if not parts:
        return AttentionOutput(q.new_zeros(*q.shape[:3], v.shape[3]), wide(q).new_full(q.shape[:3], float("-inf")))
    return AttentionOutput(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))


def softmax(q: Tensor, k: Tensor, mask: Tensor, scale: float, bias: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Return probabilities `[B, H, G, rows, keys]` and log-sum-exp `[B, H, G, rows]`; 0 and −∞ if a row sees no key.

    `mask` is `[rows, keys]` or of another shape that broadcasts to the probabilities; so is `bias`, added to scores.
    """
    q = wide(q).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    blind = ~mask.any(-1)
    s = torch.einsum("bihgk,bjhk->bhgij", q, wide(k)) * scale + bias
    # the gradient of a softmax over −∞ alone is NaN: rows that see no key get scores of 0, and their results are
    # discarded
    s = s.masked_fill(~mask, float("-inf")).masked_fill(blind.unsqueeze(-1), 0.0)
    lse = s.logsumexp(-1)
    p = (s - lse.unsqueeze(-1)).exp()
    return p.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, float("-inf"))


def wide(x: Tensor) -> Tensor:
    """Return float64 tensors unchanged, and all others converted to float32."""
    return x if x.dtype == torch.float64 else x.float()
