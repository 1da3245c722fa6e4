"""Linear recurrences over a split sequence: each rank's tokens act on the state as a linear map; maps are composed.

A span (consecutive tokens on one rank) maps the state S before it to S' = M S + L after it, where M is the composition
of its transitions and L the state that it reaches from zero. Each rank computes (M, L) of its spans, all ranks gather
these pairs, and each rank composes them into the states that enter its spans. Gradients take the reverse way: dS = Mᵀ
dS' + G, where G is the gradient that comes from the span's own outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.parallel.exchange import combined, gather_states
from tokenmix_core.parallel.shard import SequenceShard, Span

Tensors = tuple[Tensor, ...]


class Recurrence(NamedTuple):
    """A linear recurrence over tensors `[B, T, ...]` of tokens.

    Attributes:
        name: the operation's name, under which traffic is counted.
        run: `(tensors, initial_state, cu_seqlens)` → outputs and final states.
        state: `(tensors, initial_state)` → only the final states.
        transition: `tensors` → M and P. M is `[B, HV, K, K]`, or `[B, HV, 1, 1]` for decays; `pull` reads P, which may
            be None.
        pull: `(tensors, P, gradient of outputs)` → G, the gradient of the initial state.
        shape: the sizes (HV, K, V) of a state.
        width: width of M: K or 1.
    """

    name: str
    run: Callable[[Tensors, Tensor | None, Tensor | None], Any]
    state: Callable[[Tensors, Tensor | None], Tensor]
    transition: Callable[[Tensors], tuple[Tensor, Tensor | None]]
    pull: Callable[[Tensors, Tensor | None, Tensor], Tensor]
    shape: tuple[int, int, int]
    width: int


def split_recurrence(
    shard: SequenceShard, x: Recurrence, tensors: Tensors, initial_state: Tensor | None, final_states: bool | None
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's outputs and, if `final_states`, the final states of all rows or documents (else None)."""
    first = tensors[0]
    shard.check_local(x.name, first)
    batch, final_states = first.shape[0], shard.keeps_states if final_states is None else final_states
    if initial_state is not None and shard.packed:
        rows = initial_state[torch.tensor(shard.documents, device=first.device)]
    else:
        rows = None if initial_state is None else initial_state.repeat_interleave(len(shard.local), 0)
    maps = None
    before = rows
    if shard.crosses:
        maps, entering = _enter(shard, x, tensors, rows)
        before = _before(shard, x, rows, entering, batch)
    cu_seqlens = shard.cu_seqlens(first.device)
    o, final = x.run(tuple(shard.to_rows(t) for t in tensors), before, cu_seqlens)
    o = shard.from_rows(o)
    if maps is not None and torch.is_grad_enabled():
        o, final = _Carry.apply(shard, x, (shard.layer, f"{x.name}, backward"), maps, o, final, *tensors)
    return o, _final_states(shard, x, final, initial_state, batch) if final_states else None


def _by_span(shard: SequenceShard, states: Tensor, span: int, index: list[int]) -> Tensor:
    """Return the states `[B, ...]` of one local span from `states`, which has one entry per row or per document part.

    In a packed batch, `index[span]` is the entry of the local span.
    """
    return states[index[span]].unsqueeze(0) if shard.packed else states[span :: len(shard.local)]


Label = tuple[int | None, str]
Maps = list[tuple[Tensor, Tensor | None] | None]


@torch.no_grad()
def _enter(shard: SequenceShard, x: Recurrence, tensors: Tensors, rows: Tensor | None) -> tuple[Maps, list[Tensor]]:
    """Return (M, P) of the tokens that continue the state before each span of this rank, and these states."""
    batch, (heads, K, V) = tensors[0].shape[0], x.shape
    maps, states = [], []
    for i, span in enumerate(shard.local):
        end = span.offset + span.tokens
        tail = tuple(t[:, end - span.tail : end] for t in tensors)
        # the last document begins in this span, so its state is the document's own initial state
        begun = None if rows is None or span.through else _by_span(shard, rows, i, shard.tails)
        states.append(x.state(tail, begun) if span.tail else None)
        maps.append(x.transition(_head(span, tensors)) if span.depth else None)
    like = next((t for t in states if t is not None), None)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32) if like is None else like.dtype
    zero = tensors[0].new_zeros(batch, heads, K, V, dtype=dtype)
    transitions = _through(shard, x, maps, zero)
    local = torch.stack([zero if s is None else s for s in states])
    return maps, _entering(shard, transitions, local, (shard.layer, x.name))


def _entering(shard: SequenceShard, m: Tensor, local: Tensor, label: Label) -> list[Tensor]:
    """Return the state that enters each span of this rank, from the spans' maps S' = M S + L, `m` and `local`."""
    state = zero = torch.zeros_like(local[0])
    entering = {}
    for span, given in zip(shard.spans, gather_states(shard, _pack(m, local), label), strict=True):
        entering[span.start] = state if span.depth else zero
        m_span, l_span = _unpack(given, m, local)
        state = (_apply(m_span, state) + l_span if span.through else l_span) if span.tail else zero
    return [entering[span.start] for span in shard.local]


def _leaving(shard: SequenceShard, m: Tensor, local: Tensor, label: Label) -> list[Tensor]:
    """Return the gradient dS' of the state that leaves each span of this rank; dS = Mᵀ dS' + G, `m` and `local`."""
    gradient = zero = torch.zeros_like(local[0])
    leaving = {}
    gathered = gather_states(shard, _pack(m, local), label)
    for span, given in zip(reversed(shard.spans), reversed(gathered), strict=True):
        leaving[span.start] = gradient if span.tail else zero
        m_span, g_span = _unpack(given, m, local)
        gradient = (_apply(m_span, gradient) + g_span if span.through else g_span) if span.depth else zero
    return [leaving[span.start] for span in shard.local]


def _head(span: Span, tensors: Sequence[Tensor]) -> Tensors:
    return tuple(t[:, span.offset : span.offset + span.head] for t in tensors)


def _through(shard: SequenceShard, x: Recurrence, maps: Maps, like: Tensor) -> Tensor:
    """Return the transition M of each span of this rank; 0 if a document boundary inside the span stops the state."""
    zero = like.new_zeros(*like.shape[:2], x.width, x.width)
    return torch.stack(
        [m[0].to(like.dtype) if m and a.through else zero for a, m in zip(shard.local, maps, strict=True)]
    )


def _pack(m: Tensor, s: Tensor) -> Tensor:
    return torch.cat((m.flatten(-2), s.flatten(-2)), -1)


def _unpack(given: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    a, b = given.split((m[0, 0, 0].numel(), s[0, 0, 0].numel()), -1)
    return a.unflatten(-1, m.shape[-2:]), b.unflatten(-1, s.shape[-2:])


def _apply(m: Tensor, state: Tensor) -> Tensor:
    """Return M S for the state S, or the decay times S if `m` is a decay."""
    return m * state if m.shape[-1] == 1 else m @ state


def _before(shard: SequenceShard, x: Recurrence, rows: Tensor | None, entering: list[Tensor], batch: int) -> Tensor:
    """Return the initial state of each local row or document part: `rows`, or the state that enters its span."""
    count = len(shard.parts) if shard.packed else batch * len(shard.local)
    base = entering[0].new_zeros(count, *x.shape) if rows is None else rows.to(entering[0].dtype)
    for i, (span, state) in enumerate(zip(shard.local, entering, strict=True)):
        if span.depth:
            index = [shard.heads[i]] if shard.packed else list(range(i, count, len(shard.local)))
            base = base.index_copy(0, torch.tensor(index, device=base.device), state)
    return base


class _Carry(torch.autograd.Function):
    """Pass outputs and final states through unchanged.

    The backward pass adds the gradient that comes from later spans.
    """

    @staticmethod
    def forward(ctx, shard, x, label, maps, o, final, *tensors):
        ctx.shard, ctx.x, ctx.label = shard, x, label
        ctx.set_materialize_grads(False)
        saved = [t for m in maps for t in m or (None, None)]
        ctx.save_for_backward(final.new_empty(0), *saved, *tensors)
        ctx.shapes = o.shape, final.shape
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @torch.no_grad()
    def backward(ctx, do, dfinal):
        shard, x, (like, *saved) = ctx.shard, ctx.x, ctx.saved_tensors
        spans = len(shard.local)
        maps = [
            None if m is None else (m, p) for m, p in zip(saved[: 2 * spans : 2], saved[1 : 2 * spans : 2], strict=True)
        ]
        tensors = saved[2 * spans :]
        if do is None:
            do = tensors[0].new_zeros(ctx.shapes[0])
        ends = dfinal is not None
        dfinal = dfinal.clone() if ends else like.new_zeros(ctx.shapes[1])
        zero = dfinal.new_zeros(do.shape[0], *x.shape)
        pulled = []
        for i, (span, given) in enumerate(zip(shard.local, maps, strict=True)):
            if given is None:
                pulled.append(zero)
                continue
            m, p = given
            (gradient,) = _head(span, (do,))
            local = x.pull(_head(span, tensors), p, gradient).to(zero.dtype)
            if ends and not span.through:
                # the document ends in this span, so its final state has a gradient of its own
                local = local + _apply(m.to(zero.dtype).mT, _by_span(shard, dfinal, i, shard.heads))
            pulled.append(local)
        transitions = _through(shard, x, maps, zero)
        local = torch.stack(pulled)
        transposed = transitions if x.width == 1 else transitions.mT
        leaving = _leaving(shard, transposed, local, ctx.label)
        for i, (span, gradient) in enumerate(zip(shard.local, leaving, strict=True)):
            if span.tail:
                _by_span(shard, dfinal, i, shard.tails).copy_(gradient)
        return None, None, None, None, do, dfinal, *[None] * len(tensors)


def _final_states(
    shard: SequenceShard, x: Recurrence, final: Tensor, initial_state: Tensor | None, batch: int
) -> Tensor:
    """Return, on every rank, the final states of all rows or documents."""
    count = len(shard.boundaries) - 1 if shard.packed else batch
    found = final.new_zeros(count, *x.shape)
    if shard.packed:
        ended = [
            i for i in range(len(shard.parts)) if i not in shard.tails or not shard.local[shard.tails.index(i)].tail
        ]
        documents = torch.tensor([shard.documents[i] for i in ended], device=final.device, dtype=torch.int64)
        found = found.index_copy(0, documents, final[torch.tensor(ended, device=final.device, dtype=torch.int64)])
    elif shard.local[-1].stop == shard.tokens:
        found = found + final[len(shard.local) - 1 :: len(shard.local)]
    else:
        # every rank's graph must contain the sum, because its backward pass communicates
        found = found + final[:0].sum()
    found = combined(shard, found)
    empty = [a == b for a, b in zip(shard.boundaries, shard.boundaries[1:], strict=False)]
    if initial_state is None or not any(empty):
        return found
    return torch.where(torch.tensor(empty, device=final.device).view(-1, 1, 1, 1), initial_state.to(found.dtype), found)


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: SequenceShard, name: str, decays: Tensor, local: Tensor) -> Tensor:
        entering = torch.stack(_entering(shard, decays, local, (shard.layer, name)))
        ctx.shard, ctx.label = shard, (shard.layer, f"{name}, backward")
        ctx.save_for_backward(decays, entering)
        return entering

    @staticmethod
    def backward(ctx, grad: Tensor):
        decays, entering = ctx.saved_tensors
        leaving = torch.stack(_leaving(ctx.shard, decays, grad, ctx.label))
        through = leaving.new_tensor([float(span.through) for span in ctx.shard.local]).view(-1, 1, 1, 1, 1)
        return None, None, (through * leaving * entering).sum(-1, keepdim=True), leaving


def compose_decays(shard: SequenceShard, name: str, decays: Tensor, local: Tensor) -> Tensor:
    """Return the state that enters each local span of a recurrence with decays; differentiable, called by all ranks.

    Args:
        shard: how sequences are split.
        name: the operation's name, under which traffic is counted.
        decays: `[spans, B, H, R, 1]`, the factor by which each local span multiplies each row of the state; used for
            spans that lie wholly inside one document (`Span.through`).
        local: `[spans, B, H, R, C]`, the state after each local span, computed from zero at the span's start or at the
            start of its last document; used if this document continues (`Span.tail`).
    """
    return _Compose.apply(shard, name, decays, local)
