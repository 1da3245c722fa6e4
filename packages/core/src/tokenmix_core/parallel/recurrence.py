"""Linear recurrences over a split sequence: the tokens of a rank map the state affinely, and these maps are composed.

A span (consecutive tokens on one rank) maps the state S before it to S' = M S + L after it, where M is the composition
of its transitions and L the state that it reaches from zero. Each rank computes (M, L) of its spans, all ranks gather
these pairs, and each rank composes them into the states that enter its spans. Gradients take the reverse way: dS = Mᵀ
dS' + G, where G is the gradient that comes from the span's own outputs. Each rank keeps the gathered M, so that the
backward pass gathers only G.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.parallel.exchange import begin_gather, combined
from tokenmix_core.parallel.shard import SequenceShard, Span

Tensors = tuple[Tensor, ...]


class Recurrence(NamedTuple):
    """A linear recurrence over tensors `[B, T, ...]` of tokens.

    Attributes:
        name: the operation's name, under which traffic is counted.
        run: `(tensors, initial_state, cu_seqlens)` → outputs and final states.
        state: `(tensors, initial_state)` → only the final states.
        transition: `tensors` → M and P. M is `[B, HV, K, K]`, or `[B, HV, 1, 1]` for decays. P maps the state before
            the tokens to their outputs; only `pull` reads it, and it may be None.
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
) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
    """Return this rank's outputs and, if `final_states`, the final states of all rows or documents (else None).

    If `final_states` is None, `shard.keeps_states` decides.

    This is a generator for `in_turn`. Its first `yield` lets other generators compute while maps are gathered; its
    second one lets the backward pass differentiate the others while gradients of states are gathered.
    """
    first = tensors[0]
    shard.check_local(x.name, first)
    batch, final_states = first.shape[0], shard.keeps_states if final_states is None else final_states
    if initial_state is not None and shard.packed:
        rows = initial_state[torch.tensor(shard.documents, device=first.device)]
    else:
        rows = None if initial_state is None else initial_state.repeat_interleave(len(shard.local), 0)
    maps, gathered, before = None, None, rows
    if shard.crosses:
        maps, arriving = _begin_maps(shard, x, tensors, rows)
        yield
        gathered = arriving[0]()
        entering = entering_states(shard, gathered, arriving[1]())
        before = _before(shard, x, rows, entering, batch)
    o, final = x.run(tuple(shard.to_rows(t) for t in tensors), before, shard.cu_seqlens(first.device))
    o = shard.from_rows(o)
    if maps is not None and torch.is_grad_enabled():
        arrival = _Arrival()
        o, final = _AddLeaving.apply(shard, arrival, gathered, o, final)
        yield
        label = shard.layer, f"{x.name}, backward"
        o, final = _BeginGradients.apply(shard, x, label, arrival, maps, o, final, *tensors)
    return o, _final_states(shard, x, final, initial_state, batch) if final_states else None


def _by_span(shard: SequenceShard, states: Tensor, span: int, index: list[int]) -> Tensor:
    """Return one local span's states `[B, ...]` from `states`, which has one entry per row or per document part.

    In a packed batch, `index[span]` is the entry of the local span.
    """
    return states[index[span]].unsqueeze(0) if shard.packed else states[span :: len(shard.local)]


Maps = list[tuple[Tensor, Tensor | None] | None]


class _Arrival:
    """Holds the function `wait`, which `_BeginGradients` sets and `_AddLeaving` calls: it returns the gathered G."""

    wait: Callable[[], Tensor]


@torch.no_grad()
def _begin_maps(
    shard: SequenceShard, x: Recurrence, tensors: Tensors, rows: Tensor | None
) -> tuple[Maps, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Begin to gather M and L of all spans; return M and P of this rank's spans, and functions that await all M and L.

    M and P of a span are those of its tokens that continue an earlier span's document; None if there are none.
    """
    batch, shape = tensors[0].shape[0], x.shape
    label = shard.layer, x.name
    wide = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    maps = [x.transition(_head(span, tensors)) if span.depth else None for span in shard.local]
    zero = tensors[0].new_zeros(batch, shape[0], x.width, x.width, dtype=wide)
    through = [m[0].to(wide) if m and a.through else zero for a, m in zip(shard.local, maps, strict=True)]
    # the ranks exchange the transitions M while they compute the states
    transitions = begin_gather(shard, torch.stack(through), label)
    zero, states = tensors[0].new_zeros(batch, *shape, dtype=wide), []
    for i, span in enumerate(shard.local):
        end = span.offset + span.tokens
        tail = tuple(t[:, end - span.tail : end] for t in tensors)
        # the last document begins in this span, so its state starts from the document's own initial state
        begun = None if rows is None or span.through else _by_span(shard, rows, i, shard.tails)
        states.append(x.state(tail, begun).to(wide) if span.tail else zero)
    return maps, (transitions, begin_gather(shard, torch.stack(states), label))


@torch.no_grad()
def entering_states(shard: SequenceShard, m: Tensor, local: Tensor) -> list[Tensor]:
    """Return the state that enters each local span, given M and L `[spans, ...]` of all spans' maps S' = M S + L."""
    state = zero = torch.zeros_like(local[0])
    entering = {}
    for span, m_span, l_span in zip(shard.spans, m, local, strict=True):
        entering[span.start] = state if span.depth else zero
        state = (_apply(m_span, state) + l_span if span.through else l_span) if span.tail else zero
    return [entering[span.start] for span in shard.local]


def leaving_gradients(shard: SequenceShard, m: Tensor, local: Tensor) -> list[Tensor]:
    """Return the gradient dS' of the state that leaves each local span, from dS = Mᵀ dS' + G of all later spans."""
    gradient = zero = torch.zeros_like(local[0])
    leaving = {}
    for span, m_span, g_span in zip(*map(reversed, (shard.spans, m.unbind(0), local.unbind(0))), strict=True):
        leaving[span.start] = gradient if span.tail else zero
        gradient = (_apply_transposed(m_span, gradient) + g_span if span.through else g_span) if span.depth else zero
    return [leaving[span.start] for span in shard.local]


def _head(span: Span, tensors: Sequence[Tensor]) -> Tensors:
    return tuple(t[:, span.offset : span.offset + span.head] for t in tensors)


def _apply(m: Tensor, state: Tensor) -> Tensor:
    """Return M S for the state S, or the decay times S if `m` is a decay."""
    return m * state if m.shape[-1] == 1 else m @ state


def _apply_transposed(m: Tensor, state: Tensor) -> Tensor:
    return m * state if m.shape[-1] == 1 else m.mT @ state


def _before(shard: SequenceShard, x: Recurrence, rows: Tensor | None, entering: list[Tensor], batch: int) -> Tensor:
    """Return initial states of local rows or document parts: states that enter spans, else `rows` (None: zeros)."""
    count = len(shard.parts) if shard.packed else batch * len(shard.local)
    base = entering[0].new_zeros(count, *x.shape) if rows is None else rows.to(entering[0].dtype)
    for i, (span, state) in enumerate(zip(shard.local, entering, strict=True)):
        if span.depth:
            index = [shard.heads[i]] if shard.packed else list(range(i, count, len(shard.local)))
            base = base.index_copy(0, torch.tensor(index, device=base.device), state)
    return base


class _AddLeaving(torch.autograd.Function):
    """Pass outputs and final states through; backward: give states that leave a span the gradients from later spans.

    These replace the final states' gradients of documents that continue after the span, which are zero.
    """

    @staticmethod
    def forward(ctx, shard, arrival, m, o, final):
        ctx.shard, ctx.arrival = shard, arrival
        ctx.save_for_backward(m)
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @torch.no_grad()
    def backward(ctx, do, dfinal):
        shard, (m,) = ctx.shard, ctx.saved_tensors
        leaving = leaving_gradients(shard, m, ctx.arrival.wait())
        dfinal = dfinal.clone()
        for i, (span, gradient) in enumerate(zip(shard.local, leaving, strict=True)):
            if span.tail:
                _by_span(shard, dfinal, i, shard.tails).copy_(gradient)
        return None, None, None, do, dfinal


class _BeginGradients(torch.autograd.Function):
    """Pass outputs and final states through; backward: begin to gather the gradient G of the state before each span."""

    @staticmethod
    def forward(ctx, shard, x, label, arrival, maps, o, final, *tensors):
        ctx.shard, ctx.x, ctx.label, ctx.arrival = shard, x, label, arrival
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
        tensors = saved[2 * spans :]
        if do is None:
            do = tensors[0].new_zeros(ctx.shapes[0])
        ends = dfinal is not None
        dfinal = dfinal if ends else like.new_zeros(ctx.shapes[1])
        zero = dfinal.new_zeros(do.shape[0], *x.shape)
        pulled = []
        for i, (span, m, p) in enumerate(
            zip(shard.local, saved[: 2 * spans : 2], saved[1 : 2 * spans : 2], strict=True)
        ):
            if m is None:
                pulled.append(zero)
                continue
            (gradient,) = _head(span, (do,))
            local = x.pull(_head(span, tensors), p, gradient).to(zero.dtype)
            if ends and not span.through:
                # the document ends in this span, so its final state has a gradient of its own
                local = local + _apply_transposed(m.to(zero.dtype), _by_span(shard, dfinal, i, shard.heads))
            pulled.append(local)
        ctx.arrival.wait = begin_gather(shard, torch.stack(pulled), ctx.label)
        return None, None, None, None, None, do, dfinal, *[None] * len(tensors)


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
        # add an empty sum: every rank's graph must contain it, because its backward pass communicates
        found = found + final[:0].sum()
    found = combined(shard, found)
    empty = [a == b for a, b in zip(shard.boundaries, shard.boundaries[1:], strict=False)]
    if initial_state is None or not any(empty):
        return found
    return torch.where(torch.tensor(empty, device=final.device).view(-1, 1, 1, 1), initial_state.to(found.dtype), found)


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: SequenceShard, name: str, decays: Tensor, local: Tensor) -> Tensor:
        label = shard.layer, name
        arriving = begin_gather(shard, decays, label), begin_gather(shard, local, label)
        m = arriving[0]()
        entering = torch.stack(entering_states(shard, m, arriving[1]()))
        ctx.shard, ctx.label = shard, (shard.layer, f"{name}, backward")
        ctx.save_for_backward(m, entering)
        return entering

    @staticmethod
    def backward(ctx, grad: Tensor):
        m, entering = ctx.saved_tensors
        leaving = torch.stack(leaving_gradients(ctx.shard, m, begin_gather(ctx.shard, grad, ctx.label)()))
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
