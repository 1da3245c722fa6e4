"""Exchanges for some heads while other heads are computed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")

# minimum bytes per group of heads: 37 us at the 450 GB/s of NVLink, about the CPU overhead of the calls that a further
# group adds, and 340 us at the 50 GB/s of InfiniBand
GROUP_BYTES = 1 << 24
MAX_GROUPS = 4


class HeadGroup(NamedTuple):
    """Heads `first` to `stop` of `heads`, and the same share of every tensor that has a multiple of `heads`."""

    first: int
    stop: int
    heads: int

    def of(self, x: Tensor, dim: int = 2) -> Tensor:
        """Return the group's heads of `x`; all of `x` if its single head serves every group.

        Raises:
            ValueError: `x` does not have a multiple of `heads`.
        """
        if x.shape[dim] == 1 or self.stop - self.first == self.heads:
            return x
        if x.shape[dim] % self.heads:
            raise ValueError(f"{x.shape[dim]} heads are no multiple of {self.heads}, the heads of queries or keys")
        share = x.shape[dim] // self.heads
        return x.narrow(dim, share * self.first, share * (self.stop - self.first))


def head_groups(heads: int, sent: float) -> list[HeadGroup]:
    """Divide heads into up to `MAX_GROUPS` groups; several groups have on average at least `GROUP_BYTES` bytes each.

    `sent`, the bytes of all groups together, must be equal on all ranks, because each group has its own exchanges.
    """
    count = max(1, min(heads, MAX_GROUPS, int(sent) // GROUP_BYTES))
    bounds = [i * heads // count for i in range(count + 1)]
    return [HeadGroup(bounds[i], bounds[i + 1], heads) for i in range(count)]


def in_turn(calls: Sequence[Generator[None, None, T]]) -> list[T]:
    """Advance each call, a generator, to its next `yield` in turn, and return the results.

    A call yields after it has begun an exchange, so that the next call computes while the first one's data travel. The
    backward pass does the same, because autograd runs the latest of the nodes that are ready.
    """
    results: dict[int, T] = {}
    while len(results) < len(calls):
        for i, call in enumerate(calls):
            if i not in results:
                try:
                    next(call)
                except StopIteration as end:
                    results[i] = end.value
    return [results[i] for i in range(len(calls))]
