"""The states of decoding requests, as rows of one pool that requests join and leave one by one."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.kernels.launch.async_read import to_device
from tokenmix_core.modeling.cache import CacheRows, HybridCache
from tokenmix_core.modeling.captured_steps import CapturedSteps
from tokenmix_core.modeling.decode_graph import SPARE, Steps, graph_key, why_not
from tokenmix_core.modeling.slot_pool import SlotPool, with_rows
from tokenmix_core.nn.state import LayerState, map_all


class StatePool:
    """The states of all decoding requests, one row each, in tensors that keep their addresses.

    In layers whose calls take slots, a row refers to its request's slot in `slots`, and a row of padding to none. In
    all other layers, a row holds the state.

    A decoding step computes the first n rows, where n is one of few batch sizes, and overwrites them in place. A
    request that joins is copied to a free row, and one that leaves frees its row; no other row is copied. Only when a
    smaller batch size suffices, the requests of later rows move to free rows. Rows without a request compute padding.
    One CUDA graph per batch size is captured on this memory. The pool doubles its number of rows when there are more
    requests, and its rows grow when requests do.

    Args:
        model: a causal language model with `make_cache`.

    Attributes:
        cache: the states of all rows.
        slots: the states in layers whose calls take slots, of all requests and not only of those that decode.
    """

    def __init__(self, model: Any):
        self.model = model
        self.cache: HybridCache = model.make_cache()
        self.slots = SlotPool(model, self._drop_steps)
        # the slot of each row, −1 for padding; int32, as decoding kernels take it
        self._row_slots = torch.empty(0, dtype=torch.int32, device=model.device)
        # number of tokens in each row, those of padding included
        self._lengths: list[int] = []
        # the row of each request of the latest step, in the order of its tokens, and the rows as a tensor
        self._rows: dict[str, int] = {}
        self._index = torch.empty(0, dtype=torch.int64)
        # rows whose last request has left, and which still hold its tokens
        self._stale: set[int] = set()
        # caches of the first rows, by batch size, and what their graphs depend on
        self._views: dict[int, HybridCache] = {}
        self._key: tuple[Hashable, ...] | None = None
        self._capture: cuda_graphs.Capture | None = None

    def is_usable(self) -> bool:
        """Return whether the pool fits the model's present weights and settings, and no step was interrupted."""
        return self._key == self._present_key() and not any(view.broken for view in self._views.values())

    @property
    def rows(self) -> list[int]:
        """The row of each request of the latest step, in the order of its tokens."""
        return [*self._rows.values()]

    @property
    def allocated_nbytes(self) -> int:
        """Number of allocated bytes."""
        return self.cache.allocated_nbytes + self.slots.nbytes

    def continues(self, requests: list[str]) -> bool:
        """Return whether these requests are those of the latest step, in its order, and their rows have memory."""
        return [*self._rows] == requests and self._view().has_memory()

    def assign_rows(self, requests: Mapping[str, tuple[HybridCache, int]], tokens: Mapping[str, int]) -> dict[str, int]:
        """Give each request of the next step a row, to which its state is copied, and return the rows.

        Args:
            requests: the cache and the row that hold each request's state; `cache` for those that are in the pool.
            tokens: number of tokens of each request.
        """
        batch, longest = _batch_size(len(requests)), max(tokens[x] for x in requests)
        rows = {x: row for x, (cache, row) in requests.items() if cache is self.cache and row < batch}
        moved = [x for x in requests if x not in rows]
        free = sorted(set(range(batch)).difference(rows.values()))
        rows |= zip(moved, free, strict=False)
        rows = {x: rows[x] for x in requests}
        if batch > len(self._lengths) or longest >= self.cache.capacity:
            self._grow(batch, longest, next(iter(requests.values())))
        self._stale = (self._stale | {*self._rows.values()}).difference(rows.values())
        # rows to be emptied: those that a request has left, and those of padding that are longer than all requests
        emptied = [row for row in free[len(moved) :] if row in self._stale or self._lengths[row] > longest]
        if [*rows.items()] != [*self._rows.items()] or moved or emptied:
            sources: dict[int, tuple[HybridCache, list[str]]] = {}
            for x in moved:
                sources.setdefault(id(requests[x][0]), (requests[x][0], []))[1].append(x)
            for cache, names in sources.values():
                self._write([rows[x] for x in names], (cache, [requests[x][1] for x in names]), names)
            self._write(emptied)
            for row in emptied:
                self._lengths[row] = 0
            for x, row in rows.items():
                self._lengths[row] = tokens[x]
            self._changed(rows, emptied)
        if not self._view().has_memory():
            self._grow(batch, longest)
            self._changed(rows)
        return rows

    def step(self, ids: Int[Tensor, "N 1"], inputs: Mapping[str, Any]) -> Float[Tensor, "N vocab"]:
        """Compute one token of each request that `assign_rows` was given, in its order; return the logits.

        Args:
            ids: the tokens.
            inputs: the mixers' inputs, with a value for each of the `batch` rows.
        """
        view, batch = self._view(), self.batch
        padded = ids.new_zeros(batch, 1).index_copy_(0, self._index, ids)
        logits = self.model(padded, cache=view, logits_to_keep=1, **inputs).logits[:, -1]
        self._lengths[:batch] = [n + 1 for n in self._lengths[:batch]]
        return logits.index_select(0, self._index)

    @property
    def batch(self) -> int:
        """Number of rows that the next step computes; 0 before the first `assign_rows`."""
        return _batch_size(len(self._rows)) if self._rows else 0

    def _grow(self, rows: int, longest: int, like: tuple[HybridCache, int] | None = None) -> None:
        """Allocate at least `rows` rows, for sequences of more than `longest` tokens; `like`: an existing state."""
        self._drop_steps()
        cache, capacity = self.cache, self.cache.capacity
        if like is not None and not cache.is_initialized:
            cache.gather_rows([(like[0], [like[1]])], [longest], shared=True)
        if rows > len(self._lengths):
            rows = 1 << (rows - 1).bit_length()
            self._refer_to_slots(rows)
            cache._change_batch(lambda x: with_rows(x, rows), rows)
            self._lengths += [0] * (rows - len(self._lengths))
        cache.loosen()
        cache.length = cache.past = longest
        cache.lengths = to_device(self._lengths, self.model.device)
        steps = Steps(self.model, cache)
        for mixer, state in zip(steps.mixers, cache.layers, strict=True):
            mixer.prepare_steps(state)
        cache.fix(capacity if longest < capacity else steps.new_capacity(capacity), spare=SPARE)

    def _drop_steps(self) -> None:
        """Drop the graphs, and the memory pool of their temporary tensors, because torch captures nothing in an old
        pool."""
        self._views, self._key, self._capture = {}, None, None

    def _refer_to_slots(self, rows: int) -> None:
        """Let layers whose calls take slots refer to those of the first `rows` rows."""
        self._row_slots = torch.full((rows,), -1, dtype=torch.int32, device=self.model.device)
        for i, pool in self.slots.layers.items():
            parts = {name: part.in_slots(self._row_slots) for name, part in pool.parts.items()}
            self.cache.layers[i] = LayerState(**parts)

    def _write(self, rows: list[int], source: CacheRows | None = None, requests: Sequence[str] = ()) -> None:
        """Overwrite rows of the pool by those of another cache, of these requests, or by zeros."""
        if not rows:
            return
        targets, picked = (to_device(x, self.model.device, torch.int64) for x in (rows, source[1] if source else ()))
        if source is not None:
            source[0]._check_whole()
            if self.slots.layers:
                self.slots.store(requests, source)
        for i, layer in enumerate(self.cache.layers):
            if i in self.slots.layers:
                continue
            for name, part in layer.parts.items():
                part.write_rows(targets, source and source[0].layers[i].parts[name], picked)

    def _changed(self, rows: dict[str, int], emptied: Sequence[int] = ()) -> None:
        """Use these rows from now on, with the present lengths, and new graphs if these must change.

        Weights and settings are compared only if the batch size or the states' addresses change, because a comparison
        takes milliseconds.
        """
        batch, self._rows = self.batch, rows
        self._stale.difference_update(emptied)
        self._index = to_device([*rows.values()], self.model.device)
        assert self.cache._fixed_lengths is not None
        self.cache._fixed_lengths.copy_(to_device(self._lengths, self.model.device))
        if self.slots.layers:
            of_rows = dict(zip(rows.values(), self.slots.assign([*rows]), strict=True))
            of_all = [of_rows.get(row, -1) for row in range(len(self._row_slots))]
            self._row_slots.copy_(to_device(of_all, self.model.device))
        if self._key is None or self.batch != batch or self._key[0] != self._addresses():
            key = self._present_key()
            if key != self._key:
                self._views, self._key, self._capture = {}, key, None
        view = self._view()
        view._limit = view.past

    def _view(self) -> HybridCache:
        """Return the cache of the rows that the next step computes, with their lengths."""
        batch = self.batch
        if batch not in self._views:
            view = self._views[batch] = copy.copy(self.cache)
            parts = [{name: copy.copy(part) for name, part in layer.parts.items()} for layer in self.cache.layers]
            view.layers, view._batch = [LayerState(**x) for x in parts], batch
            map_all(view.layers, lambda x: x[:batch])
            for part in view._parts():
                part.slots = None if part.slots is None else part.slots[:batch]
            assert self.cache._fixed_lengths is not None
            view._fixed_lengths, view._equal, view._limit = self.cache._fixed_lengths[:batch], False, 0
            if self._captures():
                view.steps = Steps(self.model, view)
                captured = CapturedSteps(self.model.step_store, None, view.capacity, [], batch, self.model.device)
                # the graphs of all batch sizes share the memory of temporary tensors
                self._capture = captured.capture = self._capture or captured.capture
                view.steps.captured = captured
        view, lengths = self._views[batch], self._lengths[:batch]
        view.length = view.past = max(lengths)
        view._read = lengths, view.past
        return view

    def _captures(self) -> bool:
        return cuda_graphs.wanted() and why_not(self.model, self.cache) is None

    def _addresses(self) -> tuple[int, ...]:
        return tuple(x.data_ptr() for part in self.cache._parts() for x in part.tensors)

    def _present_key(self) -> tuple[Hashable, ...]:
        """Return all that captured steps depend on: addresses of states, weights, settings."""
        return self._addresses(), graph_key(self.model, self.cache), self._captures()


def _batch_size(requests: int) -> int:
    """Round up to a power of two or, from 48 on, to 1.5 times a power of two; kernels prefer multiples of 16."""
    power = 1 << (requests - 1).bit_length()
    return 3 * power // 4 if power > 32 and requests <= 3 * power // 4 else power
