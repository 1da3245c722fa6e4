"""Keys and values in pages of `page` tokens, for heads that each retain or drop whole runs of `page` tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn.state.parts import Bounds, StatePart, TensorState, copy_all
from tokenmix_core.ops import paged_attention_decode
from tokenmix_core.ops.types import AttentionOutput, Impl

# a page table has a multiple of this number of columns, so that few shapes occur and kernels compile once
_COLUMNS = 16


class Pages(NamedTuple):
    """Counts of pages: those in use (or upper bounds of these), or allocated ones.

    Attributes:
        row: pages of all heads of a row, for the row with the most.
        head: pages of a head, for the head with the most; or columns of the page table.
    """

    row: int
    head: int


_NONE = Pages(0, 0)


class PagedKVState(StatePart):
    """Keys and values in pages: each row has a pool of pages; a head that retains tokens takes the next free one.

    A head retains whole runs of `page` tokens. Row n of the keys `[N, P, page, K]` and of the values `[N, P, page, V]`
    holds the pages of all heads of the row, from page 1 on, in the order in which they were filled. The table `[N, H,
    columns]` lists each head's pages. If a head drops a run, the run is written to the unused page 0, and its entry to
    the table's last column, so that every decoding step runs the same kernels.

    The device holds the lengths. The host holds upper bounds of the pages in use, which each call raises without a
    synchronisation. If a bound exceeds the allocated memory, the host reads the true number from the device. If that
    exceeds the memory too, the host allocates that number and a tenth more, at least one page more for each head.

    Args:
        heads: H.
        key_size: K.
        value_size: V.
        page: number of tokens in a page, a multiple of 16.
    """

    keeps_tokens = True

    def __init__(self, heads: int, key_size: int, value_size: int, page: int = 64):
        self.heads, self.key_size, self.value_size, self.page = heads, key_size, value_size, page
        self._stored: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        # upper bounds of the pages in use
        self._bound = _NONE

    @property
    def keys(self) -> Float[Tensor, "N P page K"]:
        """The keys; raises a ValueError before the first write."""
        return self._held()[0]

    @property
    def values(self) -> Float[Tensor, "N P page V"]:
        """The values; raises a ValueError before the first write."""
        return self._held()[1]

    @property
    def table(self) -> Int[Tensor, "N H columns"]:
        """The indices of each head's pages, int32; entries beyond a head's length are undefined."""
        return self._held()[2]

    @property
    def lengths(self) -> Int[Tensor, "N H"]:
        """Number of tokens held by each head, int32."""
        return self._held()[3]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values, table and lengths; empty before the first write."""
        return self._stored or ()

    def allocate(self, batch: int, like: Tensor) -> None:
        """Allocate empty lists for `batch` rows, with the dtype and device of `like`."""
        sizes = self._sizes(_NONE)
        keys, values = (like.new_zeros(batch, sizes.row, self.page, size) for size in (self.key_size, self.value_size))
        table = like.new_zeros(batch, self.heads, sizes.head, dtype=torch.int32)
        self._stored = keys, values, table, table.new_zeros(batch, self.heads)

    def append(
        self,
        k: Float[Tensor, "N T H K"],
        v: Float[Tensor, "N T H V"],
        take: Bool[Tensor, "N runs H"],
        *,
        known: Pages | None = None,
    ) -> None:
        """Append to the list of each head those runs of tokens that `take` selects, in their order.

        Args:
            k, v: keys and values of the tokens, T = runs · page.
            take: True if the head retains the run.
            known: upper bounds of the pages in use after the call, if the caller knows any. With None, the host reads
                the number of pages from the device if memory for all runs is not allocated, except at the first write
                and in fixed memory.
        """
        k, v = k.detach(), v.detach()
        runs = take.shape[1]
        if self._stored is None and runs:
            self._begin(k, v, take, known)
            return
        most = self._ensure_pages(k, take, known)
        if not runs:
            return
        keys, values, table, lengths = self._held()
        rows = torch.arange(len(k), device=k.device).unsqueeze(1)
        slots = rows if self.slots is None else self.slots.long().unsqueeze(1)
        held, counts = lengths[slots[:, 0]] // self.page, take.mT.flatten(1).cumsum(1, dtype=torch.int32)
        used, number = held.sum(1, keepdim=True), torch.arange(1, most + 1, dtype=torch.int32, device=k.device)
        source, target = self._taken(counts, number), torch.where(number <= counts[:, -1:], used + number, 0)
        for pool, x in ((keys, k), (values, v)):
            pool[slots, target] = self._runs(x, rows, *source)
        page = (used + counts).view_as(take.mT)
        column = torch.where(take.mT, held.unsqueeze(-1) + take.mT.cumsum(2) - 1, table.shape[2] - 1)
        head = torch.arange(self.heads, device=k.device).unsqueeze(1)
        table[slots.unsqueeze(2), head, column] = page.to(torch.int32)
        lengths[slots[:, 0]] += self.page * take.sum(1, dtype=torch.int32)

    def lists(self) -> tuple[Float[Tensor, "N H S K"], Float[Tensor, "N H S V"]]:
        """Return each head's tokens as contiguous lists; entries beyond a list's end are undefined.

        Waits for the device.
        """
        self._bound = self._in_use()
        at = self.table[:, :, : self._bound.head].long()
        rows = torch.arange(len(at), device=at.device).view(-1, 1, 1)
        # clamp page indices: beyond a list's end they may be stale and exceed the pool
        keys, values = (x[rows, at.clamp(max=x.shape[1] - 1)].flatten(2, 3) for x in (self.keys, self.values))
        return keys, values

    def attend(
        self, q: Float[Tensor, "N HQ K"], *, scale: float | None = None, impl: Impl | None = None
    ) -> AttentionOutput:
        """Attend with one query token per row: each query head to the tokens that its key head holds.

        Returns:
            o `[N, 1, HQ, V]` and the log-sum-exp `[N, 1, HQ]`, −∞ for a head without keys.
        """
        keys, values, table, lengths = self._held()
        if self.slots is not None:
            table, lengths = (x.index_select(0, self.slots) for x in (table, lengths))
        return paged_attention_decode(
            q.unsqueeze(1), keys, values, table, lengths, slots=self.slots, scale=scale, impl=impl
        )

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor `x` by `fn(x)`."""
        if self._stored is not None:
            keys, values, table, lengths = map(fn, self._stored)
            self._stored = keys, values, table, lengths

    def gather_rows(self, sources: Sequence[tuple[StatePart, Sequence[int]]]) -> None:
        super().gather_rows(sources)
        self._reset_bounds()

    def write_rows(self, rows: Tensor, source: StatePart | None, picked: Tensor) -> None:
        if isinstance(source, PagedKVState) and source.tensors and not _fits(source._capacity(), self._capacity()):
            used, have = source._in_use(), self._capacity()
            # leave a page of each head free, which the next decoding step may take
            needed = Pages(used.row + self.heads, used.head + 1)
            if not _fits(needed, have):
                self._reallocate(Pages(max(needed.row, have.row), max(needed.head, have.head)))
        super().write_rows(rows, source, picked)

    def snapshot(self) -> StatePart:
        """Return a copy of the lengths only: later tokens take other pages, so the stored tokens do not change."""
        held = TensorState(self.heads, dtype=torch.int32)
        held.value = None if self._stored is None else self.lengths.clone()
        return held

    def restore(self, snapshot: StatePart | None) -> None:
        assert isinstance(snapshot, TensorState)
        if snapshot.value is None:
            self.clear()
        else:
            self._stored = *self._held()[:3], snapshot.value.clone()

    def clear(self) -> None:
        """Drop all tokens."""
        self._stored, self._bound = None, _NONE

    def loosen(self) -> None:
        """End the effect of `fix`: tensors may be reallocated again."""
        if self.fixed:
            self._reset_bounds()
        super().loosen()

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes if heads retain no token (minimum) and if they retain all (maximum), without page tables."""
        token = self.heads * (self.key_size + self.value_size) * dtype.itemsize
        return Bounds(0, batch_size * (seq_len * token + self.heads * torch.int32.itemsize))

    def held(self, seq_len: int) -> int:
        """Return the bytes of the stored tokens and of the lengths, without page tables; waits for the device."""
        if self._stored is None:
            return 0
        token = (self.key_size + self.value_size) * self.keys.element_size()
        return int(self.lengths.sum()) * token + self.lengths.nbytes

    @property
    def allocated(self) -> int:
        """Bytes of memory allocated, spare pages and tables included."""
        return sum(x.nbytes for x in self.tensors)

    def free_tokens(self, more: int) -> int:
        """Return how many of `more` further tokens of each sequence surely fit in memory; waits for the device."""
        if self._stored is None:
            return more
        self._bound = self._in_use()
        row, head = self._capacity()
        return min(more, self.page * min((row - self._bound.row) // self.heads, head - self._bound.head))

    def _begin(self, k: Tensor, v: Tensor, take: Tensor, known: Pages | None) -> None:
        """At the first call, fill one page with each run of `page` tokens that `take` selects.

        Spare pages get copies of the last run, which are never read but overwritten by later calls.
        """
        runs, H = take.shape[1:]
        self._bound = known or Pages(runs * H, runs)
        P, columns = self._sizes(Pages(self._bound.row + (H if known else 0), self._bound.head))
        counts, taken = take.mT.flatten(1).cumsum(1, dtype=torch.int32), take.sum(1, dtype=torch.int32)
        number = torch.arange(max(P, columns + 1, len(k)), dtype=torch.int32, device=k.device)
        source = number[: len(k), None], *self._taken(counts, number[:P])
        table = (counts[:, runs - 1 :: runs] - taken).unsqueeze(-1) + number[1 : columns + 1]
        self._stored = self._runs(k, *source), self._runs(v, *source), table, self.page * taken

    def _taken(self, counts: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Find each row's `number`-th taken run (from 1, clamped to the last); return its index in time and its head.

        `counts` are the cumulative counts of taken runs, over all runs of the first head, then of the second, and so
        on.
        """
        source, runs = torch.searchsorted(counts, number.minimum(counts[:, -1:])), counts.shape[1] // self.heads
        return source % runs, source // runs

    def _runs(self, x: Tensor, rows: Tensor, run: Tensor, head: Tensor) -> Tensor:
        """Return the given runs of tokens `[N, T, H, K]` as pages `[N, P, page, K]`."""
        return x.unflatten(1, (-1, self.page))[rows, run, :, head]

    def _held(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._stored is None:
            raise ValueError("PagedKVState: nothing has been written yet")
        return self._stored

    def _capacity(self) -> Pages:
        """Return how many pages of a row and how many table columns can hold retained runs.

        These are all but page 0 and the last column, to which dropped runs are written.
        """
        return Pages(self.keys.shape[1] - 1, self.table.shape[2] - 1)

    def _sizes(self, pages: Pages) -> Pages:
        """Return the pages per row and the table columns to allocate for the bounds `pages`."""
        return Pages(pages.row + 1, cdiv(pages.head + 1, _COLUMNS) * _COLUMNS)

    def _in_use(self, take: Tensor | None = None) -> Pages:
        """Read from the device how many pages are in use; if `take [N, runs, H]` is given, add the runs it selects."""
        held = self.lengths // self.page
        held = held if take is None else held + take.sum(1)
        if not held.numel():
            return _NONE
        return Pages(*torch.stack((held.sum(1).max(), held.max())).tolist())

    def _reset_bounds(self) -> None:
        """Set the upper bounds of the pages in use to the allocated pages, because the true number is unknown."""
        self._bound = _NONE if self._stored is None else self._capacity()

    def _ensure_pages(self, k: Tensor, take: Tensor, known: Pages | None) -> int:
        """Allocate more pages if the runs that `take` selects may not fit, unless the memory is fixed; return an upper
        bound of the number of these runs in a row."""
        N, runs, H = take.shape
        most = runs * H
        if self._stored is not None and self.fixed:
            return most
        after = known or Pages(self._bound.row + most, self._bound.head + runs)
        if self._stored is None:
            self.allocate(N, k)
        if known is None and not _fits(after, self._capacity()):
            after = self._in_use(take)
        have = self._capacity()
        if not _fits(after, have):
            row = after.row + max(H, after.row // 10) if after.row > have.row else have.row
            self._reallocate(Pages(row, max(have.head, after.head + after.head // 2)))
        self._bound = after
        return min(most, after.row)

    def _reallocate(self, pages: Pages) -> None:
        """Reallocate the memory for `pages`, which must cover the pages in use."""
        keys, values, table, lengths = self._held()
        row, columns = self._sizes(pages)
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, row - x.shape[1])) for x in (keys, values))
        self._stored = keys, values, F.pad(table, (0, columns - table.shape[2])), lengths

    def _resize(self, max_length: int, more: int) -> None:
        if self._stored is None:
            return
        used, have = self._in_use(), self._capacity()
        longest, most = (cdiv(x, self.page) for x in (max_length, more))
        # in the worst case every head takes all `more` tokens
        spare = self.heads * most
        needed = Pages(used.row + spare, max(used.head + most, longest))
        # allocate a tenth more pages than are in use, but no more than if every head retained all tokens
        row = max(needed.row, min(used.row + used.row // 10, self.heads * longest)) if most else used.row
        if not (_fits(needed, have) and have.row <= row):
            self._reallocate(Pages(row, max(have.head, needed.head)))

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        if self._stored is None:
            super()._move(storage, more)
            return
        used, most = self._in_use(), cdiv(more, self.page)
        keys, values, table, lengths = storage
        # one free page for each head suffices to go on: sequences may get fewer tokens than `more`, and if not,
        # `free_tokens` tells when pages run out
        row, head = used.row + self.heads * min(most, 1), used.head + most
        if row >= keys.shape[1] or head >= table.shape[2]:
            raise ValueError(f"the storage has {keys.shape[1] - 1} pages of a row, {row} are needed")
        end, head = used.row + 1, used.head
        parts = (self.keys[:, :end], self.values[:, :end], self.table[:, :, :head], self.lengths)
        copy_all(parts, (keys[:, :end], values[:, :end], table[:, :, :head], lengths))
        self._stored = keys, values, table, lengths


def _fits(pages: Pages, capacity: Pages) -> bool:
    return pages.row <= capacity.row and pages.head <= capacity.head
