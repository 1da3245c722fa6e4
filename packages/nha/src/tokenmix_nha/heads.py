"""A call as the forms of attention take it: its tokens by head, and where they belong."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmix_core.modeling import LayerState


class Heads(NamedTuple):
    """The tokens of a call.

    Attributes:
        q, k: `[B, T, HQ, K]`, `[B, T, H, K]`, as the window sees them.
        v: `[B, T, H, V]`.
        q_slots, k_slots: q and k as the slots see them.
        f: `[B, T, H, M]`, natural logs of the gates; in a joint step the projections themselves; None where no
            token can enter a slot.
        weight: `[B, T, HQ]`, or of ones in their place: the slots' in a sum of what they and the window give alone;
            None where one softmax holds both, or there is one memory only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_slots: Tensor
    k_slots: Tensor
    f: Tensor | None
    weight: Tensor | None


class Call(NamedTuple):
    """Where the tokens belong.

    Attributes:
        state: what the layer keeps of earlier ones; None without a cache.
        cu_seqlens: borders of packed sequences.
        step: whether it is a decoding step: one token of each sequence, and a state to update in place.
    """

    state: LayerState | None
    cu_seqlens: Tensor | None
    step: bool
