"""The tensors in the state of an LTE layer, and their update by a call for sequences of different lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from tokenmix_core.nn import Span
from tokenmix_core.ops import kept_attention, unless_gluon
from tokenmix_lte.eviction import eviction_times
from tokenmix_lte.joined import Joined, join_past
from tokenmix_lte.retention import Retention, Tokens


class Held(NamedTuple):
    """The tensors of a state with S = W + cap slots per head: first the window's ring buffer, then retained tokens."""

    # keys and values of the slots: [N, H, S, K] each; number of filled slots: [N, H]
    keys: Tensor
    values: Tensor
    lengths: Tensor
    # scores of the slots: [N, H, S]; positions of the retained tokens: [N, H, cap]
    scores: Tensor
    ages: Tensor
    # [N, reach, H, K], a ring buffer of keys before rotation: the token at position p has index p mod reach
    raw: Tensor


def extend_packed(rule: Retention, tokens: Tokens, span: Span, held: Held | None) -> tuple[Tensor, Held]:
    """Return outputs, in the call's layout, for sequences of any lengths, and the tensors that they hold afterwards.

    One call of the scorer and one of attention compute all sequences, for example a batch with padding. If `held` is
    None (the sequences begin), the host does not wait for the device. Otherwise the host reads the lengths of the span,
    once for all layers. Past tokens then get queries of zeros, and their outputs are discarded.
    """
    x = _begun(rule, tokens, span) if held is None else _joined(rule, tokens, span, held)
    W, totals, cu_seqlens, rows = rule.window, span.after, x.join.cu_seqlens, x.join.rows
    k, v, ranks = (y.unsqueeze(0) for y in (x.k, x.v, x.ranks))
    keep, sizes = ranks > -torch.inf, cu_seqlens.diff()
    until = eviction_times(ranks, rule.cap, W, cu_seqlens, impl=unless_gluon(rule.impl))
    o = kept_attention(x.q.unsqueeze(0), k, v, keep, window=W, until=until, cu_seqlens=cu_seqlens, impl=rule.impl).o
    if held is not None:
        o = o[0, x.join.new]
    with torch.no_grad():
        left = (x.join.offsets < (sizes - W)[rows]).unsqueeze(-1)
        retained, lengths = _retained(keep & left & (until >= sizes[rows].unsqueeze(-1)), cu_seqlens, rule.cap)
        ring, _ = _ring(x.join.origin, totals, W, len(rows))
        newest, exists = _ring(x.scored.origin, totals, rule.reach, len(x.raw))
        heads = torch.arange(k.shape[2], device=k.device).view(1, -1, 1)
        ring = ring.unsqueeze(1).expand(-1, k.shape[2], -1)
        at = torch.cat((ring, retained), 2)
        return o.view(*tokens.q.shape[:3], -1), Held(
            x.k[at, heads],
            x.v[at, heads],
            (lengths + totals.clamp(max=W).unsqueeze(1)).to(torch.int32),
            torch.cat((x.scores[ring, heads], x.ranks[retained, heads]), 2),
            x.ages[retained, heads].to(torch.int32),
            x.raw[newest].masked_fill(~exists[..., None, None], 0),
        )


class _Packed(NamedTuple):
    """Attention's inputs for S packed tokens, and the keys before rotation that the scorer reads.

    Attributes:
        join: layout of the S tokens.
        q, k, v, scores, ranks, ages: `[S, heads, ...]`; ages are positions, ranks decide which keys are retained.
        scored, raw: layout and keys before rotation of the tokens that the scorer reads.
    """

    join: Joined
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    ranks: Tensor
    ages: Tensor
    scored: Joined
    raw: Tensor


def _begun(rule: Retention, tokens: Tokens, span: Span) -> _Packed:
    """Return attention's packed inputs for a call whose tokens are the first of their sequences; nothing is copied."""
    q, k, raw, v = (x.flatten(0, 1) for x in tokens)
    join = Joined(span.cu_seqlens, span.rows, span.positions, span.cu_seqlens[:-1], span.positions)
    scores = rule.logits(tokens.raw, tokens.v, cu_seqlens=join.cu_seqlens).detach()
    ranks = rule.ranks(scores, join.positions)[0]
    ages = join.positions.unsqueeze(1).expand(-1, k.shape[1])
    return _Packed(join, q, k, v, scores[0], ranks, ages, join, raw)


def _joined(rule: Retention, tokens: Tokens, span: Span, held: Held) -> _Packed:
    """Return attention's packed inputs: each sequence's retained tokens (oldest first), its ring, its new tokens."""
    q, k, raw, v = (x.flatten(0, 1) for x in tokens)
    W, reach, before, (_, lengths) = rule.window, rule.reach, span.before, span.on_host
    front, ring = torch.where(before > W, rule.cap, 0), before.clamp(max=W)
    join = join_past(span, front + ring, sum(min(n, W) + (rule.cap if n > W else 0) for n in lengths))
    rows, heads = join.rows.unsqueeze(1), torch.arange(k.shape[1], device=k.device)
    # sort the empty slots for retained tokens to the end; their rank is −∞
    number = held.lengths - W
    filled = torch.arange(rule.cap, device=k.device) < number.unsqueeze(-1)
    order = held.ages.masked_fill(~filled, torch.iinfo(held.ages.dtype).max).argsort(-1)
    index = join.offsets.unsqueeze(1)
    is_front, oldest = index < front[rows], order[rows, heads, index.clamp(max=rule.cap - 1)]
    slots = torch.where(is_front, W + oldest, join.positions.unsqueeze(1) % W)
    keys, values = (join.filled(x[rows, heads, slots], new) for x, new in ((held.keys, k), (held.values, v)))
    known = held.scores[rows, heads, slots]

    newest = before.clamp(max=reach)
    scored = join_past(span, newest, sum(min(n, reach) for n in lengths))
    if reach:
        raw = scored.filled(held.raw[scored.rows, scored.positions % reach], raw)
        of_scored = values[join.origin[scored.rows] + scored.positions]
        logits = rule.logits(raw[None], of_scored[None], cu_seqlens=scored.cu_seqlens)[0].detach()
        # the scorer reads each sequence's tokens from its last `reach` past ones on; the first ones lack their context,
        # so their scores and those of earlier tokens are taken from `known`
        first = before - newest + torch.where(newest == before, 0, rule.context[0])
        is_new = (join.positions >= first[join.rows]).unsqueeze(1) & ~is_front
        at = (scored.origin[join.rows] + join.positions).clamp(0, max(0, len(logits) - 1))
        scores = torch.where(is_new, logits[at], known.to(logits.dtype))
    else:
        logits = rule.logits(tokens.raw, tokens.v).flatten(0, 1)
        scores = join.filled(known, logits)
    of_front = torch.where(index < number[rows, heads], known.to(scores.dtype), -torch.inf)
    ranks = torch.where(is_front, of_front, rule.ranks(scores[None], join.positions)[0])
    ages = torch.where(is_front, held.ages[rows, heads, oldest], join.positions.unsqueeze(1))
    queries = join.filled(q.new_zeros(len(join.rows), *q.shape[1:]), q)
    return _Packed(join, queries, keys, values, scores, ranks, ages, scored, raw)


def _ring(
    origin: Int[Tensor, "N"], totals: Int[Tensor, "N"], size: int, tokens: int
) -> tuple[Int[Tensor, "N size"], Bool[Tensor, "N size"]]:
    """For ring buffers of the newest tokens, return each entry's packed token index and whether it has a token."""
    last = totals.unsqueeze(1) - 1
    position = last - (last - torch.arange(size, device=totals.device)) % max(1, size)
    return (origin.unsqueeze(1) + position).clamp(0, tokens - 1), position >= 0


def _retained(
    stays: Bool[Tensor, "1 T H"], cu_seqlens: Int[Tensor, "N_plus_1"], cap: int
) -> tuple[Int[Tensor, "N H cap"], Int[Tensor, "N H"]]:
    """Return the packed indices of the tokens that stay, oldest first (undefined beyond the last), and their number."""
    counts = stays[0].mT.contiguous().cumsum(-1)
    before = F.pad(counts, (1, 0))[:, cu_seqlens.long()]
    lengths = before.diff()
    slots = torch.arange(1, cap + 1, device=counts.device)
    ranks = before[:, :-1, None] + slots.minimum(lengths.unsqueeze(-1))
    index = torch.searchsorted(counts, ranks.flatten(1)).clamp(max=counts.shape[1] - 1)
    # contiguous: decoding kernels require this of a state's tensors
    return index.view(*ranks.shape).transpose(0, 1).contiguous(), lengths.mT.contiguous()
