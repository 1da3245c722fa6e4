"""Differentiable exchanges of tokens and states between the ranks of a `SequenceShard`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmix_core.parallel.shard import Range, SequenceShard, Span


class _Plan(NamedTuple):
    """A plan of one exchange: slices of the rank's tokens to send, and slices of the buffer that receives tokens.

    Attributes:
        sends: slices of this rank's tokens, ordered by receiving rank, then by that rank's requests.
        sent, received: number of tokens sent to each rank, and received from each rank.
        order: slices of the received buffer, in the order in which this rank requested them.
        counts: number of tokens that each local span requests.
        idle: True if no rank requests any tokens.
    """

    sends: list[Range]
    sent: list[int]
    received: list[int]
    order: list[Range]
    counts: list[int]
    idle: bool


def receive(
    shard: SequenceShard, x: Tensor, wanted: Callable[[Span], list[Range]], name: str, key: object
) -> list[Tensor]:
    """Return for each local span the tokens of the whole row that it requests, sent by the ranks that own them.

    Every rank must call this. The backward pass sends gradients to the ranks that own the tokens; these add them up.

    Args:
        x: this rank's tokens `[B, T_local, ...]`.
        wanted: returns the ranges of the whole row that a given span requests; must return the same on all ranks.
        name: name of the operation, under which `shard.traffic` counts the bytes.
        key: identifies `wanted`: the plan of the exchange is kept under this key.

    Returns:
        A tensor `[B, n, ...]` for each local span. The loss must depend on all of them, because every rank must take
        part in the exchange of the backward pass.
    """
    plan = cast(_Plan | None, shard._plans.get((name, key)))
    if plan is None:
        plan = shard._plans[name, key] = _plan(shard, wanted)
    if plan.idle:
        return [x[:, :0] for _ in shard.local]
    return list(_Receive.apply(x, shard, plan, (shard.layer, name)).split(plan.counts, 1))


def _plan(shard: SequenceShard, wanted: Callable[[Span], list[Range]]) -> _Plan:
    # (receiving rank, span that has the tokens, range in it), in the order of the requests
    asked: list[tuple[int, Span, Range]] = []
    counts = []
    for receiver in sorted(shard.spans, key=lambda span: (span.rank, span.offset)):
        ranges = [(a, b) for a, b in wanted(receiver) if a < b]
        if receiver.rank == shard.rank:
            counts.append(sum(b - a for a, b in ranges))
        length = receiver.tokens
        for a, b in ranges:
            for i in range(a // length, (b - 1) // length + 1):
                span = shard.spans[i]
                asked.append((receiver.rank, span, (max(a, span.start), min(b, span.stop))))
    sends, sent, received = [], [0] * shard.size, [0] * shard.size
    mine: list[tuple[int, int]] = []
    for receiver, span, (a, b) in asked:
        if span.rank == shard.rank:
            sends.append((a - span.start + span.offset, b - span.start + span.offset))
            sent[receiver] += b - a
        if receiver == shard.rank:
            mine.append((span.rank, b - a))
            received[span.rank] += b - a
    begin = [0, *itertools.accumulate(received)]
    order = []
    for rank, count in mine:
        order.append((begin[rank], begin[rank] + count))
        begin[rank] += count
    return _Plan(sends, sent, received, order, counts, not asked)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shard: SequenceShard, plan: _Plan, label: tuple[int | None, str]) -> Tensor:
        ctx.shard, ctx.plan, ctx.label, ctx.shape = shard, plan, label, x.shape
        tokens = x.transpose(0, 1)
        out = _slices(tokens, plan.sends)
        arrived = all_to_all(shard, out, plan.sent, plan.received, label)
        return _slices(arrived, plan.order).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        plan, grad = ctx.plan, grad.transpose(0, 1)
        back = grad.new_empty(sum(plan.received), *grad.shape[1:])
        start = 0
        for a, b in plan.order:
            back[a:b] = grad[start : start + b - a]
            start += b - a
        layer, name = ctx.label
        arrived = all_to_all(ctx.shard, back, plan.received, plan.sent, (layer, f"{name}, backward"))
        # summed in float32, because 16-bit sums would be rounded once per rank
        total = arrived.new_zeros(
            ctx.shape[1], *arrived.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32)
        )
        start = 0
        for a, b in plan.sends:
            total[a:b] += arrived[start : start + b - a]
            start += b - a
        return total.to(grad.dtype).transpose(0, 1), None, None, None


def _slices(x: Tensor, ranges: list[Range]) -> Tensor:
    """Return the given ranges of x's first dimension, concatenated."""
    return torch.cat([x[a:b] for a, b in ranges]) if ranges else x[:0].contiguous()


def all_to_all(
    shard: SequenceShard, x: Tensor, sent: list[int], received: list[int], label: tuple[int | None, str]
) -> Tensor:
    """Send the rows of `x` in order, `sent[r]` of them to rank r.

    Return `received[r]` rows of each rank r, in order.
    """
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=shard.group)
    others = sum(sent) - sent[shard.rank]
    shard.traffic[label] += others * x[0:1].numel() * x.element_size() if len(x) else 0
    return arrived


@torch.no_grad()
def gather_states(shard: SequenceShard, x: Tensor, label: tuple[int | None, str]) -> list[Tensor]:
    """Gather one tensor per span from all ranks, in the order of the spans in the row.

    `x [local spans, ...]` holds the tensors of this rank's spans; its bytes count under `label`.
    """
    x = x.contiguous()
    found = x.new_empty(shard.size * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(found, x, group=shard.group)
    shard.traffic[label] += (shard.size - 1) * x.numel() * x.element_size()
    spans = len(shard.local)
    index = {span.start: span.rank * spans + (1 if span.offset else 0) for span in shard.spans}
    return [found[index[span.start]] for span in shard.spans]


@torch.no_grad()
def gather_rows(shard: SequenceShard, x: Tensor, name: str = "rows") -> Tensor:
    """Gather whole rows on all ranks; `x` holds this rank's tokens. Not differentiable."""
    whole = x.new_zeros(x.shape[0], shard.tokens, *x.shape[2:])
    for span in shard.local:
        whole[:, span.start : span.stop] = x[:, span.offset : span.offset + span.tokens]
    dist.all_reduce(whole, group=shard.group)
    shard.traffic[shard.layer, name] += 2 * (shard.size - 1) * x.numel() * x.element_size()
    return whole


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, shard: SequenceShard, everywhere: bool) -> Tensor:
        ctx.shard, ctx.everywhere = shard, everywhere
        total = x.clone()
        dist.all_reduce(total, group=shard.group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.everywhere:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.shard.group)
        return grad, None, None


def total(shard: SequenceShard, x: Tensor) -> Tensor:
    """Return the sum of `x` over the ranks, for a loss on which every rank calls `backward`.

    The gradient of the sum is passed to each rank's `x` once. Each rank then has a part of the parameters' gradients,
    and the sum of these parts over the ranks is the gradient that a single process would compute.
    """
    return _Sum.apply(x, shard, False)


def combined(shard: SequenceShard, x: Tensor) -> Tensor:
    """Return the sum of `x` over the ranks, for a sum from which each rank computes different values.

    The backward pass adds up the gradients that the sum has on the ranks.
    """
    return _Sum.apply(x, shard, True)
