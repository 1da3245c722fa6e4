"""Inputs of the layer's attention functions: the projected tokens of a call, its state and its sequence boundaries."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmix_core.modeling import LayerState


class Heads(NamedTuple):
    """The projected tokens of a call, by head.

    Attributes:
        q, k: `[B, T, HQ, K]` and `[B, T, H, K]`, for attention to the window.
        v: `[B, T, H, V]`.
        q_slots, k_slots: q and k for the slots, with the same shapes.
        f: `[B, T, H, M]`, natural logs of the gates, or the gates' logits in a decoding step in which one softmax
            covers slots and window; None if no token can enter a slot.
        weight: the factor of the slots' output in a weighted sum with the window's output, broadcastable to `[B, T,
            HQ]`; None if one softmax covers both, or if the layer has only slots or only a window.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_slots: Tensor
    k_slots: Tensor
    f: Tensor | None
    weight: Tensor | None


class Call(NamedTuple):
    """State and sequence boundaries of a call.

    Attributes:
        state: the layer's state after the earlier tokens; None without a cache.
        cu_seqlens: boundaries of packed sequences.
        step: True in a decoding step: one token per sequence, and a state to overwrite.
    """

    state: LayerState | None
    cu_seqlens: Tensor | None
    step: bool
