"""Captured decoding steps: storage with fixed addresses and its CUDA graphs; and those that a model keeps for later."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.kernels.launch.forms import specialised
from tokenmix_core.kernels.launch.pdl import pdl_launches
from tokenmix_core.modeling.cache import Storage

# maximum number of unused captured steps that a model keeps: _KEPT, or _MOST_KEPT if their caches take less than
# _KEPT_BYTES
_KEPT, _MOST_KEPT, _KEPT_BYTES = 4, 8, 2 << 30


class CapturedSteps:
    """Storage with fixed addresses for one batch size and capacity, and the graphs captured on it.

    Attributes:
        model_key: settings of the model and the cache on which all graphs depend; see `graph_key`.
        capacity: tokens that the longest sequence may reach.
        storage: tensors of the cache.
        ids, positions: the step's tokens and their rotary positions, `[N, 1]`.
        logits: the step's logits, `[N, vocab]`; allocated by the first step.
        bytes: bytes of the cache's storage.
        inputs: tensors of the mixers' inputs, by name.
        graphs: for each key, the function that replays its graph; None if the work has run once but is not captured.
        extra: further fixed tensors, by key.
    """

    def __init__(
        self, store: StepStore, model_key: Hashable, capacity: int, storage: Storage, batch: int, device: torch.device
    ):
        self.store, self.model_key, self.capacity, self.storage = store, model_key, capacity, storage
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self.inputs: dict[str, Tensor] = {}
        self.graphs: dict[Hashable, Callable[[], object] | None] = {}
        self.extra: dict[Hashable, Any] = {}
        self.capture = cuda_graphs.capture_on(device)
        self.bytes = sum(x.nbytes for part in storage for x in part)

    def run(
        self, key: Hashable, work: Callable[[], object], capturing: Callable[[], Any] = contextlib.nullcontext
    ) -> bool:
        """Run `work` eagerly at the first call with a key; capture it at the second, and replay the graph from then on.

        If the device has no graphs or a capture has failed, run `work` eagerly at every call.

        Args:
            key: identifies the work.
            work: a function that reads and writes fixed storage only.
            capturing: returns the context in which `work` is captured.

        Returns:
            True if a graph was replayed, so that `work` itself was not called.
        """
        replay = self.graphs.get(key)
        # specialised kernels: a graph launches its kernels many times, which repays their compilation
        with specialised():
            if replay is None and key in self.graphs and self.capture is not None:
                replay = self._capture(key, work, capturing)
            if replay is None:
                # if nothing can be captured, use the launch cache, which excludes programmatic dependent launch
                with contextlib.nullcontext() if self.capture is None else pdl_launches(self.ids.device):
                    work()
        if replay is None:
            self.graphs.setdefault(key, None)
            return False
        replay()
        return True

    def evict_all_but(self, newest: int, prefix: str) -> None:
        """Drop extra tensors and graphs of those keys of `extra` that are tuples with `prefix` as their first element.

        The latest `newest` of these keys are kept.
        """
        keys = [key for key in self.extra if isinstance(key, tuple) and key[0] == prefix]
        for key in keys[: max(0, len(keys) - newest)]:
            del self.extra[key]
            self.graphs.pop(key, None)

    def _capture(
        self, key: Hashable, work: Callable[[], object], capturing: Callable[[], Any]
    ) -> Callable[[], object] | None:
        """Capture `work`, which has run before; if that fails, warn, drop all graphs and capture nothing more.

        If memory runs out, also free the model's unused captured steps. Return the replay, None after a failure.
        """
        assert self.capture is not None
        try:
            with capturing(), pdl_launches(self.ids.device):
                replay = self.graphs[key] = self.capture(work)
            return replay
        except torch.OutOfMemoryError:
            self.store.free()
            why = "memory ran out while a decoding step was captured, and all captured steps are freed"
        except (RuntimeError, ValueError) as error:
            why = f"a decoding step of this model cannot be captured ({error}; decoding_graph=False does not try)"
        self.graphs, self.capture = {}, None
        warnings.warn(f"{why}: decoding continues kernel by kernel, which is slower", stacklevel=4)
        return None


class StepStore:
    """The captured steps of a model that no cache uses, and `pool`, a `StatePool` without requests; not copied."""

    def __init__(self) -> None:
        self._idle: list[CapturedSteps] = []
        self.pool: Any = None

    def __deepcopy__(self, memo: dict) -> StepStore:
        return StepStore()

    def __reduce__(self):
        return StepStore, ()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, model_key: Hashable, least: int) -> CapturedSteps | None:
        """Remove and return the smallest storage with this key and at least `least` tokens; None if there is none."""
        fitting = [x for x in self._idle if x.model_key == model_key and x.capacity >= least]
        if not fitting:
            return None
        smallest = min(fitting, key=lambda x: x.capacity)
        self._idle.remove(smallest)
        return smallest

    def largest(self, model_key: Hashable) -> int:
        """Return the largest capacity of the storages with this key; 0 if there is none."""
        return max((x.capacity for x in self._idle if x.model_key == model_key), default=0)

    def give(self, steps: CapturedSteps) -> None:
        """Keep `steps` for the next cache; drop those of the same key with no larger capacity, and the oldest beyond
        `_KEPT` or `_MOST_KEPT`.
        """
        others = [x for x in self._idle if x.model_key != steps.model_key or x.capacity > steps.capacity]
        self._idle = [*others, steps][-_MOST_KEPT:]
        while len(self._idle) > _KEPT and sum(x.bytes for x in self._idle) > _KEPT_BYTES:
            del self._idle[0]

    def free(self) -> bool:
        """Drop all captured steps; return whether there were any."""
        had, self._idle, self.pool = bool(self._idle or self.pool), [], None
        return had
