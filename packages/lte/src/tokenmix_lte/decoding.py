"""Decoding with LTE in constant memory: continue from a layer's state by one token of each sequence, or by many.

A head has W + cap slots: a ring buffer for the window, in which the token at position p has slot p mod W, and behind it
the slots of retained tokens. A token's logit is final when all later tokens that the scorer reads are known, which is
before the token leaves the ring buffer. A token that leaves it moves to a free retained slot, or replaces the retained
token with the lowest rank, or is evicted.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.nn import LayerState, RaggedKVState, first_taken
from tokenmix_core.ops import kept_attention, unless_gluon
from tokenmix_lte.eviction import eviction_times
from tokenmix_lte.held import Held, extend_packed
from tokenmix_lte.ops import evict_step
from tokenmix_lte.retention import Retention, Tokens


def step(rule: Retention, tokens: Tokens, state: LayerState) -> Float[Tensor, "N 1 HQ K"]:
    """Return the outputs for one token of each sequence, and update the state, without waiting for the device."""
    q, k, raw, v = tokens
    _prepare(k, state, len(k))
    kv: RaggedKVState = state.kv
    if rule.scores_at(state.span):
        _score(rule, state)
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
        window=rule.window,
        sinks=rule.sinks,
        uniform=rule.uniform,
        impl=unless_gluon(rule.impl),
    )
    return kv.attend(q.squeeze(1), impl=rule.impl).o


def extend(rule: Retention, tokens: Tokens, state: LayerState) -> Float[Tensor, "B T HQ K"]:
    """Return the outputs for the tokens of a call, in the layout of the call, and add these tokens to the state."""
    span = state.span
    if span.uniform:
        o, held = _advance(rule, tokens, _held(state) if span.past else None, span.past)
    elif not tokens.k.shape[1]:
        return torch.zeros_like(tokens.q)
    else:
        o, held = extend_packed(rule, tokens, span, _held(state) if span.past else None)
    state.kv.hold(held.keys, held.values, held.lengths)
    # `set` stores detached contiguous tensors, because later decoding steps overwrite them
    state.scores.set(held.scores)
    state.ages.set(held.ages)
    state.raw.set(held.raw)
    return o


def _advance(rule: Retention, tokens: Tokens, held: Held | None, past: int) -> tuple[Tensor, Held]:
    """Return outputs for T tokens of sequences that hold `past` tokens each, and the tensors that they hold afterwards.

    Retained keys, those in the ring buffer and the new ones are concatenated, oldest first, and treated as one
    sequence. Keys are retained only if the ring buffer is full, so that they lie outside every new token's window. For
    an empty state, nothing is copied.
    """
    q, keys, raws, values = tokens
    W, total, device = rule.window, past + keys.shape[1], keys.device
    ring, reach, known = min(past, W), min(past, rule.reach), 0
    if held is not None and past:
        slots = torch.arange(past - ring, past, device=device) % W
        keys, values = (
            torch.cat((x[:, :, slots].transpose(1, 2), new), 1) for x, new in ((held.keys, keys), (held.values, values))
        )
        last = torch.arange(past - reach, past, device=device) % max(1, rule.reach)
        raws = torch.cat((held.raw[:, last], raws), 1)
        # `raws` lacks the tokens before its first ones, so the scores of its first `known` tokens are taken from `held`
        known = 0 if reach == past else rule.context[0]
    scores = rule.logits(raws, values[:, ring - reach :]).detach()
    if held is not None and past:
        scored = held.scores[:, :, slots].transpose(1, 2)[:, : ring - reach + known]
        scores = torch.cat((scored, scores[:, known:].to(scored.dtype)), 1)
    positions = torch.arange(past - ring, total, device=device)
    ranks = rule.ranks(scores, positions)
    ages = None
    if held is not None and past > W:
        ages = positions.to(held.ages.dtype).view(1, -1, 1).expand_as(ranks)
        keys, values, ranks, ages = (
            torch.cat(pair, 1) for pair in zip(_retained(rule, held), (keys, values, ranks, ages), strict=True)
        )
    keep = ranks > -torch.inf
    until = eviction_times(ranks, rule.cap, W, impl=unless_gluon(rule.impl))
    o = kept_attention(q, keys, values, keep, window=W, until=until, impl=rule.impl).o
    with torch.no_grad():
        left = keys.shape[1] - min(total, W)
        stays = keep[:, :left] & (until[:, :left] >= keys.shape[1])
        retained, lengths = _first_retained(stays.transpose(1, 2), rule.cap)
        at = torch.cat((_newest(keys.shape[1], W, total, device).expand(*retained.shape[:2], -1), retained), 2)
        at = at.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
        retained_scores = ranks.transpose(1, 2).gather(2, retained)
        return o, Held(
            keys.transpose(1, 2).gather(2, at),
            values.transpose(1, 2).gather(2, at),
            (lengths + min(total, W)).to(torch.int32),
            torch.cat((_ring(scores, W, total).transpose(1, 2), retained_scores), 2),
            # if no keys were retained before the call, a token's index is its position
            retained.to(torch.int32) if ages is None else ages.transpose(1, 2).gather(2, retained),
            _ring(raws, rule.reach, total),
        )


def _retained(rule: Retention, held: Held) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys, values, ranks (scores) and ages of the retained tokens `[N, cap, H, ...]`, oldest first; empty
    entries have rank −∞."""
    filled = torch.arange(rule.cap, device=held.ages.device) < (held.lengths - rule.window).unsqueeze(-1)
    order = held.ages.masked_fill(~filled, torch.iinfo(held.ages.dtype).max).argsort(-1)
    ranks = held.scores[:, :, rule.window :].masked_fill(~filled, -torch.inf)
    of_tokens = order.unsqueeze(-1).expand(-1, -1, -1, held.keys.shape[-1])
    keys, values = (x[:, :, rule.window :].gather(2, of_tokens).transpose(1, 2) for x in (held.keys, held.values))
    return keys, values, ranks.gather(-1, order).transpose(1, 2), held.ages.gather(-1, order).transpose(1, 2)


def _first_retained(stays: Bool[Tensor, "N H left"], cap: int) -> tuple[Int[Tensor, "N H cap"], Int[Tensor, "N H"]]:
    """Return the indices of the first `cap` tokens that stay, and the number of all that stay; zeros without tokens."""
    if stays.shape[2]:
        return first_taken(stays, cap)
    zeros = torch.zeros(*stays.shape[:2], cap + 1, dtype=torch.int64, device=stays.device)
    return zeros[..., 1:], zeros[..., 0]


def _newest(length: int, size: int, total: int, device: torch.device) -> Int[Tensor, "size"]:
    """Return each `_ring` entry's token as an index into the last `length` of `total` tokens; undefined if unused."""
    if total < size:
        return torch.arange(length - total, length - total + size, device=device).clamp(max=length - 1)
    return torch.arange(length - size, length, device=device).roll(total % size)


def _ring(x: Float[Tensor, "N L *rest"], size: int, total: int) -> Float[Tensor, "N size *rest"]:
    """Return ring buffers of each sequence's newest `size` of `total` tokens, each at index (position mod `size`)."""
    held = min(total, size)
    newest = x[:, x.shape[1] - held :]
    if held < size:
        return torch.cat((newest, x.new_zeros(len(x), size - held, *x.shape[2:])), 1)
    return newest.roll(total % size, 1) if size else newest


def _score(rule: Retention, state: LayerState) -> None:
    """Score the newest tokens and write those logits that are final; some of them may have been written before."""
    assert rule.scorer is not None
    before, reach, W = state.span.before, rule.reach, rule.window
    (N, H, _, K), (behind, ahead) = state.kv.keys.shape, rule.context
    positions = before.unsqueeze(1) - reach + torch.arange(reach, device=before.device)
    at = (positions % reach)[..., None, None]
    raw = state.raw.value
    raw = raw.gather(1, at.expand_as(raw))
    slots = (positions % W).unsqueeze(1).expand(N, H, reach)
    values = state.kv.values.gather(2, slots.unsqueeze(-1).expand(-1, -1, -1, K)).transpose(1, 2)
    begin = (reach - before).clamp(min=0)
    final = slice(behind, reach - ahead)
    logits = rule.scorer(raw, values, begin=begin)[:, final].transpose(1, 2)
    slots = slots[:, :, final]
    scores = state.scores.value
    exists = (positions[:, final] >= 0).unsqueeze(1)
    scores.scatter_(2, slots, torch.where(exists, logits.to(scores.dtype), scores.gather(2, slots)))


def _prepare(k: Tensor, state: LayerState, batch: int) -> None:
    """Allocate the tensors of the state before the first call."""
    if state.kv.tensors:
        return
    k = k.detach()
    state.kv.allocate(batch, k)
    state.scores.get(batch, k)
    state.raw.get(batch, k)
    state.ages.value = torch.zeros(batch, *state.ages.shape, dtype=state.ages.dtype, device=k.device)


def _held(state: LayerState) -> Held:
    kv = state.kv
    return Held(kv.keys, kv.values, kv.lengths, state.scores.value, state.ages.value, state.raw.value)
