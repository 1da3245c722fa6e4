"""Going on from a layer's state: one token of each sequence, or many, in the memory that the first token took.

A head's places are the window's, a ring where the token at position p has place p mod W, and behind them those of far
keys. A logit is final once the tokens that the scorer looks ahead to are there, so it is known when its token leaves
the ring: then the token enters the far places, or replaces the worst there, or is gone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn.ragged import RaggedKVState, first_taken
from tokenmix_core.nn.state import LayerState
from tokenmix_core.ops import kept_attention
from tokenmix_core.ops.common import unless_gluon
from tokenmix_lte.cap import eviction_times
from tokenmix_lte.ops import evict_step

if TYPE_CHECKING:
    from tokenmix_lte.mixer import Lte, Tokens


class Held(NamedTuple):
    """A state's tensors, S = W + cap places a head."""

    # [N, H, S, K], [N, H, S, K], [N, H]
    keys: Tensor
    values: Tensor
    lengths: Tensor
    # [N, H, S], [N, H, cap]
    scores: Tensor
    ages: Tensor
    # [N, reach, H, K], the token at position p at p mod reach
    raw: Tensor


def step(layer: Lte, tokens: Tokens, state: LayerState) -> Float[Tensor, "N 1 HQ K"]:
    """Outputs for one token of each sequence; the state is written in place, nothing waits for the device."""
    q, k, raw, v = tokens
    _prepare(layer, tokens, state, len(k))
    kv: RaggedKVState = state.kv
    if layer.step_form(state.span):
        _score(layer, state)
    evict_step(
        k.squeeze(1),
        v.squeeze(1),
        raw.squeeze(1),
        kv.keys,
        kv.values,
        kv.lengths,
        state.scores.value,
        state.ages.value,
        state.raw.value,
        state.span.before,
        window=layer.window,
        sinks=layer.sinks,
        uniform=layer.uniform,
        impl=unless_gluon(layer.impl),
    )
    return kv.attend(q.squeeze(1), impl=layer.impl).o


def go_on(layer: Lte, tokens: Tokens, state: LayerState) -> Float[Tensor, "B T HQ K"]:
    """Outputs for the tokens of a call, in its layout; the state holds them afterwards."""
    span = state.span
    if span.uniform:
        o, held = _advance(layer, tokens, _held(state) if span.past else None, span.past)
    else:
        _prepare(layer, tokens, state, span.sequences)
        before = _held(state)
        # sequences of different lengths, one by one
        packed = span.cu_seqlens is not None
        borders = pairwise(span.cu_seqlens.tolist() if packed else range(span.sequences + 1))
        parts = [type(tokens)(*(x[:, i:j] if packed else x[i:j] for x in tokens)) for i, j in borders]
        outputs, rows = [], []
        for n, (part, past) in enumerate(zip(parts, span.before.tolist(), strict=True)):
            row = Held(*(x[n : n + 1] for x in before))
            if part.k.shape[1]:
                o, row = _advance(layer, part, row, past)
                outputs.append(o)
            rows.append(row)
        o = torch.cat(outputs, 1 if packed else 0)
        held = Held(*(torch.cat(x) for x in zip(*rows, strict=True)))
    state.kv.hold(held.keys, held.values, held.lengths)
    # steps write them in place
    state.scores.set(held.scores)
    state.ages.set(held.ages)
    state.raw.set(held.raw)
    return o


def _advance(layer: Lte, tokens: Tokens, held: Held | None, past: int) -> tuple[Tensor, Held]:
    """Outputs for T tokens of sequences that each hold `past`, and what they hold afterwards.

    Far keys, the ring and the new tokens in a row, oldest first, are like a sequence of their own: far keys stand in
    front, where no window reaches them, for there are none before the ring is full. Where nothing is held yet, nothing
    is copied.
    """
    q, keys, raws, values = tokens
    W, total, device = layer.window, past + keys.shape[1], keys.device
    ring, reach, known = min(past, W), min(past, layer.reach), 0
    if held is not None and past:
        places = torch.arange(past - ring, past, device=device) % W
        keys, values = (
            torch.cat((x[:, :, places].transpose(1, 2), new), 1)
            for x, new in ((held.keys, keys), (held.values, values))
        )
        last = torch.arange(past - reach, past, device=device) % max(1, layer.reach)
        raws = torch.cat((held.raw[:, last], raws), 1)
        # the first logits lack what came before them, and have been scored
        known = 0 if reach == past else layer.behind
    scores = layer.logits(raws, values[:, ring - reach :]).detach()
    if held is not None and past:
        scored = held.scores[:, :, places].transpose(1, 2)[:, : ring - reach + known]
        scores = torch.cat((scored, scores[:, known:].to(scored.dtype)), 1)
    positions = torch.arange(past - ring, total, device=device)
    ranks = layer.ranks(scores, positions)
    ages = None
    if held is not None and past > W:
        ages = positions.to(held.ages.dtype).view(1, -1, 1).expand_as(ranks)
        keys, values, ranks, ages = (
            torch.cat(pair, 1) for pair in zip(_far(layer, held), (keys, values, ranks, ages), strict=True)
        )
    keep = ranks > -torch.inf
    until = eviction_times(ranks, layer.cap, W, impl=unless_gluon(layer.impl))
    o = kept_attention(q, keys, values, keep, window=W, until=until, impl=layer.impl).o
    with torch.no_grad():
        left = keys.shape[1] - min(total, W)
        stays = keep[:, :left] & (until[:, :left] >= keys.shape[1])
        far, lengths = _first_far(stays.transpose(1, 2), layer.cap)
        at = torch.cat((_newest(keys.shape[1], W, total, device).expand(*far.shape[:2], -1), far), 2)
        at = at.unsqueeze(-1).expand(-1, -1, -1, layer.head_dim)
        far_scores = ranks.transpose(1, 2).gather(2, far)
        return o, Held(
            keys.transpose(1, 2).gather(2, at),
            values.transpose(1, 2).gather(2, at),
            (lengths + min(total, W)).to(torch.int32),
            torch.cat((_ring(scores, W, total).transpose(1, 2), far_scores), 2),
            # where no far keys were held, tokens stand at their positions
            far.to(torch.int32) if ages is None else ages.transpose(1, 2).gather(2, far),
            _ring(raws, layer.reach, total),
        )


def _far(layer: Lte, held: Held) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, ranks and ages of the far keys `[N, cap, H, ...]`, by age; a rank of −∞ where there is none."""
    filled = torch.arange(layer.cap, device=held.ages.device) < (held.lengths - layer.window).unsqueeze(-1)
    order = held.ages.masked_fill(~filled, torch.iinfo(held.ages.dtype).max).argsort(-1)
    ranks = held.scores[:, :, layer.window :].masked_fill(~filled, -torch.inf)
    of_tokens = order.unsqueeze(-1).expand(-1, -1, -1, layer.head_dim)
    keys, values = (x[:, :, layer.window :].gather(2, of_tokens).transpose(1, 2) for x in (held.keys, held.values))
    return keys, values, ranks.gather(-1, order).transpose(1, 2), held.ages.gather(-1, order).transpose(1, 2)


def _first_far(stays: Bool[Tensor, "N H left"], cap: int) -> tuple[Int[Tensor, "N H cap"], Int[Tensor, "N H"]]:
    """`first_taken`, also of no tokens."""
    if stays.shape[2]:
        return first_taken(stays, cap)
    nothing = torch.zeros(*stays.shape[:2], cap + 1, dtype=torch.int64, device=stays.device)
    return nothing[..., 1:], nothing[..., 0]


def _newest(length: int, room: int, total: int, device: torch.device) -> Int[Tensor, "room"]:
    """Which of `length` tokens stand in the places of `_ring`; any one in those that are not filled."""
    if total < room:
        return torch.arange(length - total, length - total + room, device=device).clamp(max=length - 1)
    return torch.arange(length - room, length, device=device).roll(total % room)


def _ring(x: Float[Tensor, "N L *rest"], room: int, total: int) -> Float[Tensor, "N room *rest"]:
    """The newest tokens of sequences of `total` tokens, each at its position mod `room`."""
    held = min(total, room)
    newest = x[:, x.shape[1] - held :]
    if held < room:
        return torch.cat((newest, x.new_zeros(len(x), room - held, *x.shape[2:])), 1)
    return newest.roll(total % room, 1) if room else newest


def _score(layer: Lte, state: LayerState) -> None:
    """Write the logits of those of the newest tokens that are final and may not have been scored."""
    assert layer.scorer is not None
    before, reach, W = state.span.before, layer.reach, layer.window
    N, H = len(before), layer.num_kv_heads
    positions = before.unsqueeze(1) - reach + torch.arange(reach, device=before.device)
    at = (positions % reach)[..., None, None]
    raw = state.raw.value
    raw = raw.gather(1, at.expand_as(raw))
    places = (positions % W).unsqueeze(1).expand(N, H, reach)
    values = state.kv.values.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, layer.head_dim)).transpose(1, 2)
    begin = (reach - before).clamp(min=0)
    final = slice(layer.behind, reach - layer.ahead)
    logits = layer.scorer(raw, values, begin=begin)[:, final].transpose(1, 2)
    places = places[:, :, final]
    scores = state.scores.value
    there = (positions[:, final] >= 0).unsqueeze(1)
    scores.scatter_(2, places, torch.where(there, logits.to(scores.dtype), scores.gather(2, places)))


def _prepare(layer: Lte, tokens: Tokens, state: LayerState, batch: int) -> None:
    """Make the state's tensors before the first call."""
    if state.kv.places:
        return
    k = tokens.k.detach()
    nothing = k.new_zeros(batch, 0, layer.num_kv_heads, layer.head_dim)
    state.kv.append(nothing, nothing, nothing[..., 0].bool())
    state.scores.get(batch, k)
    state.raw.get(batch, k)
    state.ages.value = torch.zeros(batch, *state.ages.shape, dtype=state.ages.dtype, device=k.device)


def _held(state: LayerState) -> Held:
    kv = state.kv
    return Held(kv.keys, kv.values, kv.lengths, state.scores.value, state.ages.value, state.raw.value)
