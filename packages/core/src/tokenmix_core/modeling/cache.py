"""The cache of a model: what each of its layers keeps, as transformers' generation wants to handle it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokenmix_core.nn.state import LayerState, Span, copy_all

# the tensors of every part of a cache's states, and the sequences' lengths
Storage = list[tuple[Tensor, ...]]


class HybridCache(Cache):
    """Per-layer states of constant size, windows and growing keys and values, for a batch of sequences.

    A call of the model opens a `Span` with `begin` and closes it with `end`. Between the first layer's `fetch` and the
    end of the call the cache is broken: what stops the call there, leaves some layers ahead of others. Sequences are
    stored without their padding; the length that transformers asks for counts padding, since it is compared with input
    ids. Room for keys and values grows by half when it is full, or is taken at once when `max_length` says how long the
    sequences will become. Between `fix` and `loosen` everything stays in the same memory.

    Args:
        layers: the state of each layer (`model.make_cache()` builds them).
        max_length: tokens the sequences are expected to reach, padding included.
        offload: keep the states of all layers but the one at work in the memory of the CPU.
    """

    layers: list[LayerState]  # type: ignore[assignment]

    def __init__(self, layers: Iterable[LayerState], *, max_length: int = 0, offload: bool = False):
        super().__init__(layers=list(layers))  # type: ignore[arg-type]
        self.max_length, self.offload_states = max_length, offload
        # tokens seen, padding included; tokens that the states may hold; exact numbers of those where sequences differ
        self.length, self.past = 0, 0
        self.lengths: Tensor | None = None
        # whether the last token seen by some sequence was padding: known, or a tensor to look at
        self.padding_at_end: bool | Tensor = False
        # whether a call has begun to change what is held and has not ended
        self.broken = False
        self._batch: int | None = None
        self.span: Span | None = None
        # while everything is fixed: the lengths on the device, the tokens there is room for, the lengths as the host
        # has read them with `past` at that time, and whether all are alike
        self._fixed_lengths: Tensor | None = None
        self.room = 0
        self._read: tuple[list[int], int] | None = None
        self._uniform = True
        # what decodes single tokens in place of the model, if anything does
        self.steps: Any = None
        # transformers' mark of a cache that came from the caller of generate
        self._is_user_defined = False
        for part in self._parts():
            part.reserve(max_length)

    def begin(self, batch: int, tokens: int, device: torch.device, mask: Tensor | None = None) -> Span:
        """Open a call of `tokens` places a row; `mask [batch, tokens]` is True for real tokens.

        Raises:
            ValueError: another batch size than before, or a former call that did not end.
        """
        self._check_whole()
        if self._batch not in (None, batch):
            raise ValueError(f"the cache holds {self._batch} sequences, got a batch of {batch}")
        if self.fixed and (tokens > 1 or mask is not None or self.past >= self.room):
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
        """Close the call: its tokens are now held."""
        span, self.span = self.span, None
        assert span is not None
        if span.fixed:
            _map(self.layers, lambda x: x[: span.batch])
        self._batch = span.batch
        self.length += span.tokens
        if self._fixed_lengths is not None:
            self._fixed_lengths.add_(1)
            self.past += 1
        # padding alone, as at the beginning of a padded prompt in pieces, reaches no state
        elif span.mask is None or len(span.index):
            self.lengths = None if span.uniform else span.after[: span.batch]
            self.past += span.tokens
        self.padding_at_end = False if span.mask is None else ~span.mask[:, -1].all()
        self.broken = False

    def fetch(self, layer_idx: int, device: torch.device) -> LayerState:
        """The state of a layer that begins its work, on its device."""
        if not self.broken:
            self.broken = True
            if self.span is not None and self.span.fixed:
                # a sequence for the padding; whatever it begins with
                _map(self.layers, lambda x: torch.cat((x, x[:1])))
        if self.offload_states:
            _map([self.layers[layer_idx]], lambda x: x.to(device, non_blocking=True))
        return self.layers[layer_idx]

    def release(self, layer_idx: int) -> None:
        """Take note that a layer has done its work: its state may leave the device."""
        if self.offload_states:
            _map([self.layers[layer_idx]], lambda x: x.to("cpu"))

    @property
    def fixed(self) -> bool:
        """Tell whether everything stays in the same memory."""
        return self._fixed_lengths is not None

    def fix(self, room: int, storage: Storage | None = None) -> Storage:
        """Hold everything in the same memory until `loosen`, with room for sequences of `room` tokens.

        A decoding step, one token of each sequence, then reads and writes nothing else that outlives it, lengths
        included, and does the same whatever they are: it can be recorded and repeated. Every other call loosens.

        Args:
            room: tokens that the longest sequence may reach, more than it has.
            storage: what `fix` returned for a cache of the same model and batch, which nobody uses any more; None for
                memory of its own.

        Returns:
            The tensors.

        Raises:
            ValueError: an empty or broken cache, no room for another token, or storage that does not fit.
        """
        self._check_whole()
        if not self.past or self.ends_in_padding():
            raise ValueError("only a cache that has seen tokens, real ones at the end, can be fixed")
        if room <= self.past:
            raise ValueError(f"room must be above the {self.past} tokens held, got {room}")
        if self.offload_states:
            raise ValueError("a cache that is kept in the memory of the CPU cannot be fixed")
        parts, before = self._parts(), self._counts()
        held: Storage = []
        for part, place in zip(parts, [None] * len(parts) if storage is None else storage[:-1], strict=True):
            held.append(part.fix(room, room - self.past, place))
        lengths = before.clone() if storage is None else storage[-1][0]
        copy_all([before], [lengths])
        self._uniform = self._counts_alike
        self._fixed_lengths, self.lengths, self.room, self._read = lengths, None, room, None
        return [*held, (lengths,)]

    def loosen(self) -> None:
        """End what `fix` began; what is held stays where it is."""
        if self._fixed_lengths is None:
            return
        self.lengths = None if self._uniform else self._fixed_lengths.clone()
        self._fixed_lengths, self._read = None, None
        for part in self._parts():
            part.loosen()

    def leave(self) -> None:
        """Loosen, and go on with copies: the storage is free for another cache."""
        self.loosen()
        _map(self.layers, torch.clone)

    def next_step(self) -> Span:
        """Where the tokens of the next decoding step lie, while the cache is fixed."""
        lengths = self._fixed_lengths
        assert lengths is not None
        return Span(
            len(lengths),
            1,
            lengths.device,
            past=self.room - 1,
            lengths=lengths,
            count=self.past,
            known=lambda: self.known_lengths,
        )

    @property
    def known_lengths(self) -> list[int]:
        """The tokens of each sequence, one number where all are alike; waits for the device once while it is fixed."""
        if self._counts_alike:
            return [self.past]
        if self._read is None or not self.fixed:
            self._read = self._counts().tolist(), self.past
        lengths, then = self._read
        return [n + self.past - then for n in lengths]

    def count(self, tokens: int) -> None:
        """Take note of decoding steps that were repeated on the device, where they have advanced everything."""
        self.length += tokens
        self.past += tokens

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within it, a decoding step is recorded and not made: afterwards nothing counts as done, also if it failed."""
        length, past = self.length, self.past
        try:
            yield
        finally:
            self.length, self.past, self.span, self.broken = length, past, None, False

    def ends_in_padding(self) -> bool:
        """Tell whether some sequence's last token was padding; waits for the device after a call with padding."""
        self.padding_at_end = bool(self.padding_at_end)
        return self.padding_at_end

    @property
    def nbytes(self) -> int:
        """Bytes of everything the cache holds; spare room does not count."""
        return sum(part.held(self.past) for part in self._parts())

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of memory the cache takes."""
        return sum(part.allocated for part in self._parts())

    # what transformers calls

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of a mask over past and new tokens, and the first one's index."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """−1: nothing limits the length."""
        return -1

    @property
    def batch_size(self) -> int:
        """Sequences held, −1 before the first call."""
        return -1 if self._batch is None else self._batch

    @property
    def is_initialized(self) -> bool:
        """Tell whether there was a call."""
        return self._batch is not None

    @property
    def is_compileable(self) -> bool:
        """No: states are made at the first call, and keys and values grow."""
        return False

    @property
    def is_croppable(self) -> bool:
        """No; see `crop`."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Layer by layer, whether it keeps a window."""
        return [any(part.window is not None for part in layer.parts.values()) for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        """Layer by layer, whether it does not know how many tokens it has seen, as transformers means it: all know."""
        return [False] * len(self.layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes a copy of sequence `beam_idx[i]`."""
        self._change_batch(lambda x: x.index_select(0, beam_idx.to(x.device)), len(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences named by indices or by a mask."""
        indices = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence becomes `repeats` neighbours."""
        self._change_batch(lambda x: x.repeat_interleave(repeats, 0), max(self.batch_size, 0) * repeats)

    def reset(self) -> None:
        """Forget all sequences; this mends a broken cache."""
        self.loosen()
        for part in self._parts():
            part.clear()
        self.length, self.past, self.lengths, self.padding_at_end, self._batch = 0, 0, None, False, None
        self.span, self.broken = None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a recurrent state cannot forget its last tokens.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "HybridCache cannot drop its last tokens, as recurrent states cannot be rolled back; "
            "keep a copy.deepcopy of the cache from before them"
        )

    def activate_past_recording(self) -> None:
        """Refused, as `crop` is.

        Raises:
            ValueError: always.
        """
        self.crop(0)

    @property
    def _counts_alike(self) -> bool:
        return self._uniform if self.fixed else self.lengths is None

    def _counts(self) -> Tensor:
        """The tokens of each sequence, on the device."""
        if self._fixed_lengths is not None or self.lengths is not None:
            return self._fixed_lengths if self.lengths is None else self.lengths  # type: ignore[return-value]
        assert self._batch is not None
        like = next(x for part in self._parts() for x in part.tensors)
        return torch.full((self._batch,), self.past, dtype=torch.int64, device=like.device)

    def _parts(self):
        return [part for layer in self.layers for part in layer.parts.values()]

    def _check_whole(self) -> None:
        if self.broken:
            raise ValueError(
                "the cache is broken: a call that used it was stopped by an error or an interrupt, so that some of "
                "what it holds has advanced and some has not; begin anew after cache.reset(), or with a copy.deepcopy "
                "of the cache from before that call"
            )

    def _change_batch(self, fn: Callable[[Tensor], Tensor], batch: int) -> None:
        self._check_whole()
        if self._batch is None:
            return
        self.ends_in_padding()
        if self.fixed and batch == self._batch:
            _map(self.layers, lambda x: x.copy_(fn(x)))
            assert self._fixed_lengths is not None
            self._fixed_lengths.copy_(fn(self._fixed_lengths))
            self._read = None
            return
        self.loosen()
        _map(self.layers, fn)
        self.lengths = None if self.lengths is None else fn(self.lengths)
        self._batch = batch


def settle(cache: Any) -> None:
    """Look, outside of compiled graphs, at what they cannot: whether the next step may be padding."""
    if isinstance(cache, HybridCache):
        cache.ends_in_padding()


def _map(layers: list[LayerState], fn: Callable[[Tensor], Tensor]) -> None:
    for layer in layers:
        for part in layer.parts.values():
            part.map_(fn)
