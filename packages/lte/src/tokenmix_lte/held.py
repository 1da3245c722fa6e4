"""The tensors that an LTE layer's state holds, and their values after packed prompts of several lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn import Span
from tokenmix_core.ops import kept_attention, unless_gluon
from tokenmix_lte.eviction import eviction_times
from tokenmix_lte.retention import Retention, Tokens


class Held(NamedTuple):
    """Tensors of a state, with S = W + cap slots per head."""

    # [N, H, S, K], [N, H, S, K], [N, H]
    keys: Tensor
    values: Tensor
    lengths: Tensor
    # [N, H, S], [N, H, cap]
    scores: Tensor
    ages: Tensor
    # [N, reach, H, K], a ring buffer: the token at position p at p mod reach
    raw: Tensor


def begin_packed(rule: Retention, tokens: Tokens, span: Span) -> tuple[Float[Tensor, "1 T HQ K"], Held]:
    """Return outputs for packed prompts, such as a batch with padding, and the tensors held afterwards.

    One call of the scorer and one of attention process all prompts; nothing waits for the device.
    """
    (q, k, raw, v), cu_seqlens, W = tokens, span.cu_seqlens, rule.window
    assert cu_seqlens is not None
    rows, positions, totals = span.rows, span.positions, span.after
    scores = rule.logits(raw, v, cu_seqlens=cu_seqlens).detach()
    ranks = rule.ranks(scores, positions)
    keep = ranks > -torch.inf
    until = eviction_times(ranks, rule.cap, W, cu_seqlens, impl=unless_gluon(rule.impl))
    o = kept_attention(q, k, v, keep, window=W, until=until, cu_seqlens=cu_seqlens, impl=rule.impl).o
    with torch.no_grad():
        left = (positions < (totals - W)[rows]).unsqueeze(-1)
        retained, lengths = _retained(keep & left & (until >= totals[rows].unsqueeze(-1)), cu_seqlens, rule.cap)
        ring, _ = _ring(cu_seqlens, totals, W, len(rows))
        newest, exists = _ring(cu_seqlens, totals, rule.reach, len(rows))
        heads = torch.arange(k.shape[2], device=k.device).view(1, -1, 1)
        ring = ring.unsqueeze(1).expand(-1, k.shape[2], -1)
        at = torch.cat((ring, retained), 2)
        return o, Held(
            k[0][at, heads],
            v[0][at, heads],
            (lengths + totals.clamp(max=W).unsqueeze(1)).to(torch.int32),
            torch.cat((scores[0][ring, heads], ranks[0][retained, heads]), 2),
            positions[retained].to(torch.int32),
            raw[0][newest].masked_fill(~exists[..., None, None], 0),
        )


def _ring(
    cu_seqlens: Int[Tensor, "N_plus_1"], totals: Int[Tensor, "N"], size: int, tokens: int
) -> tuple[Int[Tensor, "N size"], Bool[Tensor, "N size"]]:
    """Return the packed index of the token in each slot of rings of the newest tokens, and whether there is one."""
    last = totals.unsqueeze(1) - 1
    position = last - (last - torch.arange(size, device=totals.device)) % max(1, size)
    at = cu_seqlens[:-1].unsqueeze(1) + position.clamp(min=0)
    return at.clamp(max=tokens - 1), position >= 0


def _retained(
    stays: Bool[Tensor, "1 T H"], cu_seqlens: Int[Tensor, "N_plus_1"], cap: int
) -> tuple[Int[Tensor, "N H cap"], Int[Tensor, "N H"]]:
    """Return the packed indices of the tokens that stay, by age, arbitrary for empty slots, and their number."""
    counts = stays[0].mT.contiguous().cumsum(-1)
    before = F.pad(counts, (1, 0))[:, cu_seqlens.long()]
    lengths = before.diff()
    slots = torch.arange(1, cap + 1, device=counts.device)
    ranks = before[:, :-1, None] + slots.minimum(lengths.unsqueeze(-1))
    index = torch.searchsorted(counts, ranks.flatten(1)).clamp(max=counts.shape[1] - 1)
    # decoding kernels need contiguous state tensors
    return index.view(*ranks.shape).transpose(0, 1).contiguous(), lengths.mT.contiguous()
