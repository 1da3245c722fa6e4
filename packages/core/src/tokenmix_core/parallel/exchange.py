"""Differentiable exchanges of tokens and states between the ranks of a `SequenceShard`.

Exchanges run beside kernels: `begin_…` starts one and returns at once, and its result is waited for where it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tokenmix_core.parallel.shard import Range, SequenceShard, Span

# layer (None outside a model) and operation, under which `SequenceShard.traffic` counts bytes
Label = tuple[int | None, str]
Wanted = Callable[[Span], list[Range]]


class _Plan(NamedTuple):
    """A plan of one exchange: slices of the rank's tokens to send, and slices of the buffer that receives tokens.

    Attributes:
        sends: slices of this rank's tokens, ordered by receiving rank, then by that rank's requests.
        sent, received: number of tokens sent to each rank, and received from each rank.
        order: slices of the received buffer, in the order in which this rank requested them.
        counts: number of tokens that each local span requests.
        moved: number of tokens that all ranks together send to other ranks.
        once: True if no token of this rank is sent twice.
        idle: True if no rank requests any tokens.
    """

    sends: list[Range]
    sent: list[int]
    received: list[int]
    order: list[Range]
    counts: list[int]
    moved: int
    once: bool
    idle: bool


def receive(shard: SequenceShard, x: Tensor, wanted: Wanted, name: str, key: object) -> list[Tensor]:
    """Return for each local span the tokens `[B, n, ...]` that it requests; arguments as for `begin_receive`."""
    return [found for (found,) in begin_receive(shard, [x], wanted, name, key)()]


def begin_receive(
    shard: SequenceShard, xs: Sequence[Tensor], wanted: Wanted, name: str, key: object
) -> Callable[[], list[list[Tensor]]]:
    """Begin an exchange that gives each span the tokens of the whole row that it requests (`wanted`).

    Every rank must call this. The backward pass sends the gradients to the ranks that hold the tokens, which add them
    up.

    Args:
        xs: this rank's tokens `[B, T_local, ...]`, of one dtype.
        wanted: returns the ranges of the whole row that a given span requests; must return the same on all ranks.
        name: name of the operation, under which `shard.traffic` counts the bytes.
        key: identifies `wanted`: the plan of the exchange is stored under `name` and `key`, and used again.

    Returns:
        A function that waits, and returns for each local span a tensor `[B, n, ...]` of each of `xs`. The loss must
        depend on all of them, because every rank must take part in the exchange of the backward pass.
    """
    plan = _plan_of(shard, wanted, name, key)
    if plan.idle:
        return lambda: [[x[:, :0] for x in xs] for _ in shard.local]
    flight = _Flight(shard, plan, (shard.layer, name))
    token = _Begin.apply(flight, *xs)
    sizes = [x[0, 0].numel() for x in xs]

    def wait() -> list[list[Tensor]]:
        spans = _End.apply(token, flight).split(plan.counts, 1)
        return [
            [part.unflatten(-1, x.shape[2:]) for part, x in zip(span.split(sizes, -1), xs, strict=True)]
            if len(xs) > 1 or xs[0].dim() != 3
            else [span]
            for span in spans
        ]

    return wait


def requested_tokens(shard: SequenceShard, wanted: Wanted, name: str, key: object) -> float:
    """Return the number of tokens per row that a rank sends to others for `begin_receive`, averaged over ranks."""
    return _plan_of(shard, wanted, name, key).moved / shard.size


def _plan_of(shard: SequenceShard, wanted: Wanted, name: str, key: object) -> _Plan:
    plan = cast(_Plan | None, shard._plans.get((name, key)))
    if plan is None:
        plan = shard._plans[name, key] = _plan(shard, wanted)
    return plan


def _plan(shard: SequenceShard, wanted: Wanted) -> _Plan:
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
    moved = sum(b - a for receiver, span, (a, b) in asked if span.rank != receiver)
    once = all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(sends)))
    return _Plan(sends, sent, received, order, counts, moved, once, not asked)


class _Flight:
    """An exchange that has begun: its plan, the buffer that it fills, and the handle to wait for."""

    def __init__(self, shard: SequenceShard, plan: _Plan, label: Label):
        self.shard, self.plan, self.label = shard, plan, label
        self.pending: tuple[Tensor, Any] | None = None

    def wait(self) -> Tensor:
        """Return the filled buffer."""
        arrived, work = cast("tuple[Tensor, Any]", self.pending)
        self.pending = None
        work.wait()
        return arrived


class _Begin(torch.autograd.Function):
    """Begin an exchange; return an empty tensor, on which `_End` depends. Backward: add up the gradients received."""

    @staticmethod
    def forward(ctx, flight: _Flight, *xs: Tensor) -> Tensor:
        ctx.flight, ctx.shapes, plan = flight, [x.shape for x in xs], flight.plan
        parts = [torch.cat([x[:, a:b].flatten(2) for x in xs], -1) for a, b in plan.sends] or [_no_tokens(xs)]
        out = torch.cat(parts, 1).transpose(0, 1)
        flight.pending = _begin_all_to_all(flight.shard, out, plan.sent, plan.received, flight.label)
        return xs[0].new_empty(0)

    @staticmethod
    def backward(ctx, _):
        arrived, plan = ctx.flight.wait().transpose(0, 1), ctx.flight.plan
        # sum in float32, because 16-bit sums would be rounded once per rank
        dtype = arrived.dtype if plan.once else torch.promote_types(arrived.dtype, torch.float32)
        grads = []
        for shape, part in zip(ctx.shapes, arrived.split([s[2:].numel() for s in ctx.shapes], -1), strict=True):
            total = part.new_zeros(*shape[:2], shape[2:].numel(), dtype=dtype)
            start = 0
            for a, b in plan.sends:
                total[:, a:b] += part[:, start : start + b - a]
                start += b - a
            grads.append(total.to(arrived.dtype).view(shape))
        return None, *grads


class _End(torch.autograd.Function):
    """Wait for an exchange and return the tokens in the order of the requests. Backward: begin the reverse exchange."""

    @staticmethod
    def forward(ctx, token: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return _slices(flight.wait(), flight.plan.order).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        flight, plan, grad = ctx.flight, ctx.flight.plan, grad.transpose(0, 1)
        back = grad.new_empty(sum(plan.received), *grad.shape[1:])
        start = 0
        for a, b in plan.order:
            back[a:b] = grad[start : start + b - a]
            start += b - a
        layer, name = flight.label
        label = layer, f"{name}, backward"
        flight.pending = _begin_all_to_all(flight.shard, back, plan.received, plan.sent, label)
        return grad.new_empty(0), None


def _no_tokens(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([x[:, :0].flatten(2) for x in xs], -1)


def _slices(x: Tensor, ranges: list[Range]) -> Tensor:
    """Return the given ranges of x's first dimension, concatenated."""
    return torch.cat([x[a:b] for a, b in ranges]) if ranges else x[:0].contiguous()


def all_to_all(shard: SequenceShard, x: Tensor, sent: list[int], received: list[int], label: Label) -> Tensor:
    """Send the rows of `x` in order, `sent[r]` of them to rank r.

    Return `received[r]` rows of each rank r, in order.
    """
    arrived, work = _begin_all_to_all(shard, x, sent, received, label)
    work.wait()
    return arrived


def _begin_all_to_all(
    shard: SequenceShard, x: Tensor, sent: list[int], received: list[int], label: Label
) -> tuple[Tensor, Any]:
    """Return the buffer of the received rows, and the handle to wait for before the buffer is read."""
    arrived = x.new_empty(sum(received), *x.shape[1:])
    work = dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=shard.group, async_op=True)
    others = sum(sent) - sent[shard.rank]
    shard.traffic[label] += others * x[0:1].numel() * x.element_size() if len(x) else 0
    return arrived, work


@torch.no_grad()
def begin_gather(shard: SequenceShard, x: Tensor, label: Label) -> Callable[[], Tensor]:
    """Begin to gather one tensor per span from all ranks; return a function that waits for them.

    `x [local spans, ...]` holds the tensors of this rank's spans; `shard.traffic` counts the bytes under `label`. The
    result `[spans, ...]` is in the order of the spans in the row.
    """
    x = x.contiguous()
    found = x.new_empty(shard.size * len(x), *x.shape[1:])
    work = cast(Any, dist.all_gather_into_tensor(found, x, group=shard.group, async_op=True))
    shard.traffic[label] += (shard.size - 1) * x.numel() * x.element_size()

    def wait() -> Tensor:
        work.wait()
        # with zigzag, each rank's second span belongs to the second half of the row, in which ranks descend
        return found if len(shard.local) == 1 else torch.cat((found[::2], found[1::2].flip(0)))

    return wait


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
