"""The state of slot-window attention between calls, slots and window; its size is constant."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotWindowState(NamedTuple):
    """The state of N sequences: M slots per head, and the last tokens, which have not yet entered the slots.

    The window is a ring buffer of W tokens: token p of a sequence, counted from 0, has index `p mod W`, and the buffer
    contains the last `min(length, W)` tokens. Unused entries do not affect any result.

    Attributes:
        slots_k: `[N, H, M, K]`, float32 (float64 for float64 inputs).
        slots_v: `[N, H, M, V]`, the dtype of `slots_k`.
        k: `[N, W, H, K]`, the window's keys.
        v: `[N, W, H, V]`, the window's values.
        f: `[N, W, H, M]`, log-gates of the window's tokens, which are used when these enter the slots.
        k_slots: `[N, W, H, K]`, keys that will enter the slots; None if slots and window use the same keys.
        length: `[N, H]` int32, number of tokens so far, equal for all heads of a sequence. Each head has a counter of
            its own, so that the programs of a decoding step are independent.
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
        """Return the state before any token, with a ring buffer of `window` tokens.

        With `own_slot_keys`, the state also has `k_slots`.
        """
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
        """W, the size of the ring buffer in tokens."""
        return self.k.shape[1]

    def bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in self if x is not None)

    def reserve(self, window: int) -> SlotWindowState:
        """Return a copy in new tensors with a ring buffer of `window` tokens, which decoding steps may overwrite.

        Raises:
            ValueError: `window` is smaller than the present ring buffer's W tokens, so that tokens might be lost.
        """
        if window < self.window:
            raise ValueError(f"reserve: window must be at least the ring's {self.window} tokens, got {window}")
        k, v, f, k_slots = (_widen(x, window) for x in self.unrolled())
        length = self.length.clamp(max=self.window)
        return SlotWindowState(self.slots_k.clone(), self.slots_v.clone(), k, v, f, k_slots, length)

    def at(self, slots: Tensor, fresh: Tensor | None) -> SlotWindowState:
        """Return copies of the states in `slots` of a pool; empty states for negative slots and `fresh` sequences."""
        (held,) = torch.where(slots >= 0 if fresh is None else (slots >= 0) & ~fresh)
        index = slots[held].long()

        def rows(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.new_zeros(len(slots), *x.shape[1:]).index_copy_(0, held, x[index])

        return SlotWindowState._make(map(rows, self))

    def put(self, slots: Tensor, state: SlotWindowState) -> None:
        """Overwrite `slots` of a pool by the states of sequences; those with a negative slot are dropped."""
        (kept,) = torch.where(slots >= 0)
        for x, given in zip(self, state, strict=True):
            if x is not None and given is not None:
                x.index_copy_(0, slots[kept].long(), given[kept])

    def unrolled(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return k, v, f and k_slots with the oldest token first and the unused entries last."""
        offsets = torch.arange(self.window, device=self.length.device)
        length = self.length[:, :1]
        oldest = length - length.clamp(max=self.window)
        index = (oldest + offsets) % max(self.window, 1)
        k_slots = None if self.k_slots is None else _gather(self.k_slots, index)
        return _gather(self.k, index), _gather(self.v, index), _gather(self.f, index), k_slots


def prepend(state: SlotWindowState, k: Tensor, v: Tensor, f: Tensor, k_slots: Tensor | None, cu_seqlens: Tensor | None):
    """Put the state's W window tokens before each sequence; return `(k, v, f, k_slots, start)`.

    `start` `[N]`, int32, is the index of each sequence's first valid token. Tokens before it have log-gate 0, and must
    be masked out of the window.
    """
    window = state.window
    offsets = torch.arange(window, device=state.length.device)
    index = (state.length[:, :1] + offsets) % max(window, 1)
    start = (window - state.length[:, 0]).clamp(min=0).to(torch.int32)
    gates = _gather(state.f, index).masked_fill((offsets < start[:, None])[..., None, None], 0)
    k_slots_old = None if state.k_slots is None else _gather(state.k_slots, index)
    old = (_gather(state.k, index), _gather(state.v, index), gates, k_slots_old)
    new = (k, v, f, k_slots)
    if cu_seqlens is None:
        joined = [None if x is None or y is None else torch.cat([x, y], 1) for x, y in zip(old, new, strict=True)]
        return *joined, start
    sequences, tokens = len(cu_seqlens) - 1, k.shape[1]
    boundaries = cu_seqlens + window * torch.arange(sequences + 1, device=cu_seqlens.device)
    position = torch.arange(tokens + sequences * window, device=cu_seqlens.device)
    sequence = torch.searchsorted(boundaries[1:].contiguous(), position, right=True)
    local = position - boundaries[sequence]
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
    """Return `(k, v, f, k_slots, length)` of the final state: rings of each sequence's last tokens, oldest first.

    In the arguments, each sequence begins with `before` tokens of the carried window, which are valid from index
    `start` on. `cu_seqlens` counts only the new tokens. A ring buffer is not larger than the number of tokens.
    """
    if cu_seqlens is None:
        sequences, capacity = k.shape[0], min(window, k.shape[1])
        if start is None:
            rings = (None if x is None else x[:, x.shape[1] - capacity :] for x in (k, v, f, k_slots))
            return *rings, torch.full((sequences, k.shape[2]), capacity, dtype=torch.int32, device=k.device)
        tokens = torch.full((sequences,), k.shape[1], dtype=torch.int32, device=k.device)
        begins = torch.arange(sequences, device=k.device) * k.shape[1]
    else:
        sequences, tokens = len(cu_seqlens) - 1, cu_seqlens.diff() + before
        begins = cu_seqlens[:-1] + before * torch.arange(sequences, device=k.device)
        capacity = min(window, k.shape[1] - (sequences - 1) * before)
    exist = tokens if start is None else tokens - start
    length = exist.clamp(max=capacity).to(torch.int32)
    # unused entries get the sequence's last token, because other sequences and padding may contain NaN
    index = begins[:, None] + ((tokens - length)[:, None] + torch.arange(capacity, device=k.device))
    index = torch.minimum(index, (begins + tokens - 1).clamp(min=0)[:, None])
    rings = (None if x is None else x.flatten(0, 1)[index] for x in (k, v, f, k_slots))
    return *rings, length[:, None].repeat(1, k.shape[2])


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[n, index[n, w]]` for `index` `[N, W]`."""
    return x.gather(1, index[..., None, None].expand(*index.shape, *x.shape[2:]))


def _widen(x: Tensor | None, window: int) -> Tensor | None:
    return None if x is None else torch.nn.functional.pad(x, [0, 0, 0, 0, 0, window - x.shape[1]])
