"""The states of requests in layers whose calls take slots: each request keeps one slot, which all calls overwrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.async_read import to_device
from tokenmix_core.modeling.cache import CacheRows, HybridCache
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.plain import modules_of
from tokenmix_core.nn.state import LayerState, StatePart


class SlotPool:
    """Pools of states, with a slot for each request, of the layers in which all calls take slots.

    Prefills and decoding steps read and overwrite states in their slots. A cache refers to a pool by parts with `slots`
    (`StatePart.in_slots`). The pools double when there are more requests, and these parts then get the new tensors.

    Args:
        model: a causal language model with `make_cache`.
        on_growth: called when the pools have new tensors.

    Attributes:
        layers: for the index of each such layer, its state, whose tensors are pools `[S, ...]`.
    """

    def __init__(self, model: Any, on_growth: Callable[[], object]):
        self.model, self.on_growth = model, on_growth
        mixers = [module for module in modules_of(model) if isinstance(module, Mixer)]
        states = model.make_cache().layers
        # states that exist before the first call have the model's dtype, but under autocast some have another one
        whole = len(mixers) == len(states) and not torch.is_autocast_enabled(model.device.type)
        found = enumerate(zip(mixers, states, strict=True)) if whole else ()
        self.layers = {i: state for i, (mixer, state) in found if mixer.prefills_in_slots(state)}
        for part in self._parts():
            part.views = WeakSet()
        self._slots: dict[str, int] = {}
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Number of allocated bytes."""
        return sum(part.allocated for part in self._parts())

    @property
    def free(self) -> list[int]:
        """The slots without a request."""
        return list(self._free)

    @property
    def owned(self) -> list[str]:
        """The requests that have a slot."""
        return list(self._slots)

    def assign(self, requests: Sequence[str]) -> list[int]:
        """Return the slot of each request; one that has none gets a free slot."""
        new = [x for x in requests if x not in self._slots]
        if len(new) > len(self._free):
            self._grow(len(self._slots) + len(new))
        self._slots |= {x: self._free.pop() for x in new}
        return [self._slots[x] for x in requests]

    def release(self, request: str) -> None:
        """Free a request's slot, if it has one."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def attach(self, cache: HybridCache, requests: Sequence[str], *, begin: bool) -> None:
        """Let a cache, whose rows are these requests, refer to their slots.

        States that lie outside of the pool are copied to the slots.

        Args:
            begin: whether the requests begin with the next call, which then does not read their slots.
        """
        if not self.layers:
            return
        slots = to_device(self.assign(requests), self.model.device)
        fresh = torch.ones_like(slots, dtype=torch.bool) if begin else None
        for i, pool in self.layers.items():
            if not begin:
                self._store(i, slots, cache.layers[i], range(len(requests)))
            cache.layers[i] = LayerState(**{name: part.in_slots(slots, fresh) for name, part in pool.parts.items()})

    def store(self, requests: Sequence[str], source: CacheRows) -> None:
        """Copy the states of requests, rows of a cache, to their slots, unless they are there already."""
        slots = to_device(self.assign(requests), self.model.device)
        for i in self.layers:
            self._store(i, slots, source[0].layers[i], source[1])

    def _store(self, layer: int, slots: Tensor, state: LayerState, rows: Sequence[int]) -> None:
        for name, part in self.layers[layer].parts.items():
            if state.parts[name].slots is None:
                part.write_rows(slots, state.parts[name], to_device([*rows], slots.device, torch.int64))

    def _grow(self, requests: int) -> None:
        """Allocate slots for at least this number of requests."""
        old, size = len(self._slots) + len(self._free), 1 << (requests - 1).bit_length()
        like = torch.empty(0, dtype=self.model.dtype, device=self.model.device)
        for part in self._parts():
            # both classes of parts that take slots have `get`, which allocates, and `value`
            pool: Any = part
            pool.get(size, like)
            if old:
                pool.map_(lambda x: with_rows(x, size))
            for view in pool.views:
                view.value = pool.value
        self._free += reversed(range(old, size))
        self.on_growth()

    def _parts(self) -> list[StatePart]:
        return [part for state in self.layers.values() for part in state.parts.values()]


def with_rows(x: Tensor, rows: int) -> Tensor:
    """Return a copy of x with `rows` rows, of which the new ones are zero."""
    grown = x.new_zeros(rows, *x.shape[1:])
    grown[: len(x)] = x
    return grown
