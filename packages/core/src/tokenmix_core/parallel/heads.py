"""Give each rank whole rows of some heads, for operations that need more than a rank's own and earlier tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmix_core.parallel.exchange import all_to_all, combined
from tokenmix_core.parallel.shard import SequenceShard


class HeadExchange:
    """Exchange this rank's tokens of all heads for whole rows of this rank's heads, and back.

    An operation that treats heads separately runs on whole rows as in one process: documents, chunks and selections may
    cross ranks. A rank sends its part of each tensor once, except its own heads: about (n − 1) / n of it for n ranks.

    Args:
        shard: how sequences are split.
        units: number of heads, or of groups of heads that an operation needs together; at least the number of ranks.
        name: the operation, under which `shard.traffic` counts bytes.

    Raises:
        ValueError: fewer units than ranks; the message is the same on all ranks.
    """

    def __init__(self, shard: SequenceShard, units: int, name: str):
        if units < shard.size:
            raise ValueError(
                f"{name}: {units} heads of keys cannot be divided among {shard.size} ranks; split rows over at most "
                f"{units}"
            )
        self.shard, self.units, self.name = shard, units, name
        self.bounds = [rank * units // shard.size for rank in range(shard.size + 1)]

    def own(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's heads of `x`, which has all heads along `dim`."""
        share = x.shape[dim] // self.units
        first, stop = (share * self.bounds[self.shard.rank + i] for i in range(2))
        return x.narrow(dim, first, stop - first)

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Return `[B, T, own heads, ...]` of tensors `[B, T_local, heads, ...]`, which have multiples of `units` heads.

        Tensors of one dtype are sent together.
        """
        found: list[Tensor] = list(tensors)
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            index = [i for i, x in enumerate(tensors) if x.dtype == dtype]
            flat = [tensors[i].unflatten(2, (self.units, -1)).flatten(3) for i in index]
            moved = _Exchange.apply(torch.cat(flat, -1), self, True)
            for i, part in zip(index, moved.split([x.shape[-1] for x in flat], -1), strict=True):
                share = tensors[i].shape[2] // self.units
                found[i] = part.unflatten(-1, (share, *tensors[i].shape[3:])).flatten(2, 3)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """Return `[B, T_local, heads, ...]` of this rank's tokens, from `[B, T, own heads, ...]` of all tokens."""
        count = self.bounds[self.shard.rank + 1] - self.bounds[self.shard.rank]
        flat = x.unflatten(2, (count, -1))
        return _Exchange.apply(flat.flatten(3), self, False).unflatten(-1, flat.shape[3:]).flatten(2, 3)

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of all heads on all ranks, from `x [..., own heads]`; differentiable."""
        count = self.bounds[self.shard.rank + 1] - self.bounds[self.shard.rank]
        share = x.shape[-1] // count
        before, after = self.bounds[self.shard.rank], self.units - self.bounds[self.shard.rank + 1]
        return combined(self.shard, torch.nn.functional.pad(x, (share * before, share * after)))


class _Exchange(torch.autograd.Function):
    """Move `[B, T_local, units, C]` to `[B, T, own units, C]`, or back; each direction is the other's gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, exchange: HeadExchange, forth: bool) -> Tensor:
        ctx.exchange, ctx.forth, ctx.label = exchange, forth, (exchange.shard.layer, exchange.name)
        return _move(exchange, x, forth, ctx.label)

    @staticmethod
    def backward(ctx, grad: Tensor):
        layer, name = ctx.label
        return _move(ctx.exchange, grad, not ctx.forth, (layer, f"{name}, backward")), None, None


def _move(exchange: HeadExchange, x: Tensor, forth: bool, label: tuple[int | None, str]) -> Tensor:
    shard, bounds = exchange.shard, exchange.bounds
    counts = [b - a for a, b in itertools.pairwise(bounds)]
    batch, channels = x.shape[0], x.shape[-1]
    others = [batch * shard.local_tokens * count * channels for count in counts]
    mine = [others[shard.rank]] * shard.size
    if forth:
        parts: Sequence[Tensor] = x.split(counts, 2)
    else:
        parts = [_tokens_of(shard, x, rank) for rank in range(shard.size)]
    sent = torch.cat([part.flatten() for part in parts])
    arrived = all_to_all(shard, sent, others if forth else mine, mine if forth else others, label)
    if not forth:
        shapes = [(batch, shard.local_tokens, count, channels) for count in counts]
        return torch.cat([part.view(shape) for part, shape in zip(arrived.split(others), shapes, strict=True)], 2)
    ranks = arrived.view(shard.size, batch, shard.local_tokens, counts[shard.rank], channels)
    return torch.cat([ranks[s.rank, :, s.offset : s.offset + s.tokens] for s in shard.spans], 1)


def _tokens_of(shard: SequenceShard, x: Tensor, rank: int) -> Tensor:
    """Return the tokens of whole rows that belong to a rank, in the rank's order."""
    spans = sorted((span for span in shard.spans if span.rank == rank), key=lambda span: span.offset)
    return torch.cat([x[:, span.start : span.stop] for span in spans], 1)
