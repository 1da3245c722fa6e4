"""The states of sequences as rows of bytes, which an engine can store in slots without knowing their tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.state import LayerState, PagedKVState, StatePart, TensorState

# alignment, in bytes, of tensors within a slot and of slots
_ALIGN = 256
# vLLM allocates slots as elements of this dtype
SLOT_DTYPE = torch.int32


class Field(NamedTuple):
    """A state's tensor in a slot: the byte at which it begins, its dtype, and its shape without the batch dimension."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SlotLayout:
    """The layout of a slot: where it holds each tensor of a layer's state.

    Args:
        template: a state of one sequence with all its tensors, at its largest size.
        state_dtype: dtype in a slot of recurrent states: the parts of class `TensorState` that are float32 in
            `template`. A step computes in float32, and rounds the state once.
    """

    def __init__(self, template: LayerState, state_dtype: torch.dtype = torch.float32):
        self.template, self.nbytes = template, 0
        self.fields: dict[str, list[Field]] = {}
        for name, part in template.parts.items():
            self.fields[name] = []
            for x in part.tensors:
                recurrent = isinstance(part, TensorState) and part.dtype == torch.float32
                dtype = state_dtype if recurrent else x.dtype
                self.fields[name].append(Field(self.nbytes, dtype, tuple(x.shape[1:])))
                self.nbytes += -(-x[0].numel() * dtype.itemsize // _ALIGN) * _ALIGN

    def empty(self) -> LayerState:
        """Return a layer's state for sequences before their first token."""
        return LayerState(**{name: _copied(part) for name, part in self.template.parts.items()})

    def views(self, pool: Tensor) -> dict[str, list[Tensor]]:
        """Return the tensors `[slots, *shape]` of every part of the state, as views of the pool `[slots, elements]`."""
        return {name: [_view(pool, field) for field in fields] for name, fields in self.fields.items()}

    def in_slots(
        self,
        views: dict[str, list[Tensor]],
        slots: Tensor,
        *,
        constant: bool,
        padded: Tensor | None = None,
        fresh: Tensor | None = None,
    ) -> LayerState:
        """Return the states in `slots` as one layer's state for a call that overwrites them.

        Parts of class `PagedKVState`, and with `constant` also those with `takes_slots`, use the pool's own tensors.
        All other parts are copies, which `scatter` must store.

        Args:
            views: the tensors of the pool, as `views` returns them.
            slots: int64 `[N]`, the slot of each sequence.
            constant: whether the mixer's calls take slots (`Mixer.uses_slots`).
            padded: for a decoding step, the slots as int32, a negative number for padding.
            fresh: for a prefill, bool `[N]`, True for a sequence without earlier tokens; None if all have earlier ones.
        """
        state = LayerState()
        for name, part in self.template.parts.items():
            if isinstance(part, PagedKVState) or (constant and part.takes_slots):
                held, pools = copy.copy(part), iter(views[name])
                held.map_(lambda _, pools=pools: next(pools))
                held = held.in_slots(slots if padded is None else padded, fresh)
            else:
                held = self._rows(name, views, slots, fresh)
                held.fixed = True
            state.parts[name] = held
        return state

    def gather(self, views: dict[str, list[Tensor]], slots: Tensor, *, fresh: Tensor | None = None) -> LayerState:
        """Return a copy of the states in `slots` as one layer's state; zeros for the sequences that are `fresh`.

        Args:
            views: the tensors of the pool, as `views` returns them.
            slots: the slot of each sequence, `[N]`.
            fresh: `[N]` bool, True for a sequence without earlier tokens; None if all have earlier tokens.
        """
        state = LayerState()
        for name in self.template.parts:
            held = self._rows(name, views, slots, fresh)
            held.fixed = True
            held.loosen()
            state.parts[name] = held
        return state

    def _rows(self, name: str, views: dict[str, list[Tensor]], slots: Tensor, fresh: Tensor | None = None) -> StatePart:
        """Return the part `name` of the states in `slots`, as a copy; zeros for the sequences that are `fresh`."""
        part = self.template.parts[name]
        rows = [view.index_select(0, slots).to(x.dtype) for view, x in zip(views[name], part.tensors, strict=True)]
        if fresh is not None:
            rows = [x.masked_fill_(fresh.view(-1, *[1] * (x.dim() - 1)), 0) for x in rows]
        held, copies = copy.copy(part), iter(rows)
        held.map_(lambda _: next(copies))
        return held

    def scatter(self, state: LayerState, views: dict[str, list[Tensor]], slots: Tensor) -> None:
        """Store sequences' states in `slots`, except parts that lie there; entries that a tensor lacks become 0."""
        for name, part in state.parts.items():
            if part.slots is not None:
                continue
            for view, x in zip(views[name], part.tensors, strict=False):
                if x.shape[1:] == view.shape[1:]:
                    view.index_copy_(0, slots, x.to(view.dtype))
                    continue
                # zeros behind the stored entries: kernels may load these under a mask, and they must not be NaN
                row = x.new_zeros(len(x), *view.shape[1:], dtype=view.dtype)
                inside = tuple(slice(min(n, m)) for n, m in zip(x.shape[1:], view.shape[1:], strict=True))
                row[(slice(None), *inside)] = x[(slice(None), *inside)]
                view.index_copy_(0, slots, row)
            if views[name] and not part.tensors:
                for view in views[name]:
                    view.index_fill_(0, slots, 0)


def slot_elements(layouts: dict[str, SlotLayout]) -> int:
    """Return the number of `SLOT_DTYPE` elements in a slot that is large enough for all layouts."""
    return max((layout.nbytes for layout in layouts.values()), default=0) // SLOT_DTYPE.itemsize


def slot_layouts(
    config: Any,
    labels: list[str],
    max_length: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
) -> dict[str, SlotLayout]:
    """Return, by label, the slot layout of the layers, for sequences of up to `max_length` tokens.

    `dtype` is the dtype of the model, `state_dtype` that of recurrent states in slots. To create every tensor of the
    states, a model with one layer of each label computes one token on the CPU. Parts of a state that grow get the
    memory of `max_length` tokens.
    """
    small = _reduced(config, labels)
    if not labels:
        return {}
    with torch.device("cpu"), default_dtype(dtype), torch.inference_mode():
        model = causal_lm_of(small)(small).eval()
        cache = model.make_cache()
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache, use_cache=True)
        for mixer, state in zip(model.model.mixers, cache.layers, strict=True):
            mixer.prepare_steps(state)
        cache.fix(max_length)
    return {label: SlotLayout(state, state_dtype) for label, state in zip(labels, cache.layers, strict=True)}


def causal_lm_of(config: Any) -> Any:
    """Return the class of the causal language model that belongs to a configuration."""
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _reduced(config: Any, labels: list[str]) -> Any:
    """Return a copy of the configuration with one layer of each label, tiny vocabulary and MLPs, and `impl=None`."""
    small = copy.deepcopy(config)
    options = {label: config.mixer_options.get(label, {}) for label in labels}
    small.mixers, small.num_hidden_layers = list(labels), len(labels)
    small.mixer_options = {
        label: {**given, **({"impl": None} if "impl" in given else {})} for label, given in options.items() if given
    }
    small.vocab_size, small.intermediate_size, small.pad_token_id = 2, 0, None
    return small


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager: new floating-point tensors have the given dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def has_step_forms(mixer: type[Mixer]) -> bool:
    """Return whether a mixer's decoding steps may run different kernels at different lengths."""
    return mixer.step_form is not Mixer.step_form


def _view(pool: Tensor, field: Field) -> Tensor:
    size = SLOT_DTYPE.itemsize
    elements = -(-math.prod(field.shape) * field.dtype.itemsize // size)
    values = pool[:, field.start // size : field.start // size + elements].view(field.dtype)
    return values[:, : math.prod(field.shape)].unflatten(1, field.shape or (1,)).view(len(pool), *field.shape)


def _copied(part: StatePart) -> StatePart:
    empty = copy.copy(part)
    empty.fixed = False
    empty.clear()
    return empty
