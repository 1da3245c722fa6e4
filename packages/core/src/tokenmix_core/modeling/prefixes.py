"""Snapshots of states after the first tokens of prompts, for later prompts that begin with the same tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from tokenmix_core.modeling.cache import HybridCache

# maximum number of block hashes of earlier prompts to remember; they show how many blocks two prompts share
_MOST_SEEN = 1 << 16


class Prefixes:
    """Snapshots of states after whole blocks of tokens; the least recently used one is evicted first.

    The key of a snapshot is a hash of its last block, that block's inputs, and the key of the block before.

    A prompt stores two snapshots: at its last block boundary, and at the last block boundary of the beginning that it
    shares with an earlier prompt. At least one token of each prompt is always computed.

    Args:
        block: number of tokens in a block; snapshots hold whole blocks.
        budget: maximum bytes of all snapshots.

    Attributes:
        counts: number of hits, of tokens that hits saved, and of evictions.
    """

    def __init__(self, block: int, budget: int):
        if budget < 0:
            raise ValueError(f"the bytes for prefixes must be at least 0, got {budget}")
        self.block, self.budget = block, budget
        self.nbytes = 0
        self.counts = dict.fromkeys(("prefix_hits", "prefix_tokens", "prefix_evictions"), 0)
        self._held: OrderedDict[bytes, HybridCache] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        # for each request: the hashes of its blocks, and the lengths at which it stores snapshots
        self._requests: dict[str, tuple[list[bytes], set[int]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def find(
        self, request: str, tokens: Sequence[int], context: Hashable, inputs: Callable[[int, int], Hashable]
    ) -> tuple[int, HybridCache | None]:
        """Return length and cache of the longest snapshot that a prompt begins with; 0 and None if there is none.

        Args:
            request: id of the request; the hashes of its prompt are kept until `drop`.
            tokens: the prompt.
            context: settings of the model on which all states depend.
            inputs: `inputs(start, stop)` returns the extra inputs of tokens `start` … `stop − 1` on which states
                depend.
        """
        if request not in self._requests:
            keys = self._keys(tokens, context, inputs)
            shared = max((i for i, key in enumerate(keys, 1) if key in self._seen), default=0)
            self._requests[request] = keys, {shared * self.block, len(keys) * self.block} - {0}
            for key in keys:
                self._seen[key] = None
                self._seen.move_to_end(key)
            while len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        keys, _ = self._requests[request]
        for i in range(len(keys), 0, -1):
            if (cache := self._held.get(keys[i - 1])) is not None:
                self._held.move_to_end(keys[i - 1])
                self.counts["prefix_hits"] += 1
                self.counts["prefix_tokens"] += i * self.block
                return i * self.block, cache
        return 0, None

    def boundaries(self, request: str, start: int, stop: int) -> list[int]:
        """Return the lengths above `start` and up to `stop` at which the request should store snapshots."""
        if request not in self._requests:
            return []
        keys, ends = self._requests[request]
        missing = (n for n in ends if keys[n // self.block - 1] not in self._held)
        return sorted(n for n in missing if start < n <= stop)

    def store(self, request: str, tokens: int, cache: HybridCache) -> None:
        """Store a request's state after its first `tokens` tokens, unless it alone exceeds the budget.

        If the budget is exceeded, evict the least recently used states.
        """
        size = cache.allocated_nbytes
        if size > self.budget:
            return
        key = self._requests[request][0][tokens // self.block - 1]
        if (replaced := self._held.pop(key, None)) is not None:
            self.nbytes -= replaced.allocated_nbytes
        self._held[key] = cache
        self.nbytes += size
        while self.nbytes > self.budget:
            _, dropped = self._held.popitem(last=False)
            self.nbytes -= dropped.allocated_nbytes
            self.counts["prefix_evictions"] += 1

    def drop(self, request: str) -> None:
        """Drop the hashes of a request; does nothing for an unknown request."""
        self._requests.pop(request, None)

    def _keys(self, tokens: Sequence[int], context: Hashable, inputs: Callable[[int, int], Hashable]) -> list[bytes]:
        key, keys = hashlib.sha256(repr(context).encode()).digest(), []
        for start in range(0, (len(tokens) - 1) // self.block * self.block, self.block):
            content = array("q", tokens[start : start + self.block]).tobytes()
            given = repr(inputs(start, start + self.block)).encode()
            key = hashlib.sha256(key + content + given).digest()
            keys.append(key)
        return keys
