"""The state of a sequence: its slots and its window, in constant size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotWindowState(NamedTuple):
    """The state of N sequences: M slots a head, and the last tokens, which have not entered them yet.

    The window is a ring of W places: counting a sequence's tokens from 0, token p lies at place `p mod W`, and of
    `length` tokens the last `min(length, W)` are there. Other places hold nothing and are never read into a result.

    Attributes:
        slots_k: `[N, H, M, K]`, float32 (float64 beside float64 inputs).
        slots_v: `[N, H, M, V]`, the same.
        k: `[N, W, H, K]`, the window's keys.
        v: `[N, W, H, V]`, its values.
        f: `[N, W, H, M]`, the log-gates with which its tokens will enter the slots.
        k_slots: `[N, W, H, K]`, the keys with which they will enter; None where these are `k`.
        length: `[N, H]` int32, tokens written to the ring; the same for all heads of a sequence, each of which counts
            them for itself in a decoding step.
    """

    slots_k: Tensor
    slots_v: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    k_slots: Tensor | None
    length: Tensor

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads: int,
        slots: int,
        key_size: int,
        value_size: int,
        window: int,
        *,
        own_slot_keys: bool = False,
        dtype: torch.dtype = torch.float32,
        gate_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> SlotWindowState:
        """The state before any token, with a ring of `window` places; `own_slot_keys` where k_slots differs from k."""
        wide = torch.promote_types(dtype, torch.float32)

        def ring(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(batch, window, heads, size, dtype=dtype, device=device)

        return cls(
            slots_k=torch.zeros(batch, heads, slots, key_size, dtype=wide, device=device),
            slots_v=torch.zeros(batch, heads, slots, value_size, dtype=wide, device=device),
            k=ring(key_size, dtype),
            v=ring(value_size, dtype),
            f=ring(slots, gate_dtype),
            k_slots=ring(key_size, dtype) if own_slot_keys else None,
            length=torch.zeros(batch, heads, dtype=torch.int32, device=device),
        )

    @property
    def window(self) -> int:
        """W, the places of the ring."""
        return self.k.shape[1]

    def bytes(self) -> int:
        """Bytes that the tensors hold."""
        return sum(x.numel() * x.element_size() for x in self if x is not None)

    def reserve(self, window: int) -> SlotWindowState:
        """The same state in storage of its own, with a ring of `window` ≥ W places, for decoding steps to update.

        Raises:
            ValueError: a ring smaller than the present one, which might drop tokens.
        """
        if window < self.window:
            raise ValueError(f"reserve: window must be at least the ring's {self.window} places, got {window}")
        k, v, f, k_slots = (_widen(x, window) for x in self.unrolled())
        length = self.length.clamp(max=self.window)
        return SlotWindowState(self.slots_k.clone(), self.slots_v.clone(), k, v, f, k_slots, length)

    def unrolled(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """k, v, f and k_slots with the oldest token first and what holds nothing last."""
        places = torch.arange(self.window, device=self.length.device)
        length = self.length[:, :1]
        oldest = length - length.clamp(max=self.window)
        index = (oldest + places) % max(self.window, 1)
        return _places(self.k, index), _places(self.v, index), _places(self.f, index), _places_of(self.k_slots, index)


def prepend(state: SlotWindowState, k: Tensor, v: Tensor, f: Tensor, k_slots: Tensor | None, cu_seqlens: Tensor | None):
    """Put the window's tokens before each sequence's own: `(k, v, f, k_slots, start)`, with W more tokens a sequence.

    `start` `[N]` int32 is each sequence's first token that exists; what lies before it has gate 0 and is to be hidden.
    """
    window = state.window
    places = torch.arange(window, device=state.length.device)
    index = (state.length[:, :1] + places) % max(window, 1)
    start = (window - state.length[:, 0]).clamp(min=0).to(torch.int32)
    gates = _places(state.f, index).masked_fill((places < start[:, None])[..., None, None], 0)
    old = (_places(state.k, index), _places(state.v, index), gates, _places_of(state.k_slots, index))
    new = (k, v, f, k_slots)
    if cu_seqlens is None:
        joined = [None if x is None or y is None else torch.cat([x, y], 1) for x, y in zip(old, new, strict=True)]
        return *joined, start
    sequences, tokens = len(cu_seqlens) - 1, k.shape[1]
    borders = cu_seqlens + window * torch.arange(sequences + 1, device=cu_seqlens.device)
    position = torch.arange(tokens + sequences * window, device=cu_seqlens.device)
    sequence = torch.searchsorted(borders[1:].contiguous(), position, right=True)
    local = position - borders[sequence]
    source = torch.where(
        local < window, sequence * window + local, sequences * window + cu_seqlens[sequence] + local - window
    )
    joined = [
        None if x is None or y is None else torch.cat([x.flatten(0, 1), y[0]])[source][None]
        for x, y in zip(old, new, strict=True)
    ]
    return *joined, start


def last_tokens(
    k: Tensor, v: Tensor, f: Tensor, k_slots: Tensor | None, window: int, before: int, start: Tensor | None,
    cu_seqlens: Tensor | None,
):  # fmt: skip
    """The window at the end: `(k, v, f, k_slots, length)` of rings that hold each sequence's last tokens, oldest first.

    The arguments hold `before` tokens of an earlier window in front of each sequence's own, from `start` on;
    `cu_seqlens` are the borders without them. Rings have no more places than there can be tokens.
    """
    if cu_seqlens is None:
        sequences, capacity = k.shape[0], min(window, k.shape[1])
        if start is None:
            rings = (None if x is None else x[:, x.shape[1] - capacity :] for x in (k, v, f, k_slots))
            return *rings, torch.full((sequences, k.shape[2]), capacity, dtype=torch.int32, device=k.device)
        tokens = torch.full((sequences,), k.shape[1], dtype=torch.int32, device=k.device)
        borders = torch.arange(sequences, device=k.device) * k.shape[1]
    else:
        sequences, tokens = len(cu_seqlens) - 1, cu_seqlens.diff() + before
        borders = cu_seqlens[:-1] + before * torch.arange(sequences, device=k.device)
        capacity = min(window, k.shape[1] - (sequences - 1) * before)
    exist = tokens if start is None else tokens - start
    length = exist.clamp(max=capacity).to(torch.int32)
    places = torch.arange(capacity, device=k.device)
    # places without a token repeat some token that exists, or the last one of all
    index = borders[:, None] + ((tokens - length)[:, None] + places)
    index = index.clamp(max=k.shape[0] * k.shape[1] - 1)
    rings = (None if x is None else x.flatten(0, 1)[index] for x in (k, v, f, k_slots))
    return *rings, length[:, None].repeat(1, k.shape[2])


def _places(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index [N, W]` of dimension 1."""
    return x.gather(1, index[..., None, None].expand(*index.shape, *x.shape[2:]))


def _places_of(x: Tensor | None, index: Tensor) -> Tensor | None:
    return None if x is None else _places(x, index)


def _widen(x: Tensor | None, window: int) -> Tensor | None:
    return None if x is None else torch.nn.functional.pad(x, [0, 0, 0, 0, 0, window - x.shape[1]])
