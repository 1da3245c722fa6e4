"""Two ablations of the paper's Table 6 (weighted sum of slots and window; no token shift), and the slots' share of
attention. The token shift delays each token's entry into the slots until it leaves the window.

For the weighted sum, the fused operation computes the slots' output with `window=0`. Without the token shift, slots and
window may hold the same token, which the fused operation does not support. Plain PyTorch then computes it on every
device: a recurrence for the slots of keys, a softmax, and a recurrence for the slots of values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.ops import AttentionOutput, Impl, without_padding
from tokenmix_nha.ops import SlotWindowState, slot_window_attention
from tokenmix_nha.ops.gla.api import scanned_at_once
from tokenmix_nha.ops.gla.scan import GatedScan
from tokenmix_nha.ops.slot_window.state import last_tokens, prepend


class Entering(NamedTuple):
    """The token that enters the slots at each step, `[B, T, H, ...]`, and the ring buffer that the next call gets.

    Attributes:
        k, v, f: key, value and log-gate of the entering token; a log-gate of 0 lets nothing enter.
        ring: k, v and f of the tokens that have not yet entered the slots, and their number, as in `SlotWindowState`.
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
    """Return the token that enters the slots at each step t: token t − W. W is the size of the ring buffer of `state`
    (0 without the token shift), which holds the tokens that enter in the first W steps.
    """
    window, tokens = state.window, k.shape[1]
    joined: tuple[Any, ...] = prepend(state, k, v, f, None, cu_seqlens)
    *tensors, _, start = joined
    joined_k, joined_v, joined_f = tensors
    remaining: tuple[Any, ...] = tuple(
        last_tokens(
            joined_k, joined_v, joined_f, None, window=window, before=window, start=start, cu_seqlens=cu_seqlens
        )
    )
    ring_k, ring_v, ring_f, _, length = remaining
    index = torch.arange(tokens, device=k.device)
    if cu_seqlens is not None:
        index = index + window * sequence_ids(cu_seqlens, tokens)
    b_k, b_v, b_f = (x.index_select(1, index) for x in tensors)
    return Entering(b_k, b_v, b_f, (ring_k, ring_v, ring_f, length))


def attend_to_slots(
    q: Float[Tensor, "B T HQ K"],
    entering: Entering,
    state: SlotWindowState,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
    impl: Impl | None,
) -> tuple[Float[Tensor, "B T HQ V"], SlotWindowState]:
    """Return the outputs of a softmax over the slots alone, and the final state, by the operation with `window=0`."""
    k, v, f, ring = entering
    # the operation with window=0 expects an empty ring buffer
    none = {name: getattr(state, name)[:, :0] for name in ("k", "v", "f")}
    out: Any = slot_window_attention(
        q, k, v, f, window=0, initial_state=state._replace(**none), cu_seqlens=cu_seqlens, impl=impl
    )
    k, v, f, length = ring
    return out.o, SlotWindowState(out.final_state.slots_k, out.final_state.slots_v, k, v, f, None, length)


def attend_jointly(
    q: Float[Tensor, "B T HQ K"],
    entering: Entering,
    state: SlotWindowState,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
    window: AttentionOutput,
    *,
    carried: bool,
) -> tuple[Float[Tensor, "B T HQ V"], SlotWindowState | None]:
    """Return the outputs of one softmax over window and slots without the token shift: both may contain the same token.

    Args:
        q: the queries that attend to the slots.
        entering: the tokens that enter the slots.
        state: the initial state.
        cu_seqlens: boundaries of packed sequences.
        window: output and log-sum-exp of attention to the window only.
        carried: whether to start from `state` and return the final state; if False, the slots start empty.

    Returns:
        The outputs, and the state after the last token if `carried`, else None.
    """
    wide = state.slots_k.dtype
    outputs, lse, slots_k, slots_v = [], [], [], []
    for tokens, rows, boundaries in scanned_at_once(cu_seqlens, carried=carried):
        b_q, b_k, b_v, b_f = (x[:, tokens].to(wide) for x in (q, entering.k, entering.v, entering.f))
        enter, (old_k, old_v) = -b_f.expm1(), (x[rows] if carried else None for x in (state.slots_k, state.slots_v))
        keys, values = GatedScan(enter, b_k, b_f, old_k, boundaries), GatedScan(enter, b_v, b_f, old_v, boundaries)
        logits = q.shape[-1] ** -0.5 * keys.columns(b_q)
        outputs.append(values.rows(logits.softmax(-1)))
        lse.append(logits.logsumexp(-1))
        if carried:
            slots_k.append(keys.final)
            slots_v.append(values.final)
    share = (torch.cat(lse, 1) - window.lse.to(wide)).sigmoid().unsqueeze(-1)
    o = without_padding((share * torch.cat(outputs, 1) + (1 - share) * window.o).to(q.dtype), cu_seqlens)
    if not carried:
        return o, None
    k, v, f, length = entering.ring
    return o, SlotWindowState(torch.cat(slots_k), torch.cat(slots_v), k, v, f, None, length)


def share_of_slots(
    q: Float[Tensor, "B T HQ K"],
    entering: Entering,
    lse: Float[Tensor, "B T HQ"],
    cu_seqlens: Int[Tensor, "N_plus_1"] | None,
) -> Float[Tensor, "B T HQ"]:
    """Return the total probability of the slots in one softmax over slots and window, given the window's log-sum-exp.

    The fused operation does not return this probability. Here a recurrence computes the slots' logits again, starting
    from empty slots.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    b_q, b_k, b_f = (x.to(wide) for x in (q, entering.k, entering.f))
    logits = q.shape[-1] ** -0.5 * GatedScan(-b_f.expm1(), b_k, b_f, None, cu_seqlens).columns(b_q)
    return (logits.logsumexp(-1) - lse.to(wide)).sigmoid()
