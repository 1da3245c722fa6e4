"""The ablations of Table 6 and the share of the slots, in two passes with the logits of the slots in the open.

What the operation computes in one kernel is here a recurrence for the keys' slots, a softmax, and a recurrence for the
values' slots, so that other softmaxes and other tokens in the slots are possible. Plain PyTorch on every device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.ops.common import AttentionOutput
from tokenmix_nha.ops import SlotWindowState
from tokenmix_nha.ops.gla.api import sequences_of
from tokenmix_nha.ops.gla.scan import GatedScan
from tokenmix_nha.ops.slot_window_attention.state import last_tokens, prepend


class Entering(NamedTuple):
    """The token that enters the slots at each step, `[B, T, H, ...]`, and what the next call has to know.

    Attributes:
        k, v, f: its key, value and log-gate; a log-gate of 0 lets nothing enter.
        ring: k, v, f of the tokens that have not entered yet, and their number, as `SlotWindowState` holds them.
    """

    k: Tensor
    v: Tensor
    f: Tensor
    ring: tuple[Tensor, Tensor, Tensor, Tensor]


def delayed(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    f: Float[Tensor, "B T H M"],
    state: SlotWindowState,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
) -> Entering:
    """The token shift: at step t enters token t − W, W being the places of the state's ring, which holds the first."""
    window, tokens = state.window, k.shape[1]
    joined: tuple[Any, ...] = prepend(state, k, v, f, None, cu_seqlens)
    *tensors, _, start = joined
    joined_k, joined_v, joined_f = tensors
    left: tuple[Any, ...] = tuple(last_tokens(joined_k, joined_v, joined_f, None, window, window, start, cu_seqlens))
    ring_k, ring_v, ring_f, _, length = left
    index = torch.arange(tokens, device=k.device)
    if cu_seqlens is not None:
        index = index + window * sequence_ids(cu_seqlens, tokens)
    b_k, b_v, b_f = (x.index_select(1, index) for x in tensors)
    return Entering(b_k, b_v, b_f, (ring_k, ring_v, ring_f, length))


def attend_apart(
    q: Float[Tensor, "B T HQ K"],
    entering: Entering,
    state: SlotWindowState,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
    window: AttentionOutput,
    weight: Float[Tensor, "B T HQ"] | float | None,
) -> tuple[Float[Tensor, "B T HQ V"], SlotWindowState]:
    """Slots and window, attended to apart.

    Args:
        q: the queries as the slots see them.
        entering: what enters the slots.
        state: the slots before.
        cu_seqlens: borders of packed sequences.
        window: what attention to the window alone gives.
        weight: of the slots' output in the sum with the window's, each after a softmax of its own; None for one softmax
            over both.

    Returns:
        The outputs and the state after the last token.
    """
    scale, wide = q.shape[-1] ** -0.5, state.slots_k.dtype
    outputs, slots_k, slots_v = [], [], []
    for tokens, rows in sequences_of(cu_seqlens, len(state.slots_k)):
        b_q, b_k, b_v, b_f = (x[:, tokens].to(wide) for x in (q, entering.k, entering.v, entering.f))
        enter = -b_f.expm1()
        keys = GatedScan(enter, b_k, b_f, state.slots_k[rows])
        values = GatedScan(enter, b_v, b_f, state.slots_v[rows])
        logits = scale * keys.columns(b_q)
        if weight is None:
            total = torch.logaddexp(logits.logsumexp(-1), window.lse[:, tokens].to(wide))
            share = (logits - total.unsqueeze(-1)).exp()
        else:
            share = logits.softmax(-1)
        outputs.append((values.rows(share), logits.logsumexp(-1)))
        slots_k.append(keys.final)
        slots_v.append(values.final)
    long, lse = (torch.cat(x, 1) for x in zip(*outputs, strict=True))
    if weight is None:
        lse_window = window.lse.to(wide)
        o = long + (lse_window - torch.logaddexp(lse, lse_window)).exp().unsqueeze(-1) * window.o
    else:
        weight = weight.unsqueeze(-1) if isinstance(weight, Tensor) else weight
        o = weight * long + (1 - weight) * window.o
    k, v, f, length = entering.ring
    after = SlotWindowState(torch.cat(slots_k), torch.cat(slots_v), k, v, f, None, length)
    return o.to(q.dtype), after


def slot_share(
    q: Float[Tensor, "B T HQ K"],
    entering: Entering,
    state: SlotWindowState,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
    lse_window: Float[Tensor, "B T HQ"],
) -> Float[Tensor, "B T HQ"]:
    """ω_L: the share of attention that one softmax over slots and window gives to the slots (equation 5)."""
    wide, parts = state.slots_k.dtype, []
    for tokens, rows in sequences_of(cu_seqlens, len(state.slots_k)):
        b_q, b_k, b_f = (x[:, tokens].to(wide) for x in (q, entering.k, entering.f))
        keys = GatedScan(-b_f.expm1(), b_k, b_f, state.slots_k[rows])
        parts.append((q.shape[-1] ** -0.5 * keys.columns(b_q)).logsumexp(-1))
    return (torch.cat(parts, 1) - lse_window.to(wide)).sigmoid()
