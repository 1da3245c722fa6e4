"""The split of a sequence, or of a row of packed documents, over the ranks of a process group."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

Layout = Literal["contiguous", "zigzag"]
Range = tuple[int, int]


class Span(NamedTuple):
    """Consecutive tokens of the whole row that one rank holds.

    Attributes:
        start, stop: indices of the span's first token and of the token after its last, in the whole row.
        rank: the rank that holds these tokens.
        offset: index of the span's first token among the rank's tokens.
        depth: number of tokens before `start` that belong to the same document as the first token.
        head: if `depth` is not 0, the number of the span's tokens that belong to that document; else 0.
        tail: if the last token's document continues after `stop`, the number of its tokens in this span; else 0.
    """

    start: int
    stop: int
    rank: int
    offset: int
    depth: int
    head: int
    tail: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def through(self) -> bool:
        """True if the span lies wholly inside one document, which continues on both sides."""
        return self.head == self.tail == self.tokens


class SequenceShard:
    """One rank's part of a batch whose rows are split along time.

    A row of T tokens is cut into equal spans. With "contiguous", rank r of N holds span r of N. With "zigzag" it holds
    the spans r and 2N − 1 − r of 2N, one after the other, which gives all ranks equal work in causal attention. All
    ranks must pass the same arguments.

    Args:
        tokens: T, the length of a whole row.
        cu_seqlens: boundaries of the documents in the whole row (then B = 1); None for one document per row. The CPU
            reads them once; a tensor on the CPU or a list avoids the synchronisation.
        layout: "contiguous" or "zigzag".
        group: the process group over which rows are split; None for all ranks.
        keeps_states: whether operations return the final states of whole rows on all ranks, for a cache.

    Attributes:
        traffic: bytes that this rank has sent to other ranks, by layer (None outside a model) and operation.

    Raises:
        ValueError: lengths or boundaries that cannot be split; the message is the same on all ranks.
    """

    def __init__(
        self,
        tokens: int,
        cu_seqlens: Int[Tensor, "N_plus_1"] | Sequence[int] | None = None,
        *,
        layout: Layout = "contiguous",
        group: dist.ProcessGroup | None = None,
        keeps_states: bool = False,
    ):
        if layout not in get_args(Layout):
            raise ValueError(f"SequenceShard: layout must be 'contiguous' or 'zigzag', got {layout!r}")
        if not dist.is_initialized():
            raise ValueError(
                "SequenceShard: no process group exists; start the processes with torchrun and call "
                "torch.distributed.init_process_group()"
            )
        self.group, self.layout, self.tokens, self.keeps_states = group, layout, tokens, keeps_states
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        parts = self.size if layout == "contiguous" else 2 * self.size
        if tokens < parts or tokens % parts:
            raise ValueError(
                f"SequenceShard: a {layout} split over {self.size} ranks needs rows of a multiple of {parts} tokens, "
                f"got {tokens}; pad the rows or pack documents up to a multiple"
            )
        given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        self.packed = given is not None
        self.boundaries = [0, tokens] if given is None else list(given)
        ordered = all(a <= b for a, b in itertools.pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or self.boundaries[-1] != tokens or not ordered:
            raise ValueError(
                f"SequenceShard: cu_seqlens must rise from 0 to the {tokens} tokens of the whole row, "
                f"got {self.boundaries[:8]}"
            )
        length = tokens // parts
        self.spans = [self._span(i, length) for i in range(parts)]
        self.local = [span for span in self.spans if span.rank == self.rank]
        self.traffic: Counter[tuple[int | None, str]] = Counter()
        self.layer: int | None = None
        self._plans: dict[object, object] = {}
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def _span(self, i: int, length: int) -> Span:
        start, stop = i * length, (i + 1) * length
        folded = self.layout == "zigzag" and i >= self.size
        rank = 2 * self.size - 1 - i if folded else i
        first = bisect.bisect_right(self.boundaries, start) - 1
        last = bisect.bisect_right(self.boundaries, stop - 1) - 1
        depth = start - self.boundaries[first]
        head = min(stop, self.boundaries[first + 1]) - start if depth else 0
        tail = stop - max(start, self.boundaries[last]) if self.boundaries[last + 1] > stop else 0
        return Span(start, stop, rank, length if folded else 0, depth, head, tail)

    def __repr__(self) -> str:
        spans = ", ".join(f"{span.start}:{span.stop}" for span in self.local)
        return f"SequenceShard(rank {self.rank} of {self.size}, {self.layout}, tokens {spans} of {self.tokens})"

    @property
    def local_tokens(self) -> int:
        """Number of tokens of a row that this rank holds."""
        return self.tokens // self.size

    @cached_property
    def crosses(self) -> bool:
        """True if a document continues from one span to the next; if none does, operations do not communicate."""
        return any(span.depth for span in self.spans)

    @cached_property
    def parts(self) -> list[Range]:
        """The non-empty parts of documents in this rank's spans, in order, as ranges of this rank's tokens."""
        found = []
        for span in self.local:
            inner = {x for x in self.boundaries if span.start < x < span.stop}
            cuts = [span.start, *sorted(inner), span.stop]
            found += [(a - span.start + span.offset, b - span.start + span.offset) for a, b in itertools.pairwise(cuts)]
        return found

    @cached_property
    def heads(self) -> list[int]:
        """For each span of this rank, the index in `parts` of the part with which it begins."""
        starts = [part[0] for part in self.parts]
        return [starts.index(span.offset) for span in self.local]

    @cached_property
    def tails(self) -> list[int]:
        """For each span of this rank, the index in `parts` of the part with which it ends."""
        stops = [part[1] for part in self.parts]
        return [stops.index(span.offset + span.tokens) for span in self.local]

    @cached_property
    def documents(self) -> list[int]:
        """For each of `parts`, the index of its document."""
        found = []
        for start, _ in self.parts:
            span = next(x for x in self.local if x.offset <= start < x.offset + x.tokens)
            found.append(bisect.bisect_right(self.boundaries, start - span.offset + span.start) - 1)
        return found

    def cu_seqlens(self, device: torch.device | str) -> Int[Tensor, "P_plus_1"] | None:
        """Return the boundaries of `parts`, int32, for packed rows; None if each row is one document."""
        if not self.packed:
            return None
        return self._kept("cu_seqlens", device, lambda: torch.tensor([0, *(b for _, b in self.parts)]).int())

    def row_cu_seqlens(self, device: torch.device | str) -> Int[Tensor, "N_plus_1"] | None:
        """Return the boundaries of the documents in the whole row as int32; None for one document per row."""
        if not self.packed:
            return None
        return self._kept("row_cu_seqlens", device, lambda: torch.tensor(self.boundaries).int())

    def positions(self, device: torch.device | str) -> Int[Tensor, "T_local"]:
        """Return the position in its document of each token that this rank holds."""

        def build() -> Tensor:
            parts = []
            for document, (a, b) in zip(self.documents, self.parts, strict=True):
                span = next(x for x in self.local if x.offset <= a < x.offset + x.tokens)
                first = a - span.offset + span.start - self.boundaries[document]
                parts.append(torch.arange(first, first + b - a))
            return torch.cat(parts)

        return self._kept("positions", device, build)

    def _kept(self, name: str, device: torch.device | str, build: Callable[[], Tensor]) -> Tensor:
        key = name, torch.device(device)
        if key not in self._tensors:
            self._tensors[key] = build().to(device)
        return self._tensors[key]

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of `x`, whose dimension `dim` runs over whole rows."""
        if x.shape[dim] != self.tokens:
            raise ValueError(
                f"SequenceShard.split: expected {self.tokens} tokens in dimension {dim}, got {x.shape[dim]}"
            )
        return torch.cat([x.narrow(dim, span.start, span.tokens) for span in self.local], dim)

    def to_rows(self, x: Tensor) -> Tensor:
        """Make each span of an unpacked row a row of its own.

        A packed row stays as it is, because `cu_seqlens` has a boundary between its spans.
        """
        return x if self.packed or len(self.local) == 1 else x.unflatten(1, (len(self.local), -1)).flatten(0, 1)

    def from_rows(self, x: Tensor) -> Tensor:
        """Undo `to_rows`."""
        return x if self.packed or len(self.local) == 1 else x.unflatten(0, (-1, len(self.local))).flatten(1, 2)

    def targets(self, labels: Int[Tensor, "B T"], ignore_index: int = -100) -> Int[Tensor, "B T_local"]:
        """Return the label that each of this rank's tokens has to predict.

        `labels` are those of whole rows, not shifted.
        """
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
        ends = torch.tensor([end - 1 for end in self.boundaries[1:] if end], device=labels.device)
        return self.split(shifted.index_fill(1, ends, ignore_index))

    def check_local(self, operation: str, x: Tensor) -> None:
        """Raise a ValueError unless `x [B, T, ...]` has this rank's number of tokens and, if packed, one row."""
        if x.shape[1] != self.local_tokens or (self.packed and x.shape[0] != 1):
            rows = "1" if self.packed else "B"
            raise ValueError(
                f"{operation}: expected this rank's tokens [{rows}, {self.local_tokens}, ...] of {self.tokens}, "
                f"got {list(x.shape)}; take them by SequenceShard.split"
            )


def balanced_layout(model: nn.Module) -> Layout:
    """Return the layout that gives all ranks equal work: "zigzag" if some layer attends to whole rows.

    Recurrences and windows have equal work in any layout, and exchange fewer bytes in "contiguous".
    """
    whole = any(hasattr(layer, "window") and layer.window is None for layer in model.modules())
    return "zigzag" if whole else "contiguous"


# one value per process instead of per thread, because the backward pass calls checkpointed modules in other threads
_ACTIVE: list[SequenceShard | None] = []


@contextlib.contextmanager
def sequence_shard(shard: SequenceShard | None, layer: int | None = None) -> Iterator[SequenceShard | None]:
    """Context manager: all modules split sequences by `shard`; with None, no sequence is split.

    Args:
        shard: how sequences are split.
        layer: index under which `shard.traffic` counts the bytes that operations send.
    """
    _ACTIVE.append(shard)
    before = None if shard is None else shard.layer
    if shard is not None and layer is not None:
        shard.layer = layer
    try:
        yield shard
    finally:
        _ACTIVE.pop()
        if shard is not None:
            shard.layer = before


def current_shard() -> SequenceShard | None:
    """Return the shard of the innermost active `sequence_shard`, or None."""
    return _ACTIVE[-1] if _ACTIVE else None


def require_shard(operation: str, given: SequenceShard | None, cu_seqlens: Tensor | None) -> SequenceShard | None:
    """Return `given`, or the current shard if it is None; the result may be None.

    Raises:
        ValueError: there is a shard and `cu_seqlens` is given, although the shard has the boundaries.
    """
    shard = current_shard() if given is None else given
    if shard is not None and cu_seqlens is not None:
        raise ValueError(f"{operation}: the boundaries are those of the SequenceShard; pass no cu_seqlens beside it")
    return shard
