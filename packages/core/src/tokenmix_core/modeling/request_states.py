"""States of many requests, for an engine whose batches change from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.modeling.cache import HybridCache


class Chunk(NamedTuple):
    """Consecutive tokens of one request in a step.

    Attributes:
        request: id of the request.
        past: tokens of the request before the step.
        tokens: its tokens in the step.
    """

    request: str
    past: int
    tokens: int


class RequestStates:
    """The states of requests, stored as rows of one or several caches.

    New prompts are computed together, and all requests with one new token take one decoding step, in a cache whose rows
    are exactly these requests. As long as the same requests decode, their states are not moved.

    Args:
        model: a causal language model with `make_cache` and `decoding`.
    """

    def __init__(self, model: Any):
        self.model = model
        # cache and row of each request, and its tokens
        self._rows: dict[str, tuple[HybridCache, int]] = {}
        self._tokens: dict[str, int] = {}
        # context of decoding steps for the cache of the requests that decode
        self._steps, self._decoded = ExitStack(), None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of memory allocated for states."""
        return sum(cache.allocated_nbytes for cache in {id(cache): cache for cache, _ in self._rows.values()}.values())

    def drop(self, request: str) -> None:
        """Drop a request; a no-op for an unknown one."""
        self._rows.pop(request, None)
        self._tokens.pop(request, None)

    def clear(self) -> None:
        """Drop all requests."""
        self._rows, self._tokens = {}, {}
        self._end_steps()

    def fork(self, request: str, copies: Sequence[str]) -> None:
        """Give other requests a copy of a request's state."""
        for name in copies:
            self._rows[name] = self._gathered([request]), 0
            self._tokens[name] = self._tokens[request]

    def run(self, chunks: Sequence[Chunk], ids: Int[Tensor, "1 T"]) -> Float[Tensor, "chunks vocab"]:
        """Compute the tokens of all chunks, concatenated in `ids`; return the logits of each chunk's last token.

        Raises:
            ValueError: a chunk that does not continue its request.
        """
        parts = ids[0].split([x.tokens for x in chunks])
        new, decoding, others = [], [], []
        for i, x in enumerate(chunks):
            if not x.past:
                # the engine starts a preempted request again from its first token
                self.drop(x.request)
            if x.past != self._tokens.get(x.request, 0):
                raise ValueError(f"request {x.request} has {self._tokens.get(x.request, 0)} tokens, got {x.past}")
            (new if not x.past else decoding if x.tokens == 1 else others).append(i)
        logits: dict[int, Tensor] = {}
        for group in _similar(new, [x.tokens for x in chunks]):
            logits |= self._prefill(group, chunks, parts)
        for i in others:
            cache = self._cache_of([chunks[i].request])
            logits[i] = self.model(parts[i][None], cache=cache, logits_to_keep=1).logits[0, -1]
        if decoding:
            logits |= self._decode(decoding, chunks, parts)
        for x in chunks:
            self._tokens[x.request] = x.past + x.tokens
        return torch.stack([logits[i] for i in range(len(chunks))])

    def _prefill(self, group: list[int], chunks: Sequence[Chunk], parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Compute the first chunks of several requests as one batch, with padding on the left."""
        longest = max(chunks[i].tokens for i in group)
        cache, ids, mask = self.model.make_cache(), parts[group[0]].new_zeros(len(group), longest), None
        for row, i in enumerate(group):
            ids[row, longest - chunks[i].tokens :] = parts[i]
        if any(chunks[i].tokens < longest for i in group):
            lengths = torch.tensor([chunks[i].tokens for i in group], device=ids.device)
            mask = torch.arange(longest, device=ids.device) >= longest - lengths.unsqueeze(1)
        logits = self.model(ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits[:, -1]
        for row, i in enumerate(group):
            self._rows[chunks[i].request] = cache, row
        return dict(zip(group, logits, strict=True))

    def _decode(self, group: list[int], chunks: Sequence[Chunk], parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Compute one token of each of several requests as one step."""
        cache = self._cache_of([chunks[i].request for i in group])
        if cache is not self._decoded:
            self._end_steps()
            self._steps.enter_context(self.model.decoding(cache))
            self._decoded = cache
        logits = self.model(torch.stack([parts[i] for i in group]), cache=cache, logits_to_keep=1).logits[:, -1]
        # the next step overwrites the logits of a captured one
        return dict(zip(group, logits.clone(), strict=True))

    def _end_steps(self) -> None:
        self._steps.close()
        self._steps, self._decoded = ExitStack(), None

    def _cache_of(self, requests: list[str]) -> HybridCache:
        """Return a cache whose rows are these requests, in this order."""
        cache = self._rows[requests[0]][0]
        if cache.batch_size == len(requests) and all(self._rows[x] == (cache, i) for i, x in enumerate(requests)):
            return cache
        cache = self._gathered(requests)
        for i, x in enumerate(requests):
            self._rows[x] = cache, i
        return cache

    def _gathered(self, requests: list[str]) -> HybridCache:
        self._end_steps()
        sources: list[tuple[HybridCache, list[int]]] = []
        for cache, row in (self._rows[x] for x in requests):
            if not sources or sources[-1][0] is not cache:
                sources.append((cache, []))
            sources[-1][1].append(row)
        gathered = self.model.make_cache()
        gathered.gather_rows(sources)
        return gathered


def _similar(indices: list[int], tokens: Sequence[int]) -> list[list[int]]:
    """Divide chunks into groups such that at most half of a group's padded batch is padding."""
    groups: list[list[int]] = []
    for i in sorted(indices, key=lambda i: tokens[i]):
        if groups and tokens[i] * (len(groups[-1]) + 1) <= 2 * sum(tokens[j] for j in [*groups[-1], i]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
