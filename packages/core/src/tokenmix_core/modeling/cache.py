"""The cache of a model: the states of its layers, with the interface of transformers' caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokenmix_core.modeling.rollback import History, Snapshot
from tokenmix_core.nn.state import LayerState, Span, copy_all, map_all

# tensors of each state part of a cache; the last tuple holds the sequences' lengths
Storage = list[tuple[Tensor, ...]]
CacheRows = tuple["HybridCache", Sequence[int]]


class HybridCache(Cache):
    """The states of all layers, of constant size, windowed or growing, for a batch of sequences.

    A call of the model opens a `Span` with `begin` and closes it with `end`. From the first layer's `acquire` to `end`
    the cache is marked as broken, because an error there leaves some layers ahead of others. Sequences are stored
    without padding, but the length reported to transformers counts padding, because transformers compares it with input
    ids. When the memory for keys and values is full, it grows by half, but not beyond `max_length`, if given, before
    sequences are longer. Between `fix` and `loosen` all tensors keep their addresses.

    Args:
        layers: the state of each layer (`model.make_cache()` builds them).
        max_length: number of tokens that the sequences are expected to reach, padding included.
        offload: keep the states of all layers except the running one in CPU memory.
        record: number of last tokens that `crop` can remove; None keeps no history.
    """

    layers: list[LayerState]  # type: ignore[assignment]

    def __init__(
        self, layers: Iterable[LayerState], *, max_length: int = 0, offload: bool = False, record: int | None = None
    ):
        super().__init__(layers=list(layers))  # type: ignore[arg-type]
        self.max_length, self.offload_states = max_length, offload
        # length: tokens seen, padding included; past: number of stored tokens of the longest sequence, or an upper
        # bound of it; lengths: stored tokens of each sequence, None if all store `past`
        self.length, self.past = 0, 0
        self.lengths: Tensor | None = None
        # whether the last token of any sequence was padding; a tensor on the device until the host reads it
        self.padding_at_end: bool | Tensor = False
        # True from a call's first change of a state to its end
        self.broken = False
        self._batch: int | None = None
        self.span: Span | None = None
        # set while fixed: `_fixed_lengths` on the device; `capacity` and `_limit`, the lengths that memory and
        # data-dependent memory cover; `_read`, the lengths last read, and `past` then; `_equal`: if all are equal
        self._fixed_lengths: Tensor | None = None
        self.capacity, self._limit = 0, 0
        self._read: tuple[list[int], int] | None = None
        self._equal = True
        # a function that runs decoding steps instead of the model's forward; see `decode_graph.Steps`
        self.steps: Any = None
        # snapshots and inputs from which `crop` restores; None if the cache keeps none
        self.history = None if record is None else History(record)
        # transformers sets this to True on a cache that the caller passed to generate
        self._is_user_defined = False
        for part in self._parts():
            part.reserve(max_length)

    def begin(self, batch: int, tokens: int, device: torch.device, mask: Tensor | None = None) -> Span:
        """Open a call with `tokens` tokens per row; `mask [batch, tokens]` is True for real tokens.

        Raises:
            ValueError: a different batch size, or an earlier call that did not end.
        """
        self._check_whole()
        if self._batch not in (None, batch):
            raise ValueError(f"the cache holds {self._batch} sequences, got a batch of {batch}")
        if self.fixed and (tokens > 1 or mask is not None or not self.has_memory()):
            self.loosen()
        if self.fixed:
            self.span = self.next_step()
        else:
            fixed = torch.compiler.is_compiling()
            self.span = Span(batch, tokens, device, past=self.past, lengths=self.lengths, mask=mask, fixed=fixed)
        for layer in self.layers:
            layer.span = self.span
        return self.span

    def end(self) -> None:
        """Close the call, whose tokens are now stored."""
        span, self.span = self.span, None
        assert span is not None
        if span.fixed:
            map_all(self.layers, lambda x: x[: span.batch])
        self._batch = span.batch
        self.length += span.tokens
        if self._fixed_lengths is not None:
            self._fixed_lengths.add_(1)
            self.past += 1
        # a call with only padding (the first chunk of a padded prompt) changes no state
        elif span.mask is None or len(span.index):
            self.lengths = None if span.uniform else span.after[: span.batch]
            self.past += span.tokens
        self.padding_at_end = False if span.mask is None else ~span.mask[:, -1].all()
        self.broken = False

    def acquire(self, layer_idx: int, device: torch.device) -> LayerState:
        """Return the state of a layer that is about to run; if the cache offloads, first move it to `device`.

        From the first layer's call on, the cache is marked as broken until `end`.
        """
        if not self.broken:
            self.broken = True
            if self.span is not None and self.span.fixed:
                # padding tokens become one more sequence; its initial state does not matter
                map_all(self.layers, lambda x: torch.cat((x, x[:1])))
        if self.offload_states:
            map_all([self.layers[layer_idx]], lambda x: x.to(device, non_blocking=True))
        return self.layers[layer_idx]

    def release(self, layer_idx: int) -> None:
        """Move the state of a layer that has run back to CPU memory, if the cache offloads."""
        if self.offload_states:
            map_all([self.layers[layer_idx]], lambda x: x.to("cpu"))

    @property
    def fixed(self) -> bool:
        """True between `fix` and `loosen`: all tensors keep their addresses."""
        return self._fixed_lengths is not None

    def has_memory(self) -> bool:
        """True if the fixed tensors can store one more token of each sequence; may wait for the device."""
        if self._limit <= self.past < self.capacity:
            more = self.capacity - self.past
            self._limit = self.past + min((part.free_tokens(more) for part in self._parts()), default=more)
        return self.past < self._limit

    def fix(self, capacity: int, storage: Storage | None = None, *, spare: int | None = None) -> Storage:
        """Keep the addresses of all tensors until `loosen`, with memory for sequences of `capacity` tokens.

        A decoding step (one token of each sequence) then reads and writes only these tensors, lengths included, and
        launches the same kernels at every length, so that a CUDA graph can capture it. Any other call ends this by
        `loosen`.

        Args:
            capacity: total number of tokens that the longest sequence may reach; must exceed its present length.
            storage: tensors that `fix` returned for another cache of the same model and batch size, which no longer
                uses them; None to use the cache's own memory.
            spare: number of further tokens of each sequence for which to allocate data-dependent memory, such as pages
                of retained keys; None for all up to `capacity`. `has_memory` returns False when it is used up.

        Returns:
            The tensors of every state part, and the lengths.

        Raises:
            ValueError: a cache that is empty or broken, ends in padding, offloads its states or keeps a history; no
                capacity for another token; or storage of other shapes.
        """
        self._check_whole()
        if not self.past or self.ends_in_padding():
            raise ValueError("only a cache that has seen tokens, real ones at the end, can be fixed")
        if capacity <= self.past:
            raise ValueError(f"capacity must be above the {self.past} tokens held, got {capacity}")
        if self.offload_states or self.history is not None:
            told = "is offloaded to CPU memory" if self.offload_states else "keeps a history for crop"
            raise ValueError(f"a cache that {told} cannot be fixed")
        parts, before, more = self._parts(), self._counts(), capacity - self.past
        held: Storage = []
        for part, target in zip(parts, [None] * len(parts) if storage is None else storage[:-1], strict=True):
            held.append(part.fix(capacity, more if spare is None else min(spare, more), target))
        lengths = before.clone() if storage is None else storage[-1][0]
        copy_all([before], [lengths])
        self._equal, self._limit = self._lengths_equal, self.past
        self._fixed_lengths, self.lengths, self.capacity, self._read = lengths, None, capacity, None
        self.has_memory()
        return [*held, (lengths,)]

    def loosen(self) -> None:
        """End the effect of `fix`; the tensors stay in the same memory."""
        if self._fixed_lengths is None:
            return
        self.lengths = None if self._equal else self._fixed_lengths.clone()
        self._fixed_lengths, self._read = None, None
        for part in self._parts():
            part.loosen()

    def leave(self) -> None:
        """Call `loosen` and move the states to copies, so that another cache can use the storage."""
        self.loosen()
        map_all(self.layers, torch.clone)

    def next_step(self) -> Span:
        """Return the token layout of the next decoding step of a fixed cache."""
        lengths = self._fixed_lengths
        assert lengths is not None
        options: dict[str, Any] = {"lengths": lengths, "count": self.past, "known": lambda: self.known_lengths}
        return Span(len(lengths), 1, lengths.device, past=self.capacity - 1, **options)

    @property
    def known_lengths(self) -> list[int]:
        """The length of each sequence, or one value if all are equal; synchronises, but only once in a fixed cache."""
        if self._lengths_equal:
            return [self.past]
        if self._read is None or not self.fixed:
            self._read = self._counts().tolist(), self.past
        lengths, then = self._read
        return [n + self.past - then for n in lengths]

    def count(self, tokens: int) -> None:
        """Add `tokens` to the host's counters, after graph replays ran this number of decoding steps on the device."""
        self.length, self.past = self.length + tokens, self.past + tokens

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager for the capture of a decoding step, which computes nothing: restores the host's counters."""
        length, past = self.length, self.past
        try:
            yield
        finally:
            self.length, self.past, self.span, self.broken = length, past, None, False

    def ends_in_padding(self) -> bool:
        """True if the last token of any sequence was padding; synchronises after a call with padding."""
        self.padding_at_end = bool(self.padding_at_end)
        return self.padding_at_end

    @property
    def nbytes(self) -> int:
        """Number of bytes in use, without slots of pools and spare capacity; `allocated_nbytes` includes the latter."""
        return sum(part.held(self.past) for part in self._parts() if part.slots is None)

    @property
    def allocated_nbytes(self) -> int:
        """Number of allocated bytes, snapshots for `crop` included, slots of pools not included."""
        return sum(x.allocated for x in self._parts() if x.slots is None) + (self.history.nbytes if self.history else 0)

    # the interface of transformers' caches

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, padding included."""
        return self.length + (0 if self.history is None else self.history.pending_tokens)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the length of a mask over past and new tokens, and the index of its first column."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return −1, transformers' value for a cache without a limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Number of sequences, −1 before the first call."""
        return -1 if self._batch is None else self._batch

    @property
    def is_initialized(self) -> bool:
        """True after the first call."""
        return self._batch is not None

    @property
    def is_compileable(self) -> bool:
        """False: states are allocated at the first call, and keys and values grow."""
        return False

    @property
    def is_croppable(self) -> bool:
        """True if the cache keeps a history, from which `crop` can remove the last tokens."""
        return self.history is not None

    @property
    def is_sliding(self) -> list[bool]:
        """Return for each layer whether it keeps only a window of tokens."""
        return [any(part.window is not None for part in layer.parts.values()) for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        """Return False for each layer: transformers' flag marks layers that do not know their length."""
        return [False] * len(self.layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i by a copy of sequence `beam_idx[i]`."""
        self._change_batch(lambda x: x.index_select(0, beam_idx.to(x.device)), len(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences that `indices` selects, by indices or by a mask."""
        self.reorder_cache(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace every sequence by `repeats` adjacent copies."""
        self._change_batch(lambda x: x.repeat_interleave(repeats, 0), max(self.batch_size, 0) * repeats)

    def gather_rows(self, sources: Sequence[CacheRows], lengths: Sequence[int], *, shared: bool = False) -> None:
        """Replace all sequences by rows of the model's other caches, of `lengths` real tokens: copies or, if `shared`,
        the same slots."""
        self.reset()
        for cache, _ in sources:
            cache._check_whole()
            if cache.history is not None and cache.history.pending:
                raise ValueError("tokens that crop left pending have no state yet: call the model before gather_rows")
        counts = [cache._counts()[list(rows)] for cache, rows in sources] if min(lengths) < max(lengths) else None
        for part, *held in zip(self._parts(), *(cache._parts() for cache, _ in sources), strict=True):
            gather = part.share_rows if shared and all(x.slots is not None for x in held) else part.gather_rows
            gather([(x, rows) for x, (_, rows) in zip(held, sources, strict=True)])
        self.length, self.past, self._batch = max(lengths), max(lengths), len(lengths)
        self.lengths = None if counts is None else torch.cat(counts)

    def reset(self) -> None:
        """Drop all sequences; a broken cache becomes usable again."""
        self.loosen()
        for part in self._parts():
            part.clear()
        self.length, self.past, self.lengths, self.padding_at_end, self._batch = 0, 0, None, False, None
        self.span, self.broken = None, False
        if self.history is not None:
            self.history.clear()

    def activate_past_recording(self, tokens: int = 32) -> None:
        """Keep a history from now on: `crop` can remove `tokens` tokens, or a whole last call of at most twice as many.

        The history holds up to five copies of the states. Decoding steps are then not captured as CUDA graphs.
        """
        self.loosen()
        if self.history is None or self.history.tokens < tokens:
            self.history = History(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each sequence, padding included.

        The states return to the newest snapshot before the new end; the next call recomputes the tokens in between.

        Raises:
            ValueError: a positive number, more tokens than the history holds, or a broken cache.
        """
        self._check_whole()
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if not tokens_to_remove:
            return
        if self.history is None:
            raise ValueError(
                "HybridCache cannot drop its last tokens, as it keeps no history and recurrent states cannot be "
                "inverted: call cache.activate_past_recording() or model.make_cache(record=n) before them"
            )
        self.history.crop(self, -tokens_to_remove)

    def snapshot(self) -> Snapshot:
        """Return a copy of the states without append-only keys and values, because those can be cropped."""
        parts = [part.snapshot() for part in self._parts()]
        return Snapshot(self.length, self.past, self.lengths, self.padding_at_end, self._batch, parts)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to the states of an earlier snapshot of this cache."""
        for part, old in zip(self._parts(), snapshot.parts, strict=True):
            part.restore(old)
            if not snapshot.length:
                part.clear()
        self.length, self.past, self.lengths, self.padding_at_end, self._batch, _ = snapshot

    @property
    def _lengths_equal(self) -> bool:
        return self._equal if self.fixed else self.lengths is None

    def _counts(self) -> Tensor:
        """Return the length of each sequence as a tensor on the device."""
        if self._fixed_lengths is not None or self.lengths is not None:
            return self._fixed_lengths if self.lengths is None else self.lengths  # type: ignore[return-value]
        device = next(x.device for part in self._parts() for x in part.tensors)
        return torch.full((self.batch_size,), self.past, dtype=torch.int64, device=device)

    def _parts(self):
        return [part for layer in self.layers for part in layer.parts.values()]

    def _check_whole(self) -> None:
        if self.broken:
            raise ValueError(
                "the cache is broken: a call that used it was stopped by an error or an interrupt, so that some "
                "layers have advanced and others have not; call cache.reset(), or use a copy.deepcopy of the cache "
                "from before that call"
            )

    def _change_batch(self, fn: Callable[[Tensor], Tensor], batch: int) -> None:
        self._check_whole()
        if self._batch is None:
            if self.history is not None:
                self.history.change_batch(self, fn)
            return
        self.ends_in_padding()
        if self.fixed and batch == self._batch:
            map_all(self.layers, lambda x: x.copy_(fn(x)))
            assert self._fixed_lengths is not None
            self._fixed_lengths.copy_(fn(self._fixed_lengths))
            self._read = None
            return
        self.loosen()
        map_all(self.layers, fn)
        self.lengths = None if self.lengths is None else fn(self.lengths)
        self._batch = batch
        if self.history is not None:
            self.history.change_batch(self, fn)
