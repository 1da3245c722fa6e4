"""The states of many requests, for an engine that runs different requests in each step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.modeling.cache import CacheRows, HybridCache
from tokenmix_core.modeling.prefixes import Prefixes
from tokenmix_core.modeling.state_pool import StatePool
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.plain import modules_of, settings_of, third_party_modules

# size of a padded batch of prompts up to which one call computes it, whatever their lengths: the layers see no padding,
# but new keys and values have memory for it
_PADDED = 1 << 15


class Chunk(NamedTuple):
    """Consecutive tokens of one request in a step.

    Attributes:
        request: id of the request.
        past: number of the request's tokens before the step.
        tokens: number of its tokens in the step.
        inputs: the request's extra inputs, as `Mixer.request_input` returns them.
        prompt: whether the tokens belong to the prompt.
        end: number of tokens that the request is expected to reach, which limits spare memory; 0 if unknown.
    """

    request: str
    past: int
    tokens: int
    inputs: Mapping[str, Any] = MappingProxyType({})
    prompt: bool = False
    end: int = 0


class RequestStates:
    """The states of requests; each state is a row of some cache.

    A call of the model computes new prompts of similar lengths together; other calls do so for further chunks of
    prompts. All decoding requests, which have one new token each, take one decoding step in the rows of a `StatePool`.
    In layers whose calls take slots, all calls read and overwrite states in the slots of this pool.
    Without requests, the pool and its captured steps stay with the model for the next engine.

    Args:
        model: a causal language model with `make_cache` and `step_store`.

    Attributes:
        prefixes: snapshots after the first tokens of prompts; empty by default.
    """

    def __init__(self, model: Any):
        self.model = model
        self.prefixes = Prefixes(1, 0)
        # for each request, its cache and row, and its number of tokens
        self._rows: dict[str, tuple[HybridCache, int]] = {}
        self._tokens: dict[str, int] = {}
        # the states of requests that have decoded a token, and all states in slots; None without requests
        self._pool: StatePool | None = None
        # the model's settings: those with which each request began, and those of the present step
        self._settings: dict[str, Hashable] = {}
        self._current: Hashable = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def allocated_nbytes(self) -> int:
        """Number of bytes allocated for states, without those of `prefixes`."""
        # iterate over a copy: other threads may read this property while requests change
        caches = {id(cache): cache for cache, _ in list(self._rows.values())}
        pool = self._pool
        slots = 0 if pool is None else pool.slots.nbytes
        return slots + sum(cache.allocated_nbytes for cache in caches.values())

    def begin_step(self) -> None:
        """Read the model's settings again, because they may change between steps."""
        self._current = None

    def begin(self, request: str, tokens: Sequence[int], inputs: Mapping[str, Any] = MappingProxyType({})) -> int:
        """Begin a request with the longest snapshot of its prompt's first tokens; return its length, or 0 without one.

        Args:
            request: id of a request that has no tokens yet.
            tokens: the request's prompt.
            inputs: as for `Chunk`.
        """
        if not self.prefixes.budget:
            return 0
        settings = self._settings_now()
        if self._settings.setdefault(request, settings) != settings:
            self._settings[request] = settings
            self.prefixes.drop(request)
        found, held = self.prefixes.find(
            request,
            tokens,
            settings,
            lambda start, stop: _comparable(self._inputs([Chunk(request, start, stop - start, inputs)])),
        )
        if held is not None:
            self._rows[request] = self._copied([(held, [0])], [found]), 0
            self._tokens[request] = found
        return found

    def drop(self, request: str) -> None:
        """Drop a request; does nothing for an unknown request."""
        self._rows.pop(request, None)
        self._tokens.pop(request, None)
        self._settings.pop(request, None)
        self.prefixes.drop(request)
        if self._pool is not None:
            self._pool.slots.release(request)
        if not self._rows and self._pool is not None:
            self.model.step_store.pool, self._pool = self._pool, None

    def clear(self) -> None:
        """Drop all requests."""
        for request in {*self._rows, *self._settings}:
            self.drop(request)

    def fork(self, request: str, copies: Sequence[str]) -> None:
        """Give the requests `copies` a copy of a request's state; do nothing if the request has no state yet."""
        for name in copies if request in self._rows else ():
            self._rows[name] = self._gathered([request]), 0
            self._tokens[name] = self._tokens[request]

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], ids: Int[Tensor, "1 T"]) -> Float[Tensor, "chunks vocab"]:
        """Compute the tokens of all chunks, concatenated in `ids`; return the logits of each chunk's last token.

        Raises:
            ValueError: a chunk that does not continue its request.
        """
        self.begin_step()
        if all(x.past and not x.prompt and x.tokens == 1 for x in chunks):
            self._check(chunks)
            decoded = self._decode(chunks, ids.T)
            self._tokens |= {x.request: x.past + 1 for x in chunks}
            return decoded
        # for each chunk, its parts in reversed order, and the index in `ids` of each part's first token
        left: dict[int, list[tuple[Chunk, int]]] = {}
        begin = 0
        for i, x in enumerate(chunks):
            if not x.past and x.request in self._rows:
                # a preempted request starts again from its first token: drop its old state
                self._rows.pop(x.request)
                self._tokens.pop(x.request)
            self._check([x])
            # cut a chunk at the lengths at which snapshots are taken
            stop = x.past + x.tokens
            ends = [x.past, *(n for n in self.prefixes.boundaries(x.request, x.past, stop) if n < stop), stop]
            left[i] = [(x._replace(past=n, tokens=m - n), begin + n - x.past) for n, m in pairwise(ends)][::-1]
            begin += x.tokens
        # the logits of all calls, and the index of each chunk's last ones among them
        logits: list[Tensor] = []
        last: dict[int, int] = {}
        while left:
            step = {i: x.pop() for i, x in left.items()}
            for group, found in self._run(step, ids[0]):
                rows = sum(map(len, logits))
                last |= {i: rows + n for n, i in enumerate(group)}
                logits.append(found)
            for x, _ in step.values():
                self._tokens[x.request] = stop = x.past + x.tokens
                if self.prefixes.boundaries(x.request, stop - 1, stop) and self._unchanged(x.request):
                    self.prefixes.store(x.request, stop, _trimmed(self._gathered([x.request])))
            left = {i: x for i, x in left.items() if x}
        return _picked(logits[0] if len(logits) == 1 else torch.cat(logits), [last[i] for i in range(len(chunks))])

    def _run(self, step: dict[int, tuple[Chunk, int]], ids: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Compute a part of each chunk, in several calls; yield the keys of a call's chunks, and their logits."""
        new, decoding, others, chunks = [], [], [], {i: x for i, (x, _) in step.items()}
        for i, x in chunks.items():
            (new if not x.past else others if x.prompt or x.tokens > 1 else decoding).append(i)
        for group in [*_similar(new, chunks), *_similar(others, chunks)]:
            parts = [ids[begin : begin + x.tokens] for x, begin in (step[i] for i in group)]
            yield group, self._prefill([chunks[i] for i in group], parts)
        if decoding:
            tokens = _picked(ids, [step[i][1] for i in decoding]).unsqueeze(1)
            yield decoding, self._decode([chunks[i] for i in decoding], tokens)

    def _prefill(self, chunks: list[Chunk], parts: list[Tensor]) -> Tensor:
        """Compute chunks of several requests as one batch, padded on the left; return the logits of the last tokens.

        Either all are first chunks or none is.
        """
        longest, shortest = (fn(x.tokens for x in chunks) for fn in (max, min))
        cache = self._cache_of([x.request for x in chunks]) if chunks[0].past else self.model.make_cache()
        ids, mask = parts[0].new_zeros(len(chunks), longest), None
        for row, part in enumerate(parts):
            ids[row, longest - len(part) :] = part
        if shortest < longest:
            lengths = torch.tensor([x.tokens for x in chunks], device=ids.device)
            mask = torch.arange(longest, device=ids.device) >= longest - lengths.unsqueeze(1)
        inputs = self._inputs(chunks)
        self._used_pool().slots.attach(cache, [x.request for x in chunks], begin=not chunks[0].past)
        logits = self.model(ids, attention_mask=mask, cache=cache, logits_to_keep=1, **inputs).logits[:, -1]
        for row, x in enumerate(chunks):
            self._rows[x.request] = cache, row
        return logits

    def _decode(self, chunks: Sequence[Chunk], ids: Int[Tensor, "N 1"]) -> Tensor:
        """Compute one new token of each request in a single decoding step of the model; return the logits."""
        pool, names = self._used_pool(), [x.request for x in chunks]
        if not (pool.continues(names) and all(self._rows[x][0] is pool.cache for x in names)):
            # a step advances all rows, so requests that have no token in this step leave the pool
            pausing = {x for x, (cache, _) in self._rows.items() if cache is pool.cache}.difference(names)
            for x in pausing:
                self._rows[x] = self._gathered([x], shared=True), 0
            pool.cache.max_length = max(x.end for x in chunks)
            rows = pool.assign_rows({x: self._rows[x] for x in names}, self._tokens)
            self._rows |= {x: (pool.cache, row) for x, row in rows.items()}
        if not chunks[0].inputs:
            return pool.step(ids, {})
        # rows without a request compute padding with the inputs of any request
        of_rows = dict(zip(pool.rows, chunks, strict=True))
        return pool.step(ids, self._inputs([of_rows.get(row, chunks[0]) for row in range(pool.batch)]))

    def _check(self, chunks: Sequence[Chunk]) -> None:
        for x in chunks:
            if x.past != self._tokens.get(x.request, 0):
                raise ValueError(f"request {x.request} has {self._tokens.get(x.request, 0)} tokens, got {x.past}")

    def _used_pool(self) -> StatePool:
        self._pool = self._pool or self._idle_pool() or StatePool(self.model)
        return self._pool

    def _idle_pool(self) -> StatePool | None:
        """Take the pool that an earlier engine left with the model; None if there is none.

        A pool that does not fit is dropped, which also gives None.
        """
        store = self.model.step_store
        pool, store.pool = store.pool, None
        return pool if pool is not None and pool.is_usable() else None

    def _inputs(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the mixers' inputs of a call with one row for each chunk."""
        takers, ranges = self.model.input_takers, [(x.past, x.past + x.tokens) for x in chunks]
        return {
            name: takers[name].batch_input(name, [x.inputs[name] for x in chunks], ranges) for name in chunks[0].inputs
        }

    def _settings_now(self) -> Hashable:
        """Return the settings besides tokens on which states depend: weights, adapters, options. Read once per step."""
        if self._current is None:
            weights = (*self.model.parameters(), *self.model.buffers())
            versions = tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in weights)
            mixers = (m for m in modules_of(self.model) if isinstance(m, Mixer))
            self._current = versions, settings_of([self.model.model, *mixers, *third_party_modules(self.model)])
        return self._current

    def _unchanged(self, request: str) -> bool:
        return self._settings.get(request) == self._settings_now()

    def _cache_of(self, requests: list[str]) -> HybridCache:
        """Return a cache whose rows are exactly these requests, in this order; not that of the pool."""
        cache = self._rows[requests[0]][0]
        whole = cache.batch_size == len(requests) and all(self._rows[x] == (cache, i) for i, x in enumerate(requests))
        if whole and (self._pool is None or cache is not self._pool.cache):
            return cache
        cache = self._gathered(requests, shared=True)
        for i, x in enumerate(requests):
            self._rows[x] = cache, i
        return cache

    def _gathered(self, requests: list[str], *, shared: bool = False) -> HybridCache:
        """Return a cache with copies of these requests' rows; if `shared`, states in slots stay there."""
        sources: list[tuple[HybridCache, list[int]]] = []
        for cache, row in (self._rows[x] for x in requests):
            if not sources or sources[-1][0] is not cache:
                sources.append((cache, []))
            sources[-1][1].append(row)
        return self._copied(sources, [self._tokens[x] for x in requests], shared=shared)

    def _copied(self, sources: Sequence[CacheRows], tokens: list[int], *, shared: bool = False) -> HybridCache:
        cache = self.model.make_cache()
        cache.gather_rows(sources, tokens, shared=shared)
        return cache


def _trimmed(cache: HybridCache) -> HybridCache:
    """Free the cache's spare capacity, and return the cache."""
    for layer in cache.layers:
        for part in layer.parts.values():
            part._resize(cache.past, 0)
    return cache


def _picked(x: Tensor, indices: list[int]) -> Tensor:
    """Return `x[indices]`; without a copy if the indices are consecutive."""
    first, count = indices[0], len(indices)
    if indices == [*range(first, first + count)]:
        return x[first : first + count]
    return x.index_select(0, torch.tensor(indices, device=x.device))


def _comparable(inputs: dict[str, Any]) -> Hashable:
    return tuple((name, x.tolist() if isinstance(x, Tensor) else x) for name, x in sorted(inputs.items()))


def _similar(indices: list[int], chunks: Mapping[int, Chunk]) -> list[list[int]]:
    """Divide chunks into groups such that at most half of a group's padded batch is padding, unless it is small."""
    groups: list[list[int]] = []
    total = 0
    for i in sorted(indices, key=lambda i: chunks[i].tokens):
        tokens = chunks[i].tokens
        if groups and tokens * (len(groups[-1]) + 1) <= max(_PADDED, 2 * (total + tokens)):
            groups[-1].append(i)
            total += tokens
        else:
            groups.append([i])
            total = tokens
    return groups
