"""CUDA graphs of decoding steps (one token of each sequence), captured on storage with fixed addresses and replayed.

A `Steps` object decodes single tokens for one cache. It fixes the cache's addresses, runs the first step of each form
(see `Mixer.step_form`) eagerly, captures the second, and replays this graph from then on. When keys and values outgrow
their capacity, they move to larger storage, for which steps are captured again. Captured steps stay with the model for
the next cache of the same batch size, whose contents are then copied to the same storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.cache_name import NAMES
from tokenmix_core.modeling.captured_steps import CapturedSteps
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.plain import has_hooks, is_third_party, modules_of, settings_of
from tokenmix_core.nn.state.parts import StatePart

# minimum capacity of a cache in tokens
_LEAST_CAPACITY = 256
# new storage holds at least _USUAL_CAPACITY tokens and twice as many as the largest earlier storage, if it takes at
# most _SPACIOUS_BYTES: after each growth the steps are captured again, which takes as long as tens of steps
_USUAL_CAPACITY, _SPACIOUS_BYTES = 1024, 512 << 20
# further tokens per sequence for which data-dependent memory is allocated: fewer waste less memory, more require fewer
# captures
SPARE = 512
# minimum capacity of a cache whose memory does not depend on its length
_LEAST_FLAT_CAPACITY = 16_384


class Steps:
    """Decodes single tokens of a cache on storage with fixed addresses; called instead of the model's forward.

    Args:
        model: one of our causal language models.
        cache: cache of the sequences.
    """

    def __init__(self, model: Any, cache: HybridCache):
        self.model, self.cache = model, cache
        modules = modules_of(model)
        self.mixers = [module for module in modules if isinstance(module, Mixer)]
        self.captured: CapturedSteps | None = None
        # hooks and third-party modules such as adapters, which `takes` checks before each step
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._third_party = [*filter(is_third_party, modules)]
        self._settings = settings_of(self._third_party)
        # True while the model runs a step
        self._within = False

    def __deepcopy__(self, memo: dict) -> None:
        # a copied cache starts without captured steps, which belong to the original's addresses
        return None

    def takes(self, given: dict[str, Any]) -> bool:
        """True if a call of the model with these arguments is a step that this object can decode."""
        cache, ids = self.cache, given.get("input_ids")
        if self._within or torch.is_grad_enabled() or not cache.past or not isinstance(ids, Tensor):
            return False
        if any(self._hooks) or settings_of(self._third_party) != self._settings:
            # there are hooks, or adapters have changed since this object was made: a graph would not run them
            return False
        own = self.model.input_takers
        others = (name for name, x in given.items() if x is not None and name not in _IGNORED and name not in own)
        return ids.dim() == 2 and ids.shape[1] == 1 and not any(others) and not cache.ends_in_padding()

    def __call__(
        self, ids: Int[Tensor, "N 1"], positions: Int[Tensor, "_ 1"] | None = None, inputs: dict[str, Any] | None = None
    ) -> Float[Tensor, "N vocab"]:
        """Return the logits after one more token of each sequence; the next call overwrites them.

        Args:
            ids: the tokens.
            positions: rotary positions; by default the tokens' indices in their sequences without padding.
            inputs: the mixers' inputs, as returned by the model's `step_inputs`.
        """
        captured = self.storage()
        if ids is not captured.ids:
            captured.ids.copy_(ids)
        if positions is not None and positions is not captured.positions:
            captured.positions.copy_(positions)
        fixed, form = self._fixed_inputs(captured, inputs or {})
        span = self.cache.next_step()
        key = ("step", positions is not None, form, *(mixer.step_form(span) for mixer in self.mixers))
        if captured.run(key, lambda: self._step(captured, positions is not None, fixed), self.cache.capturing):
            self.cache.count(1)
        assert captured.logits is not None
        return captured.logits

    def storage(self) -> CapturedSteps:
        """Return storage with capacity for the next token; move the cache to larger storage if necessary."""
        cache, captured = self.cache, self.captured
        if captured is not None and cache.fixed and cache.has_memory():
            return captured
        for mixer, state in zip(self.mixers, cache.layers, strict=True):
            mixer.prepare_steps(state)
        batch, device = cache.batch_size, self.model.device
        key, wanted = graph_key(self.model, cache), self._capacity()
        store: StepStore = self.model.step_store
        new = store.take(key, min(wanted, cache.past + _LEAST_CAPACITY))
        if new is not None:
            try:
                cache.fix(new.capacity, new.storage, spare=SPARE)
            except ValueError:
                # a state of data-dependent size exceeds this storage
                new = None
        if new is None:
            wanted = self.new_capacity(store.largest(key))
            # the new storage includes the old memory of states of constant size, so no other cache may use the old
            # storage
            new, captured = CapturedSteps(store, key, wanted, cache.fix(wanted, spare=SPARE), batch, device), None
        if captured is not None:
            store.give(captured)
        self.captured = new
        return new

    def release(self, *, keep: bool = True) -> None:
        """Detach from the cache, and return the captured steps to the model's store.

        Args:
            keep: whether the cache will be used again; if so, it continues with a copy of its contents.
        """
        captured, self.captured, self.cache.steps = self.captured, None, None
        if captured is None:
            return
        if keep and self.cache.fixed:
            self.cache.leave()
        else:
            self.cache.loosen()
        self.model.step_store.give(captured)

    def _capacity(self) -> int:
        """Return the capacity to allocate: the present one if it suffices, else twice the length up to `max_length`.

        Without a maximum, or beyond it, it is 1.5 times the length.
        States of constant size get one large capacity, so that all lengths share captured steps.
        """
        past, most = self.cache.past, self.cache.max_length
        if self.cache.fixed and past < self.cache.capacity:
            # the capacity suffices; only the data-dependent memory is used up
            return self.cache.capacity
        parts = (part for layer in self.cache.layers for part in layer.parts.values())
        if past < _LEAST_FLAT_CAPACITY and not any(_grows(part) for part in parts):
            return _LEAST_FLAT_CAPACITY
        if most > past:
            return _rounded_up(min(max(_LEAST_CAPACITY, 2 * past), most))
        return _rounded_up(past + max(_LEAST_CAPACITY, past // 2))

    def new_capacity(self, outgrown: int) -> int:
        """Return the capacity of new storage: that of `_capacity`, or more if the larger storage takes few bytes.

        The larger storage holds at least 1,024 tokens and twice the `outgrown` ones.
        """
        capacity = max(wanted := self._capacity(), _USUAL_CAPACITY, 2 * outgrown)
        bounds = (capacity, self.cache.batch_size, self.model.dtype)
        parts = (part for layer in self.cache.layers for part in layer.parts.values())
        # a part that does not know its size raises a ValueError
        with contextlib.suppress(ValueError):
            return capacity if sum(part.bounds(*bounds).most for part in parts) <= _SPACIOUS_BYTES else wanted
        return wanted

    def _fixed_inputs(self, captured: CapturedSteps, inputs: dict[str, Any]) -> tuple[dict[str, Any], Hashable]:
        """Copy the tensors among the mixers' inputs to fixed storage.

        Return the inputs and a key of all other values.
        """
        fixed = dict(inputs)
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                target = captured.inputs.get(name)
                if target is None or target.shape != x.shape or target.dtype != x.dtype:
                    target = captured.inputs[name] = torch.empty_like(x, device=captured.ids.device)
                    # the tensor is new, so drop the graphs, which read the previous one
                    captured.graphs.clear()
                target.copy_(x)
                fixed[name] = target
        # sort by name and take the repr: lists and dictionaries are not hashable
        plain = sorted((name, x) for name, x in inputs.items() if not isinstance(x, Tensor))
        return fixed, tuple((name, x if isinstance(x, str | int | float | None) else repr(x)) for name, x in plain)

    def _step(self, captured: CapturedSteps, positioned: bool, inputs: dict[str, Any]) -> None:
        """Run one step of the model on the captured tensors; `positioned`: pass it positions."""
        self._within = True
        try:
            out = self.model(
                input_ids=captured.ids,
                position_ids=captured.positions if positioned else None,
                cache=self.cache,
                use_cache=True,
                **inputs,
            )
        finally:
            self._within = False
        logits = out.logits[:, -1]
        if captured.logits is None:
            captured.logits = torch.empty_like(logits)
        captured.logits.copy_(logits)


# names of arguments with which a call still is a decoding step
_IGNORED = frozenset(
    ("input_ids", "attention_mask", "position_ids", *NAMES, "use_cache", "logits_to_keep", "return_dict",
     "cache_position")
)  # fmt: skip


def why_not(model: Any, cache: Any) -> str | None:
    """Return why the model's decoding steps cannot be captured on this device, as a text; None if they can."""
    if cuda_graphs.capture_on(model.device) is None:
        return f"there are no graphs on {model.device.type}"
    if not isinstance(cache, HybridCache) or cache.offload_states:
        return "there is no cache that stays in the device's memory"
    if cache.history is not None:
        return "the cache keeps a history for crop"
    if torch.is_grad_enabled():
        return "gradients are enabled"
    if model.config.output_hidden_states:
        return "the configuration asks for hidden states"
    modules = modules_of(model)
    devices = {x.device for x in _tensors(modules) if isinstance(x, nn.Parameter)}
    if len(devices) > 1 or getattr(model, "hf_device_map", None):
        return "the model is on several devices"
    if any(has_hooks(m) or (m is not model and "forward" in m.__dict__) for m in modules):
        return "modules have hooks or forwards of their own, which a graph would not call"
    mixers = sum(isinstance(module, Mixer) for module in modules)
    return None if mixers == len(cache.layers) else "some of its layers are not ours"


def graph_key(model: nn.Module, cache: HybridCache) -> Hashable:
    """Return the key of captured steps: weights' addresses, cache parts, settings of torch, mixers and adapters."""
    modules = modules_of(model)
    device: Any = next(model.parameters()).device
    modes = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device.type))
    modes = (*modes, torch.get_autocast_dtype(device.type) if modes[1] else None)
    weights = tuple((x.data_ptr(), x.dtype) for x in _tensors(modules))
    # settings of mixers that can change between generations, such as impl or the types of NAtS-L's chunks
    mixers = settings_of(module for module in modules if isinstance(module, Mixer))
    # only batch and dtype, not lengths, because parts that grow have the storage's capacity
    parts = tuple(
        (type(part), tuple((len(x), x.dtype) for x in part.tensors), part.window)
        for layer in cache.layers
        for part in layer.parts.values()
    )
    adapters = settings_of(filter(is_third_party, modules))
    return device, modes, model.training, weights, mixers, adapters, parts, cache.batch_size


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the modules' parameters and buffers; a shared one several times."""
    for module in modules:
        yield from (x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None)


def _grows(part: StatePart) -> bool:
    """True if a part of a layer's state takes more memory for more tokens, or if that is unknown."""
    try:
        less, more = (part.bounds(n, 1, torch.float32).most for n in (_LEAST_FLAT_CAPACITY, 2 * _LEAST_FLAT_CAPACITY))
    except ValueError:
        return True
    return more > less


def _rounded_up(tokens: int) -> int:
    """Round up to a multiple of 128, one of at most 2 per power of two (8 above 2,048).

    More caches can then use the same storage.
    """
    bits = (tokens - 1).bit_length()
    unit = max(128, 1 << max(0, bits - (2 if tokens <= 2048 else 4)))
    return -(-tokens // unit) * unit
