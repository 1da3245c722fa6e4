"""Our mixers as layers of vLLM, with states in slots, and keys and values in pages, of vLLM's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.attention import (  # pyright: ignore[reportMissingImports]
    Attention as PagedAttention,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase  # pyright: ignore[reportMissingImports]
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum  # pyright: ignore[reportMissingImports]

from tokenmix_core.integrations.vllm.metadata import StateMetadata
from tokenmix_core.integrations.vllm.states import SLOT_DTYPE, SlotLayout, has_step_forms
from tokenmix_core.nn import Attention, Mixer
from tokenmix_core.nn.projections import output_linear, projected
from tokenmix_core.nn.rotary import Rotation
from tokenmix_core.nn.state import LayerState, Span


class ServedAttention(nn.Module):
    """Softmax attention whose keys and values are in vLLM's pages.

    Args:
        mixer: a layer without sinks.
        vllm_config: vLLM's configuration.
        prefix: name of the layer.
    """

    def __init__(self, mixer: Attention, vllm_config: Any, prefix: str):
        super().__init__()
        self.mixer, self.inputs, self.rotary_dim = mixer, (), mixer.rotary_dim
        self.attend = PagedAttention(
            mixer.num_heads,
            mixer.head_dim,
            mixer.head_dim**-0.5,
            num_kv_heads=mixer.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.window,
            prefix=prefix,
        )

    def forward(self, hidden_states: Tensor, *, rotary: Rotation | None = None) -> tuple[Tensor, None]:
        """Return the outputs `[1, T, D]` for the tokens of a step."""
        mixer = self.mixer
        q, k, v = projected(hidden_states, mixer.q_proj, mixer.k_proj, mixer.v_proj)
        q = q.unflatten(-1, (mixer.num_heads, mixer.head_dim))
        k = k.unflatten(-1, (mixer.num_kv_heads, mixer.head_dim))
        q, k = mixer.positioned(q, k, rotary)
        o = self.attend(q[0].flatten(-2), k[0].flatten(-2), v[0])
        return output_linear(o.view(1, -1, mixer.num_heads * mixer.head_dim), mixer.o_proj), None


class StateSlots(MambaBase):
    """vLLM's memory for the states of one or several layers: a request's slot holds its states in all of them.

    Args:
        elements: number of elements of one layer's state in a slot.
        layers: number of layers.
        vllm_config: vLLM's configuration.
        prefix: name of the first layer.
    """

    def __init__(self, elements: int, layers: int, vllm_config: Any, prefix: str):
        self.elements, self.layers, self.prefix = elements, layers, prefix
        self.has_step_forms = False
        self.kv_cache = (torch.tensor([]),)
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int], ...]:
        return ((self.elements * self.layers,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (SLOT_DTYPE,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.CUSTOM

    @property
    def pool(self) -> Tensor:
        """The memory of all slots, `[slots, layers · elements]`."""
        return self.kv_cache[0]

    def pool_of(self, i: int) -> Tensor:
        """The memory of the i-th layer in all slots, `[slots, elements]`."""
        return self.pool[:, i * self.elements : (i + 1) * self.elements]


class ServedState(nn.Module):
    """A mixer whose state of each request is in a slot of vLLM's cache of recurrent states.

    Args:
        mixer: the mixer.
        layout: layout of the mixer's part of a slot.
        slots: the memory.
        index: index of the layer among those that share the slots.
        prepare: the backbone's `prepare_mixer_inputs`.
        max_length: maximum number of tokens of a request.
    """

    def __init__(
        self,
        mixer: Mixer,
        layout: SlotLayout,
        slots: StateSlots,
        index: int,
        prepare: Callable[..., dict[str, Any]],
        max_length: int,
    ):
        super().__init__()
        self.mixer, self.layout, self.slots, self.index = mixer, layout, slots, index
        self.inputs, self.rotary_dim = (), mixer.rotary_dim
        self.prepare, self.max_length = prepare, max_length
        slots.has_step_forms |= has_step_forms(type(mixer))
        # packs: one call computes all prompts of a step; in_slots: calls read and overwrite states in their slots. Both
        # only if all parts of the state have constant size
        constant = all(part.takes_slots for part in layout.template.parts.values())
        self.packs, self.in_slots = (constant and mixer.declares(name) for name in ("packs_states", "uses_slots"))
        self._views: tuple[Tensor, dict[str, list[Tensor]]] | None = None

    @property
    def views(self) -> dict[str, list[Tensor]]:
        """For each part of the state, by name, views of its tensors in all slots."""
        if self._views is None or self._views[0] is not self.slots.pool:
            self._views = self.slots.pool, self.layout.views(self.slots.pool_of(self.index))
        return self._views[1]

    def forward(self, hidden_states: Tensor, *, rotary: Rotation | None = None) -> tuple[Tensor, None]:
        """Return the outputs `[1, T, D]` for the tokens of a step, and update the states of the step's requests."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # vLLM measures memory by a step without requests: return zeros
            return torch.zeros_like(hidden_states), None
        step: StateMetadata = metadata[self.slots.prefix]
        n = step.decodes
        outputs = []
        if n:
            outputs.append(self._decode(hidden_states[:, :n].transpose(0, 1), _rows(rotary, n), step).transpose(0, 1))
        if step.prefill_tokens:
            tokens = sum(step.prefill_tokens)
            x, rotation = hidden_states[:, n : n + tokens], _part(rotary, n, n + tokens)
            outputs += [self._prefill_packed(x, rotation, step)] if self.packs else self._prefill(x, rotation, step)
        done = sum(x.shape[1] for x in outputs)
        if done < hidden_states.shape[1]:
            outputs.append(torch.zeros_like(hidden_states[:, done:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None

    def _call(
        self,
        x: Tensor,
        rotary: Rotation | None,
        state: LayerState,
        span: Span,
        cu_seqlens: Tensor | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> Tensor:
        state.span = span
        given = self.prepare(inputs or {}, span, cu_seqlens, None) if self.mixer.inputs else {}
        return self.mixer(x, state=state, cu_seqlens=cu_seqlens, rotary=rotary, **given)[0]

    def _decode(self, x: Tensor, rotary: Rotation | None, step: StateMetadata) -> Tensor:
        """Return the outputs `[N, 1, D]` for one token of each decoding request, and update the requests' slots."""
        n, lengths = len(x), step.decode_lengths
        slots = step.slots[:n]
        state = self.layout.in_slots(self.views, slots, constant=self.in_slots, padded=step.decode_slots[:n])
        span = Span(
            n,
            1,
            x.device,
            past=self.max_length - 1,
            lengths=step.before[:n],
            count=max(lengths, default=0),
            known=lambda: lengths,
        )
        y = self._call(x, rotary, state, span, inputs=step.decode_inputs)
        self.layout.scatter(state, self.views, slots)
        return y

    def _prefill_packed(self, x: Tensor, rotary: Rotation | None, step: StateMetadata) -> Tensor:
        """Return the outputs of all prefill tokens, by one packed call that updates the slots of their requests."""
        n = step.decodes
        slots = step.slots[n:]
        state = (
            self.layout.in_slots(self.views, slots, constant=True, fresh=step.fresh)
            if self.in_slots
            else self.layout.gather(self.views, slots, fresh=step.fresh)
        )
        y = self._call(x, rotary, state, Span(1, x.shape[1], x.device), step.cu_seqlens)
        self.layout.scatter(state, self.views, slots)
        return y

    def _prefill(self, x: Tensor, rotary: Rotation | None, step: StateMetadata) -> list[Tensor]:
        """Return the outputs of all prefill tokens, by one call per request that updates the request's slot."""
        outputs, start = [], 0
        for i, (past, tokens) in enumerate(zip(step.prefill_lengths, step.prefill_tokens, strict=True)):
            slots = step.slots[step.decodes + i : step.decodes + i + 1]
            state = self.layout.gather(self.views, slots) if past else self.layout.empty()
            span, end = Span(1, tokens, x.device, past=past), start + tokens
            inputs = step.prefill_inputs[i] if step.prefill_inputs else None
            y = self._call(x[:, start:end], _part(rotary, start, end), state, span, inputs=inputs)
            outputs.append(y)
            self.layout.scatter(state, self.views, slots)
            start = end
        return outputs


def _part(rotary: Rotation | None, start: int, end: int) -> Rotation | None:
    return None if rotary is None else type(rotary)(*(x[:, start:end] for x in rotary))


def _rows(rotary: Rotation | None, n: int) -> Rotation | None:
    return None if rotary is None else type(rotary)(*(x[:, :n].transpose(0, 1) for x in rotary))
