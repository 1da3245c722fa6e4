"""The part of a layer's state that holds the slots and the windows of a batch of sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenmix_core.nn import Bounds, StatePart, copy_all
from tokenmix_nha.ops import SlotWindowState


class SlotWindowPart(StatePart):
    """State part with a `SlotWindowState`. Its ring buffer always has its full size, so the bytes are constant.

    With `slots`, the state is a pool.

    Args:
        heads: H.
        slots: M.
        key_size, value_size: K and V.
        window: number of tokens that the ring buffer can hold.
        own_slot_keys: whether the slots have other keys than the window; the ring buffer then holds both.
    """

    takes_slots = True
    window: int

    def __init__(
        self, heads: int, slots: int, key_size: int, value_size: int, window: int, *, own_slot_keys: bool = False
    ):
        self.sizes, self.window, self.own_slot_keys = (heads, slots, key_size, value_size), window, own_slot_keys
        self.value: SlotWindowState | None = None

    def get(self, batch: int, like: Tensor) -> SlotWindowState:
        """Return the state; before the first token, an empty one."""
        if self.value is None:
            self.value = self.empty(batch, like)
        return self.value

    def empty(self, batch: int, like: Tensor) -> SlotWindowState:
        """Return the state of `batch` sequences before any token; slots and gates at least in float32."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return SlotWindowState.zeros(
            batch,
            *self.sizes,
            self.window,
            own_slot_keys=self.own_slot_keys,
            dtype=like.dtype,
            gate_dtype=wide,
            device=like.device,
        )

    def set(self, state: SlotWindowState) -> None:
        """Store a call's final state, detached, so that no gradient flows back into an earlier call."""
        state = SlotWindowState._make(None if x is None else x.detach() for x in state).reserve(self.window)
        if self.fixed:
            copy_all([x for x in state if x is not None], self.tensors)
        else:
            self.value = state

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Slots, ring buffer and length; empty before the first token."""
        return () if self.value is None else tuple(x for x in self.value if x is not None)

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor `x` by `fn(x)`."""
        if self.value is not None and self.slots is None:
            self.value = SlotWindowState._make(None if x is None else fn(x) for x in self.value)

    def clear(self) -> None:
        """Drop the state."""
        self.value = None

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes of the state for `batch_size` sequences of any length."""
        heads, slots, key_size, value_size = self.sizes
        wide = torch.promote_types(dtype, torch.float32).itemsize
        keys = 2 if self.own_slot_keys else 1
        token = (keys * key_size + value_size) * dtype.itemsize + slots * wide
        memory = slots * (key_size + value_size) * wide
        size = batch_size * heads * (memory + self.window * token + torch.int32.itemsize)
        return Bounds(size, size)

    def held(self, seq_len: int) -> int:
        """Return the bytes that the state uses, which do not depend on `seq_len`."""
        return 0 if self.value is None else self.value.bytes()

    @property
    def allocated(self) -> int:
        """Bytes of memory that are allocated for the state."""
        return self.held(0)
