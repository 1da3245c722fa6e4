"""Slot-window attention and gated linear attention on sequences that are split over ranks.

A rank holds spans, which are parts of a sequence. The rows of both operations' states decay: the state after a span is
S' = e^b S + L, where S is the state before the span, b the sum of the span's log-gates, and L the sum of the updates by
its tokens, each decayed to the span's end. Autograd differentiates this sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.ops import ScanOutput
from tokenmix_core.parallel import SequenceShard, compose_decays, receive, require_shard, tail_of
from tokenmix_nha import ops
from tokenmix_nha.ops import SlotWindowState

# maximum number of tokens of which copies in a wider dtype exist at the same time
_BLOCK = 8192


def slot_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    *,
    window: int,
    k_slots: Tensor | None = None,
    initial_state: SlotWindowState | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    q_slots: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    **options: Any,
) -> ScanOutput:
    """Apply `ops.slot_window_attention`, also to split sequences, which have neither an initial nor a final state.

    A span receives the `window` tokens before it, which have not yet entered the slots, and the slots at its start.
    """
    name = "slot_window_attention"
    shard = require_shard(name, sequence_shard, cu_seqlens)
    if shard is None:
        options |= {"window": window}
        options |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "output_final_state": output_final_state}
        return ops.slot_window_attention(q, k, v, f, q_slots=q_slots, k_slots=k_slots, **options)
    if initial_state is not None:
        raise ValueError(f"{name}: split sequences begin without an initial state")
    shard.check_local(name, q)
    window = min(window, shard.tokens)
    state = _state_before(shard, k, v, f, k_slots, window) if shard.crosses else None
    rows = [None if x is None else shard.to_rows(x) for x in (q, k, v, f, q_slots, k_slots)]
    options |= {
        "window": window,
        "initial_state": state,
        "cu_seqlens": shard.cu_seqlens(q.device),
        "output_final_state": False,
    }
    out = ops.slot_window_attention(*rows[:4], q_slots=rows[4], k_slots=rows[5], **options)  # type: ignore[arg-type]
    return ScanOutput(shard.from_rows(out.o), None)  # type: ignore[arg-type]


def _state_before(
    shard: SequenceShard, k: Tensor, v: Tensor, f: Tensor, k_slots: Tensor | None, window: int
) -> SlotWindowState:
    """Return the state before each span of this rank or, in a packed batch, before each sequence's part of a span."""
    given = [k, v, f] if k_slots is None else [k, v, f, k_slots]
    sizes = [x[0, 0].numel() for x in given]
    dtype = torch.promote_types(k.dtype, f.dtype)
    joined = torch.cat([x.flatten(2).to(dtype) for x in given], -1)
    found = receive(shard, joined, lambda span: tail_of(span, window), "slot_window_attention", window)

    decays, local = [], []
    for span, before in zip(shard.local, found, strict=True):
        end = span.offset + span.tokens
        tokens = joined[:, end - span.tail : end]
        if span.through:
            tokens = torch.cat((before, tokens), 1)
        # keep only the tokens that leave the window inside the span
        tokens = tokens[:, : max(0, tokens.shape[1] - window)]
        parts = [x.unflatten(-1, y.shape[2:]) for x, y in zip(tokens.split(sizes, -1), given, strict=True)]
        gates = parts[2]
        stored = torch.cat((parts[-1] if k_slots is not None else parts[0], parts[1]), -1)
        decay, state = _after(gates, -torch.expm1(gates.to(torch.promote_types(dtype, torch.float32))), stored)
        decays.append(decay)
        local.append(state)
    entering = compose_decays(shard, "slot_window_attention", torch.stack(decays), torch.stack(local))
    slots = _by_row(shard, list(entering))
    padded = [F.pad(x, (0, 0, 0, window - x.shape[1])) for x in found]
    rings = _by_row(shard, padded).split(sizes, -1)
    k_ring, v_ring, f_ring, *own = [
        ring.unflatten(-1, x.shape[2:]).to(x.dtype) for ring, x in zip(rings, given, strict=True)
    ]
    lengths = [torch.full((k.shape[0], 1), x.shape[1], device=k.device, dtype=torch.int32) for x in found]
    slots_k, slots_v = slots.split([k.shape[-1], v.shape[-1]], -1)
    return SlotWindowState(
        slots_k.contiguous(), slots_v.contiguous(), k_ring.contiguous(), v_ring.contiguous(), f_ring.contiguous(),
        own[0].contiguous() if own else None, _by_row(shard, lengths).repeat(1, k.shape[2]),
    )  # fmt: skip


def _after(log_gates: Tensor, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^{Σ g} `[B, H, R, 1]` and Σ_t e^{Σ g after t} w_t v_tᵀ `[B, H, R, C]`, in float32 or a wider dtype."""
    wide = torch.promote_types(torch.promote_types(log_gates.dtype, values.dtype), torch.float32)
    g = log_gates.to(wide)
    total = g.sum(1)
    weights = (total.unsqueeze(1) - g.cumsum(1)).exp() * weights
    found = g.new_zeros(*total.shape, values.shape[-1])
    for first in range(0, g.shape[1], _BLOCK):
        rows = slice(first, first + _BLOCK)
        found = found + torch.einsum("bthr,bthc->bhrc", weights[:, rows].to(wide), values[:, rows].to(wide))
    # even without tokens add zeros that depend on the inputs: all ranks must join the backward pass's communication
    found = found + weights[:, :0].sum() + values[:, :0].sum().to(wide)
    return total.exp().unsqueeze(-1), found


def _by_row(shard: SequenceShard, spans: list[Tensor]) -> Tensor:
    """Join the local spans' tensors `[B, ...]` into one with the rows of `shard.to_rows`.

    If packed, it has one row per part: the span's tensor for the first part of a span, zeros for the others, which
    begin documents.
    """
    rows = torch.stack(spans, 1).flatten(0, 1)
    if not shard.packed:
        return rows
    zeros = rows.new_zeros(len(shard.parts), *rows.shape[1:])
    return zeros.index_copy(0, torch.tensor(shard.heads, device=rows.device), rows)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    **options: Any,
) -> ScanOutput:
    """Apply `ops.chunk_gla`, also to split sequences, from zero; final states are those of `shard.to_rows`."""
    shard = require_shard("chunk_gla", sequence_shard, cu_seqlens)
    if shard is None:
        return ops.chunk_gla(q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
    if initial_state is not None:
        raise ValueError("chunk_gla: split sequences begin without an initial state")
    shard.check_local("chunk_gla", q)
    before = None
    if shard.crosses:
        tails = [slice(span.offset + span.tokens - span.tail, span.offset + span.tokens) for span in shard.local]
        maps = [_after(g[:, tail], k[:, tail].to(torch.promote_types(k.dtype, g.dtype)), v[:, tail]) for tail in tails]
        decays, local = (torch.stack(x) for x in zip(*maps, strict=True))
        before = _by_row(shard, list(compose_decays(shard, "chunk_gla", decays, local)))
    rows, boundaries = [shard.to_rows(x) for x in (q, k, v, g)], shard.cu_seqlens(q.device)
    out = ops.chunk_gla(*rows, initial_state=before, cu_seqlens=boundaries, **options)
    return out._replace(o=shard.from_rows(out.o))
