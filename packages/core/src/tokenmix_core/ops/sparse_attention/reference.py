"""Attention over retained keys in eager PyTorch: it specifies the operation and its gradient, also in float64.

Each block of queries attends, through a mask, to those keys that at least one of its queries may see: memory is linear
in the length, and work in the number of retained keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import packed_positions, sequence_ids
from tokenmix_core.kernels.launch import compat
from tokenmix_core.ops.padding import drops_padding
from tokenmix_core.ops.softmax_attention.reference import attended, joined, sequences, softmax, wide
from tokenmix_core.ops.types import AttentionOutput

# maximum number of scores of one block of queries: 2²⁴ scores take 64 MiB in float32
_BLOCK_SCORES = 1 << 24


@drops_padding("q", "k", "v", "until", results=2)
def kept_attention_reference(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    keep: Bool[Tensor, "B U HM"] | Float[Tensor, "B U HM"],
    *,
    unit: int = 1,
    window: int | None = None,
    until: Int[Tensor, "B TK H"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    keep_gradient: str = "exponentials",
) -> AttentionOutput:
    """Compute attention as `kept_attention` defines it, differentiable by autograd, also in a float `keep`.

    The gradient of `keep` is that of a factor of 1. With "exponentials" the factor multiplies the exponential of a
    retained key that is not local, with "values" a key's value.
    """
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    weights = _by_token(keep, k, unit, cu_seqlens)
    # a bias of 0 on the scores (a factor of 1 on their exponentials), whose gradient is that of `keep`
    bias = wide(weights) - wide(weights).detach() if weights.is_floating_point() else None
    if bias is not None and keep_gradient == "values":
        v, bias = v * (1 + bias).to(v.dtype).unsqueeze(-1), None
    found = []
    for block in _blocks(q, k, is_kept(weights), unit, window, until, cu_seqlens):
        b_q, b_k, b_v = q[:, block.queries], k[:, block.keys], v[:, block.keys]
        b_bias = 0.0 if bias is None else (_over_keys(bias[:, block.keys]) * block.far)[:, :, None]
        found.append(attended(b_q, b_k, b_v, block.mask[:, :, None], scale, b_bias))
    return joined(found, q, v)


@torch.no_grad()
@drops_padding("q", "k", "v", "o", "do", "dlse", "until", results=3)
def kept_attention_reference_backward(
    q: Float[Tensor, "B TQ HQ K"],
    k: Float[Tensor, "B TK H K"],
    v: Float[Tensor, "B TK H V"],
    keep: Bool[Tensor, "B U HM"] | Float[Tensor, "B U HM"],
    o: Float[Tensor, "B TQ HQ V"],
    do: Float[Tensor, "B TQ HQ V"],
    dlse: Float[Tensor, "B TQ HQ"] | None,
    *,
    unit: int,
    window: int | None,
    until: Int[Tensor, "B TK H"] | None,
    scale: float,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
    keep_gradient: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and `keep` (as a float) by the formulas of the kernels (README.md)."""
    delta = (wide(o) * do).sum(-1)
    delta = delta if dlse is None else delta - dlse
    dq, dk, dv = (torch.zeros_like(wide(x)) for x in (q, k, v))
    heads, group = k.shape[2], q.shape[2] // k.shape[2]
    kept = is_kept(_by_token(keep, k, unit, cu_seqlens))
    d_kept = delta.new_zeros(k.shape[:3])
    for block in _blocks(q, k, kept, unit, window, until, cu_seqlens):
        b_q, b_k, b_v = wide(q[:, block.queries]), wide(k[:, block.keys]), wide(v[:, block.keys])
        b_q, b_do = (x.unflatten(2, (heads, group)) for x in (b_q, wide(do[:, block.queries])))
        b_delta = delta[:, block.queries].unflatten(2, (heads, group)).permute(0, 2, 3, 1).unsqueeze(-1)
        p, _ = softmax(q[:, block.queries], k[:, block.keys], block.mask[:, :, None], scale)
        ds = p * (torch.einsum("bihgv,bjhv->bhgij", b_do, b_v) - b_delta)
        d_kept[:, block.keys] += (ds.sum(2) * block.far).sum(2).transpose(1, 2)
        dq[:, block.queries] = torch.einsum("bhgij,bjhk->bihgk", ds, b_k).flatten(2, 3) * scale
        dk[:, block.keys] += torch.einsum("bhgij,bihgk->bjhk", ds, b_q) * scale
        dv[:, block.keys] += torch.einsum("bhgij,bihgv->bjhv", p, b_do)
    d_keep = d_kept.new_zeros(keep.shape)
    d_kept = (wide(v) * dv).sum(3) if keep_gradient == "values" else d_kept * kept
    # sum over the key heads that share a head of `keep`
    d_kept = d_kept.unflatten(2, (keep.shape[2], -1)).sum(3)
    d_keep.index_add_(1, units_of_tokens(k.shape[1], unit, cu_seqlens, k.device), d_kept)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_keep


def is_kept(keep: Tensor) -> Tensor:
    """Return which units are retained: `keep` if bool, else whether the float (0 or 1 up to rounding) is above ½."""
    return keep > 0.5 if keep.is_floating_point() else keep


def units_of_tokens(tokens: int, unit: int, cu_seqlens: Tensor | None, device: torch.device) -> Int[Tensor, "T"]:
    """Return the index in `keep` of each token's unit (`unit` consecutive tokens of a sequence)."""
    if unit == 1 or cu_seqlens is None:
        return torch.arange(tokens, device=device) // unit
    index = sequence_ids(cu_seqlens, tokens)
    return cu_seqlens[index] // unit + index + packed_positions(cu_seqlens, tokens) // unit


def _by_token(keep: Tensor, k: Tensor, unit: int, cu_seqlens: Tensor | None) -> Tensor:
    """Expand `keep`, one value per `unit` tokens and head, to all tokens and key heads: `[B, TK, H]`."""
    keep = keep[:, units_of_tokens(k.shape[1], unit, cu_seqlens, k.device)]
    return keep.repeat_interleave(k.shape[2] // keep.shape[2], 2)


def _over_keys(x: Tensor) -> Tensor:
    """Return x `[B, keys, H]` as `[B, H, 1, keys]`, which broadcasts over queries."""
    return x.transpose(1, 2).unsqueeze(2)


class _Block(NamedTuple):
    """Consecutive queries, the keys that at least one of them may see, `mask [B, H, queries, keys]`, and `far
    [queries, keys]`, the pairs that are not local."""

    queries: slice
    keys: Tensor
    mask: Tensor
    far: Tensor


def _blocks(
    q: Tensor, k: Tensor, kept: Tensor, unit: int, window: int | None, until: Tensor | None, cu_seqlens: Tensor | None
) -> Iterator[_Block]:
    (batch, tq, heads, _), tk = q.shape, k.shape[1]
    size = max(16, _BLOCK_SCORES // max(1, batch * heads * tk))
    for queries, keys in sequences(tq, tk, cu_seqlens):
        shift = (keys.stop - keys.start) - (queries.stop - queries.start)
        # the latest eviction time of each key over batch rows and heads; 0 if no row and head retains the key
        end = torch.where(kept[:, keys], tk if until is None else until[:, keys], 0).amax((0, 2))
        for first in range(queries.start, queries.stop, size):
            last = min(first + size, queries.stop)
            begin, stop = (x - queries.start + shift for x in (first, last))
            # keys from `left` on are local to the first query
            left = max(0, begin // unit * unit if window is None else begin - window + 1)
            # under function transforms list all earlier keys: sizes must not depend on the values of tensors there
            everything = compat.in_transform()
            listed = torch.arange(left, device=q.device) if everything else (end[:left] > begin).nonzero().squeeze(1)
            o_k = torch.cat((listed, torch.arange(left, max(left, stop), device=q.device)))
            o_q = torch.arange(begin, stop, device=q.device)[:, None]
            far = o_k < (o_q // unit * unit if window is None else o_q - window + 1)
            index = keys.start + o_k
            seen = _over_keys(kept[:, index])
            seen = seen if until is None else seen & (o_q < _over_keys(until[:, index]))
            yield _Block(slice(first, last), index, torch.where(far, seen, o_k <= o_q), far)
