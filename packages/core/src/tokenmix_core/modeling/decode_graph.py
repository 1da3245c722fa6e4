"""Decoding steps in fixed storage: one token of each sequence, recorded once and repeated by a single launch.

A `Steps` object decodes the single tokens of one cache. It fixes the cache in memory, makes the first step of each form
as any call is made, records the second, and repeats it from then on; growing keys and values move to a larger room, and
steps are recorded anew. What was recorded belongs to a model and waits there for the next cache of the same batch size,
which then moves into the same memory.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.kernels.launch.forms import specialised
from tokenmix_core.kernels.launch.pdl import beginning_early
from tokenmix_core.modeling.cache import HybridCache, Storage
from tokenmix_core.modeling.cache_name import NAMES
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.plain import has_hooks, settings_of, third_party_modules

# recorded steps that wait in a model: as many always, and at the most while their caches take so many bytes together
_KEPT, _MOST_KEPT, _KEPT_BYTES = 4, 8, 2 << 30
# a cache has room for so many tokens at the least
_LEAST_ROOM = 256


class Recorded:
    """Fixed storage of one batch size and room, and the steps recorded on it.

    Attributes:
        kind: what steps depend on beside their form; see `kind_of`.
        room: tokens that the longest sequence may reach.
        storage: of the cache.
        ids, positions: of the step's tokens, `[N, 1]`.
        logits: of the step, `[N, vocab]`; made by the first one.
        bytes: that the cache's storage takes.
        inputs: tensors of the mixers' inputs, by name.
        repeats: by key, what repeats a work; None where it was done once and not recorded yet.
        extra: what works need beside it, by key.
    """

    def __init__(self, store: StepStore, kind: Hashable, room: int, storage: Storage, batch: int, device: torch.device):
        self.store, self.kind, self.room, self.storage = store, kind, room, storage
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self.inputs: dict[str, Tensor] = {}
        self.repeats: dict[Hashable, Callable[[], object] | None] = {}
        self.extra: dict[Hashable, Any] = {}
        self.capture = cuda_graphs.capture_on(device)
        self.bytes = sum(x.nbytes for part in storage for x in part)

    def do(
        self, key: Hashable, work: Callable[[], object], rehearsal: Callable[[], Any] = contextlib.nullcontext
    ) -> bool:
        """Do work: the first time of a key as it is, from the second on recorded and repeated.

        Args:
            key: tells works apart.
            work: on fixed storage.
            rehearsal: a context in which it is recorded and not done.

        Returns:
            Whether it was repeated, with no Python of its own run.
        """
        repeat = self.repeats.get(key)
        # a graph repeats its kernels for as long as it is kept
        with specialised():
            if repeat is None and key in self.repeats and self.capture is not None:
                repeat = self._record(key, work, rehearsal)
            if repeat is None:
                # calls of what is not to be recorded are replayed one by one, which early launches are not
                with contextlib.nullcontext() if self.capture is None else beginning_early(self.ids.device):
                    work()
        if repeat is None:
            self.repeats.setdefault(key, None)
            return False
        repeat()
        return True

    def forget_all_but(self, newest: int, kind: str) -> None:
        """Forget works whose key begins with `kind`, and what is kept for them, but for the newest ones."""
        keys = [key for key in self.extra if isinstance(key, tuple) and key[0] == kind]
        for key in keys[: max(0, len(keys) - newest)]:
            del self.extra[key]
            self.repeats.pop(key, None)

    def _record(
        self, key: Hashable, work: Callable[[], object], rehearsal: Callable[[], Any]
    ) -> Callable[[], object] | None:
        """Record work that has been done before; None where that fails, which is said, and all goes on without."""
        assert self.capture is not None
        try:
            with rehearsal(), beginning_early(self.ids.device):
                repeat = self.repeats[key] = self.capture(work)
            return repeat
        except torch.OutOfMemoryError:
            self.store.free()
            why = "memory ran out while a decoding step was recorded, and all that was recorded is freed"
        except (RuntimeError, ValueError) as error:
            why = f"a decoding step of this model cannot be recorded ({error}; decoding_graph=False does not try)"
        self.repeats, self.capture = {}, None
        warnings.warn(f"{why}: decoding goes on kernel by kernel, which is slower", stacklevel=4)
        return None


class StepStore:
    """Recorded steps of a model that are not in use; the model holds them, and copies of the model do not."""

    def __init__(self) -> None:
        self._idle: list[Recorded] = []

    def __deepcopy__(self, memo: dict) -> StepStore:
        return StepStore()

    def __reduce__(self):
        return StepStore, ()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, kind: Hashable, least: int) -> Recorded | None:
        """The smallest storage of this kind with room for `least` tokens."""
        fitting = sorted((x for x in self._idle if x.kind == kind and x.room >= least), key=lambda x: x.room)
        if not fitting:
            return None
        self._idle.remove(fitting[0])
        return fitting[0]

    def give(self, recorded: Recorded) -> None:
        """Keep it for the next cache, in place of those of its kind with less room; the oldest ones make way."""
        larger = [x for x in self._idle if x.kind != recorded.kind or x.room > recorded.room]
        self._idle = [*larger, recorded][-_MOST_KEPT:]
        while len(self._idle) > _KEPT and sum(x.bytes for x in self._idle) > _KEPT_BYTES:
            del self._idle[0]

    def free(self) -> bool:
        """Drop everything; whether there was anything."""
        had, self._idle = bool(self._idle), []
        return had


class Steps:
    """Decodes single tokens of a cache in fixed storage; called in place of the model.

    Args:
        model: a causal language model of ours.
        cache: of the sequences.
    """

    def __init__(self, model: Any, cache: HybridCache):
        self.model, self.cache = model, cache
        self.mixers = [module for module in model.modules() if isinstance(module, Mixer)]
        self.recorded: Recorded | None = None
        # looked at before every step, which are many: dictionaries of hooks, and modules such as adapters
        self._hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._third_party = third_party_modules(model)
        self._settings = settings_of(self._third_party)
        # whether the model itself is at work on a step
        self._within = False

    def __deepcopy__(self, memo: dict) -> None:
        # a copy of a cache decodes by itself
        return None

    def takes(self, given: dict[str, Any]) -> bool:
        """Tell whether a call of the model is a step to be made here."""
        cache, ids = self.cache, given.get("input_ids")
        if self._within or torch.is_grad_enabled() or not cache.past or not isinstance(ids, Tensor):
            return False
        if any(self._hooks) or settings_of(self._third_party) != self._settings:
            # since the cache's first step: what is recorded knows nothing of it
            return False
        own = self.model.input_takers
        others = (name for name, x in given.items() if x is not None and name not in _TAKEN and name not in own)
        return ids.dim() == 2 and ids.shape[1] == 1 and not any(others) and not cache.ends_in_padding()

    def __call__(
        self, ids: Int[Tensor, "N 1"], positions: Int[Tensor, "_ 1"] | None = None, inputs: dict[str, Any] | None = None
    ) -> Float[Tensor, "N vocab"]:
        """The logits after one more token of each sequence; they are overwritten by the next step.

        Args:
            ids: the tokens.
            positions: rotary positions; by default tokens are counted without padding.
            inputs: the mixers' inputs, as the model's `step_inputs` gives them.
        """
        recorded = self.settle()
        if ids is not recorded.ids:
            recorded.ids.copy_(ids)
        if positions is not None and positions is not recorded.positions:
            recorded.positions.copy_(positions)
        fixed, form = self._fixed_inputs(recorded, inputs or {})
        span = self.cache.next_step()
        key = ("step", positions is not None, form, *(mixer.step_form(span) for mixer in self.mixers))
        if recorded.do(key, lambda: self._step(recorded, positions is not None, fixed), self.cache.rehearsal):
            self.cache.count(1)
        assert recorded.logits is not None
        return recorded.logits

    def settle(self) -> Recorded:
        """Storage with room for the next token, in which the cache is."""
        cache, recorded = self.cache, self.recorded
        if recorded is not None and cache.fixed and cache.past < cache.room:
            return recorded
        for mixer, state in zip(self.mixers, cache.layers, strict=True):
            mixer.prepare_steps(state)
        batch, device = cache.batch_size, self.model.device
        kind, wanted = kind_of(self.model, cache), self._room()
        store: StepStore = self.model.step_store
        new = store.take(kind, min(wanted, cache.past + _LEAST_ROOM))
        if new is not None:
            try:
                cache.fix(new.room, new.storage)
            except ValueError:
                # what data decide does not fit into it
                new = None
        if new is None:
            # what does not grow stays where it is, so that the former storage is none of its own any more
            new, recorded = Recorded(store, kind, wanted, cache.fix(wanted), batch, device), None
        if recorded is not None:
            store.give(recorded)
        self.recorded = new
        return new

    def release(self, *, keep: bool = True) -> None:
        """End: the cache is as any other, and what was recorded waits for the next one.

        Args:
            keep: whether the cache will be used any more; then it leaves with a copy of what it holds.
        """
        recorded, self.recorded, self.cache.steps = self.recorded, None, None
        if recorded is None:
            return
        if keep and self.cache.fixed:
            self.cache.leave()
        else:
            self.cache.loosen()
        self.model.step_store.give(recorded)

    def _room(self) -> int:
        """Tokens to make room for: twice those held as far as the final length is not known to be less."""
        past, most = self.cache.past, self.cache.max_length
        if most > past:
            return _rounded_up(min(max(_LEAST_ROOM, 2 * past), most))
        return _rounded_up(past + max(_LEAST_ROOM, past // 2))

    def _fixed_inputs(self, recorded: Recorded, inputs: dict[str, Any]) -> tuple[dict[str, Any], Hashable]:
        """The mixers' inputs with tensors in storage, and what tells recorded steps apart that others went into."""
        fixed = dict(inputs)
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                place = recorded.inputs.get(name)
                if place is None or place.shape != x.shape or place.dtype != x.dtype:
                    place = recorded.inputs[name] = torch.empty_like(x, device=recorded.ids.device)
                    # steps that read the old place are of no use any more
                    recorded.repeats.clear()
                place.copy_(x)
                fixed[name] = place
        # a list or a dictionary is told by what it says
        plain = sorted((name, x) for name, x in inputs.items() if not isinstance(x, Tensor))
        return fixed, tuple((name, x if isinstance(x, str | int | float | None) else repr(x)) for name, x in plain)

    def _step(self, recorded: Recorded, positioned: bool, inputs: dict[str, Any]) -> None:
        """Make a step by the model itself."""
        self._within = True
        try:
            out = self.model(
                input_ids=recorded.ids,
                position_ids=recorded.positions if positioned else None,
                cache=self.cache,
                use_cache=True,
                **inputs,
            )
        finally:
            self._within = False
        logits = out.logits[:, -1]
        if recorded.logits is None:
            recorded.logits = torch.empty_like(logits)
        recorded.logits.copy_(logits)


# arguments of a call that a step knows by itself
_TAKEN = frozenset(
    ("input_ids", "attention_mask", "position_ids", *NAMES, "use_cache", "logits_to_keep", "return_dict",
     "cache_position")
)  # fmt: skip


def why_not(model: Any, cache: Any) -> str | None:
    """Say why a model's decoding steps cannot be recorded on this device; None where they can."""
    if cuda_graphs.capture_on(model.device) is None:
        return f"no graphs on {model.device.type}"
    if not isinstance(cache, HybridCache) or cache.offload_states:
        return "no cache that stays in the device's memory"
    if torch.is_grad_enabled():
        return "gradients are on"
    if model.config.output_hidden_states:
        return "hidden states to be returned, by the configuration"
    devices = {x.device for x in model.parameters()}
    if len(devices) > 1 or getattr(model, "hf_device_map", None):
        return "the model is on several devices"
    if any(has_hooks(m) or (m is not model and "forward" in m.__dict__) for m in model.modules()):
        return "modules have hooks or forwards of their own, which would not be called"
    mixers = sum(isinstance(module, Mixer) for module in model.modules())
    return None if mixers == len(cache.layers) else "its layers are not all ours"


def kind_of(model: nn.Module, cache: HybridCache) -> Hashable:
    """The key of a recorded step: weights and where they lie, the cache's make and batch, and torch's modes."""
    device: Any = next(model.parameters()).device
    modes = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type))
    modes = (*modes, torch.get_autocast_dtype(device.type) if modes[1] else None)
    weights = tuple((x.data_ptr(), x.dtype) for x in itertools.chain(model.parameters(), model.buffers()))
    mixers = tuple(
        (type(module), getattr(module, "impl", None), getattr(module, "window", None))
        for module in model.modules()
        if isinstance(module, Mixer)
    )
    # dropped parts and windows show in the shapes; growing ones are as long as the room
    parts = tuple(
        (type(part), tuple((len(x), x.dtype) for x in part.tensors), part.window)
        for layer in cache.layers
        for part in layer.parts.values()
    )
    adapters = settings_of(third_party_modules(model))
    return device, modes, model.training, weights, mixers, adapters, parts, cache.batch_size


def _rounded_up(tokens: int) -> int:
    """Return the next of two sizes between two powers of two, of eight above 2,048, so that caches share a room."""
    bits = (tokens - 1).bit_length()
    unit = max(128, 1 << max(0, bits - (2 if tokens <= 2048 else 4)))
    return -(-tokens // unit) * unit
