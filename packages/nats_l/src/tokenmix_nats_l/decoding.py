"""Inference: the chunk that is still open, and what becomes of it at its last token.

A sequence holds, of whole chunks, the delta rule's state and the keys and values of those chunks and heads that rotated
out softmax; of the open chunk its keys and values, the sum of its inputs, the state at its start with the decay since,
and the running state. At a chunk's last token its type is known: a linear chunk's keys and values are dropped; a
softmax chunk's are kept, and the running state goes back to that of the chunk's start, decayed.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmix_core.chunking import chunk_slots, cu_seqlens_from_lengths, sequence_ids, slot_ids
from tokenmix_core.kernels import Asked
from tokenmix_core.nn import LayerState, Rotation, at_least_float32, normed_for_step
from tokenmix_core.ops import (
    attention_decode,
    gated_delta_rule_step,
    kept_attention,
    merge_attention,
    rotate_step,
    unless_gluon,
)
from tokenmix_nats_l.ablations import carried, far_attention, far_attention_of_last
from tokenmix_nats_l.chunks import ChunkTypes, chunk_means

if TYPE_CHECKING:
    from tokenmix_nats_l.mixer import NatsL, Tokens

# chunks that are kept without asking how many of them are, and of padded rows those that are looked at together
_PIECE = 32


def step(layer: NatsL, x: Tensor, tokens: Tokens, state: LayerState, rotary: Rotation | None) -> tuple[Tensor, Tensor]:
    """One token of each sequence: both operations' outputs `[N, 1, HA, VA]`; the state is updated in place.

    The softmax heads' q and k are as the convolutions gave them: one launch norms and turns both and stores k and v.
    """
    span, fit = state.span, layer.fit
    _prepare(state, x, len(x))
    start, recurrent, decay = state.start.value, state.recurrent.value, state.decay.value
    keys, values = state.open_keys.value, state.open_values.value

    q, k, v = fit.keys(tokens.q), fit.keys(tokens.k), fit.values(tokens.v)
    q, k, v, g, beta = (y.squeeze(1) for y in (q, k, v, fit.gates(tokens.g), fit.gates(tokens.beta)))
    o = gated_delta_rule_step(q, k, v, g, beta, recurrent, scale=layer.head_dim**-0.5, qk_l2norm=True, impl=layer.impl)
    linear = layer.as_softmax_heads(fit.outputs(o.unsqueeze(1), layer.num_heads))
    if layer.own_chunk == "softmax":
        linear = carried(layer, tokens, start, decay)
    decay += g
    state.inputs.value.add_(x.squeeze(1))

    place, filled = span.fill(layer.chunk)
    softmax_q, softmax_k, norms = normed_for_step(tokens.softmax_q, tokens.softmax_k, layer.q_norm, layer.k_norm)
    softmax_q, softmax_k, softmax_v = (y.squeeze(1) for y in (softmax_q, softmax_k, tokens.softmax_v))
    cos, sin = (None, None) if rotary is None else (y.squeeze(1) for y in rotary)
    softmax_q = rotate_step(
        softmax_q, softmax_k, softmax_v, cos, sin, keys, values, place,
        impl=unless_gluon(layer.impl), **norms,
    )  # fmt: skip
    seen = []
    if layer.own_chunk != "linear":
        seen.append(attention_decode(softmax_q.unsqueeze(1), keys, values, filled, impl=layer.impl))
    if state.kept.num_slots:
        seen.append(state.kept.attend(softmax_q, impl=layer.impl))
    softmax = merge_attention(seen, impl=unless_gluon(layer.impl)).o if seen else torch.zeros_like(tokens.softmax_v)

    if layer.step_form(span):
        # rows of one length end their chunks together
        ending = None if span.lengths is None else filled == layer.chunk
        means = (state.inputs.value / layer.chunk).unsqueeze(1)
        types = layer.types_from(means, lambda: (span.before // layer.chunk).unsqueeze(1))
        _close(layer, state, types.softmax.squeeze(1) > 0.5, ending)
    return linear, softmax


def go_on(layer: NatsL, x: Tensor, tokens: Tokens, state: LayerState) -> tuple[Tensor, Tensor]:
    """Several tokens of each sequence after what the state holds, which is updated: outputs `[B, T, HA, VA]`.

    They are as `state.span` says: dense, or packed without their padding.
    """
    span = state.span
    if span.uniform:
        return _go_on_evenly(layer, x, tokens, state, span.past % layer.chunk, span.past // layer.chunk)
    boundaries, before = [0, *(span.after - span.before).cumsum(0).tolist()], span.before.tolist()
    x, *flat = (y.flatten(0, 1).unsqueeze(0) for y in (x, *tokens))
    packed = type(tokens)(*flat)
    _prepare(state, x, span.batch)
    if not any(before) and layer.own_chunk != "softmax" and layer.decay:
        linear, softmax = _begin(layer, x, packed, state, boundaries)
    else:
        linear, softmax = _go_on_in_groups(layer, x, packed, state, boundaries, before)
    return linear.view_as(tokens.softmax_v), softmax.view_as(tokens.softmax_v)


def _go_on_evenly(
    layer: NatsL, x: Tensor, tokens: Tokens, state: LayerState, fill: int, number: int | Tensor
) -> tuple[Tensor, Tensor]:
    """`go_on` for rows whose open chunks have `fill` tokens, and are their sequences' chunk `number`, `[N, 1]`."""
    C, T = layer.chunk, x.shape[1]
    types = _types(layer, _means(layer, state, x, fill), number)
    # asked for before the long work, and read behind it
    longest = _longest(layer, state, types, (fill + T) // C)
    softmax = _attend(layer, tokens, types, state, fill)

    # tokens up to the open chunk's end; those of whole chunks; those of the next open chunk
    head = min(C - fill, T) if fill else 0
    whole = (T - head) // C * C
    outputs = []
    if head:
        outputs.append(_enter(layer, x, tokens, state, slice(0, head), fill))
        if fill + head == C:
            _close(layer, state, types.softmax[:, 0] > 0.5, longest=longest)
    first = 1 if head else 0
    if layer.own_chunk == "softmax" or not layer.decay:
        # the operation knows no such chunks: one after the other
        for i in range(whole // C):
            outputs.append(_enter(layer, x, tokens, state, slice(head + i * C, head + (i + 1) * C), 0))
            _close(layer, state, types.softmax[:, first + i] > 0.5, longest=longest)
    elif whole:
        chunks = tokens if whole == T else type(tokens)(*(y[:, head : head + whole] for y in tokens))
        slots = slice(first, first + whole // C)
        o, after = layer.delta_rule(chunks, types.linear[:, slots], state.recurrent.value)
        outputs.append(o)
        state.recurrent.value, state.start.value = after, after.clone()
        _keep(layer, state, chunks, types.softmax[:, slots] > 0.5, longest)
    if head + whole < T:
        outputs.append(_enter(layer, x, tokens, state, slice(head + whole, T), 0))
    _prepare(state, x, len(x))
    # gradients pass from chunk to chunk of this call, and do not cross calls
    for name in _TENSORS:
        getattr(state, name).set(getattr(state, name).value)
    return _joined(outputs), softmax


def _begin(layer: NatsL, x: Tensor, tokens: Tokens, state: LayerState, boundaries: list[int]) -> tuple[Tensor, Tensor]:
    """`go_on` for packed sequences that hold nothing yet, as a padded prompt's, all at once.

    Attention takes them as they are. The delta rule takes the whole chunks of all, whose types are known, and then the
    open chunks, which go on from the states that those end in.
    """
    C, device, N = layer.chunk, x.device, len(boundaries) - 1
    cu_seqlens = torch.tensor(boundaries, device=device)
    types = layer.types_of(x, cu_seqlens)
    attend = layer.attend if layer.own_chunk == "both" else partial(far_attention, layer)
    softmax = attend(tokens, types.softmax, cu_seqlens)

    lengths = cu_seqlens.diff()
    wholes, sequence = lengths // C * C, sequence_ids(cu_seqlens, x.shape[1])
    place = torch.arange(x.shape[1], device=device) - cu_seqlens[sequence]
    # tokens of whole chunks in front, then the others, both in their order
    order = (place >= wholes[sequence]).to(torch.uint8).argsort(stable=True)
    total = sum((end - start) // C * C for start, end in pairwise(boundaries))
    first, last = (type(tokens)(*(y[:, at] for y in tokens)) for at in (order[:total], order[total:]))
    outputs, start = [], state.start.value
    if total:
        ends = cu_seqlens_from_lengths(wholes)
        # a chunk's slot among all tokens, and among those of whole chunks
        at, slots = slot_ids(cu_seqlens, x.shape[1], C)[order[:total:C]], slot_ids(ends, total, C)[::C]
        writes = types.linear.new_ones(1, chunk_slots(1, total, C, ends), layer.num_heads)
        writes = writes.index_copy(1, slots.long(), types.linear[:, at])
        o, start = layer.delta_rule(first, writes, None, ends)
        outputs.append(o)
    running = start.clone()
    if total < x.shape[1]:
        o, running = layer.delta_rule(last, None, start, cu_seqlens_from_lengths(lengths - wholes))
        outputs.append(o)
        rows, places = sequence[order[total:]], place[order[total:]] % C
        state.decay.value = state.decay.value.index_add(0, rows, layer.fit.gates(last.g)[0])
        state.inputs.value = state.inputs.value.index_add(0, rows, at_least_float32(x[0, order[total:]]))
        state.open_keys.value[rows, places] = last.softmax_k[0].detach()
        state.open_values.value[rows, places] = last.softmax_v[0].detach()
    state.start.value, state.recurrent.value = start, running
    for name in _TENSORS:
        getattr(state, name).set(getattr(state, name).value)

    # what is kept, in pieces of all sequences side by side
    slots = (cu_seqlens[:-1] // C + torch.arange(N, device=device)).unsqueeze(1)
    for begin in range(0, max((end - start) // C * C for start, end in pairwise(boundaries)), _PIECE * C):
        i = begin + torch.arange(_PIECE * C, device=device)
        there = i < wholes.unsqueeze(1)
        at = torch.where(there, cu_seqlens[:-1, None] + i, 0)
        take = (types.softmax[0, torch.where(there, slots + i // C, 0)] > 0.5) & there.unsqueeze(-1)
        keys, values = (y[0, at] for y in (tokens.softmax_k, tokens.softmax_v))
        state.kept.append(keys, values, take.repeat_interleave(layer.group, -1))
    return torch.cat(outputs, 1)[:, order.argsort()], softmax


def _go_on_in_groups(
    layer: NatsL, x: Tensor, tokens: Tokens, state: LayerState, boundaries: list[int], before: list[int]
) -> tuple[Tensor, Tensor]:
    """`go_on` for packed sequences: together those whose open chunks are filled alike and that go on by as much."""
    groups: dict[tuple[int, int], list[int]] = {}
    for n, (start, end) in enumerate(pairwise(boundaries)):
        groups.setdefault((before[n] % layer.chunk, end - start), []).append(n)
    hold_nothing(state)
    kept, places, outputs = [], [], []
    for (fill, length), numbers in groups.items():
        rows = torch.tensor(numbers, device=x.device)
        apart = _rows(layer, state, rows)
        kept.append((rows, apart.kept))
        if length == 0:
            continue
        at = torch.tensor([range(boundaries[n], boundaries[n] + length) for n in numbers], device=x.device)
        here = type(tokens)(*(y[0, at] for y in tokens))
        chunks = state.span.before[rows].unsqueeze(1) // layer.chunk
        outputs.append([y.flatten(0, 1) for y in _go_on_evenly(layer, x[0, at], here, apart, fill, chunks)])
        places.append(at.flatten())
        for name in _TENSORS:
            getattr(state, name).value[rows] = getattr(apart, name).value
    state.kept.join(kept)
    back = torch.cat(places).argsort()
    linear, softmax = (torch.cat(y)[back] for y in zip(*outputs, strict=True))
    return linear, softmax


def _enter(layer: NatsL, x: Tensor, tokens: Tokens, state: LayerState, here: slice, fill: int) -> Tensor:
    """Take tokens into the open chunk, which has `fill` already; returns the delta rule's outputs."""
    _prepare(state, x, len(x))
    new = type(tokens)(*(y[:, here] for y in tokens))
    o, after = layer.delta_rule(new, None, state.recurrent.value)
    if layer.own_chunk == "softmax":
        o = carried(layer, new, state.start.value, state.decay.value)
    state.recurrent.value = after
    state.decay.value = state.decay.value + layer.fit.gates(new.g).sum(1)
    state.inputs.value = state.inputs.value + at_least_float32(x[:, here]).sum(1)
    places = slice(fill, fill + here.stop - here.start)
    state.open_keys.value[:, places] = new.softmax_k.detach()
    state.open_values.value[:, places] = new.softmax_v.detach()
    return o


def _attend(layer: NatsL, tokens: Tokens, types: ChunkTypes, state: LayerState, fill: int) -> Tensor:
    """Softmax attention of new tokens to kept chunks, to the open one, and to each other."""
    C, kept = layer.chunk, state.kept
    keys, values, marks = [tokens.softmax_k], [tokens.softmax_v], [types.softmax]
    if fill:
        keys.insert(0, state.open_keys.value[:, :fill])
        values.insert(0, state.open_values.value[:, :fill])
    if kept.num_slots:
        # lists are made of whole chunks
        keys.insert(0, kept.keys.transpose(1, 2))
        values.insert(0, kept.values.transpose(1, 2))
        held = torch.arange(0, kept.num_slots, C, device=kept.keys.device) < kept.lengths[:, :: layer.group, None]
        marks.insert(0, held.transpose(1, 2).to(types.softmax.dtype))
    k, v, keep = (_joined(y) for y in (keys, values, marks))
    if layer.own_chunk == "linear":
        return far_attention_of_last(layer, tokens.softmax_q, k, v, keep)
    return kept_attention(tokens.softmax_q, k, v, keep, unit=C, impl=layer.impl).o


def _means(layer: NatsL, state: LayerState, x: Tensor, fill: int) -> Tensor:
    """The mean inputs of the open chunk, of which `fill` tokens are summed up already, and of those after it."""
    head = min(layer.chunk - fill, x.shape[1]) if fill else 0
    means = []
    if head:
        sums = x[:, :head].sum(1, dtype=state.inputs.value.dtype)
        means.append((state.inputs.value + sums).unsqueeze(1) / (fill + head))
    if head < x.shape[1]:
        means.append(chunk_means(x[:, head:], layer.chunk))
    return _joined(means)


def _types(layer: NatsL, means: Tensor, first: int | Tensor) -> ChunkTypes:
    """The types of chunks with these means, the first of which is its sequence's chunk number `first`, `[N, 1]`."""

    def numbers() -> Tensor:
        return (torch.arange(means.shape[1], device=means.device) + first).expand(len(means), -1)

    return layer.types_from(means, numbers)


def _longest(layer: NatsL, state: LayerState, types: ChunkTypes, ending: int) -> Asked | None:
    """What the longest list will hold once `ending` chunks have ended; None for few, which find room without."""
    if ending <= _PIECE:
        return None
    tokens = layer.chunk * types.softmax[:, :ending].sum(1, dtype=torch.int32)
    if state.kept.num_slots:
        tokens = tokens + state.kept.lengths[:, :: layer.group]
    return Asked(tokens.max())


def _keep(layer: NatsL, state: LayerState, chunks: Tokens, softmax: Tensor, longest: Asked | None) -> None:
    """Hold the keys and values of those whole chunks that are marked in `softmax [N, chunks, H]`."""
    N, number, H = softmax.shape
    # head by head, as lists want it
    take = softmax.mT[:, :, None, :, None].expand(-1, -1, layer.group, -1, layer.chunk)
    take = take.reshape(N, H * layer.group, number * layer.chunk).mT
    state.kept.append(chunks.softmax_k, chunks.softmax_v, take, longest=None if longest is None else longest.read())


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts one after the other along time."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _close(
    layer: NatsL, state: LayerState, softmax: Tensor, rows: Tensor | None = None, longest: Asked | None = None
) -> None:
    """End the open chunk, of all rows or of those that `rows [N]` names; `softmax [N, H]` are its types."""
    start, recurrent, decay = state.start.value, state.recurrent.value, state.decay.value
    take = softmax if rows is None else softmax & rows.unsqueeze(-1)
    bare = decay.exp()[..., None, None] * start if layer.decay else start
    recurrent = torch.where(layer.fit.gates(take)[..., None, None], bare, recurrent)
    take = take.repeat_interleave(layer.group, -1).unsqueeze(1).expand(-1, layer.chunk, -1)
    room = None if longest is None else longest.read()
    state.kept.append(state.open_keys.value, state.open_values.value, take, longest=room)
    if rows is None:
        rows = torch.ones(len(start), dtype=torch.bool, device=start.device)
    # steps write into the running state, so the other is a copy
    state.start.put(torch.where(rows[:, None, None, None], recurrent, start))
    state.recurrent.put(recurrent)
    state.decay.put(decay.masked_fill(rows.unsqueeze(-1), 0.0))
    state.inputs.put(state.inputs.value.masked_fill(rows.unsqueeze(-1), 0.0))


_TENSORS = ("recurrent", "start", "decay", "inputs", "open_keys", "open_values")


def _prepare(state: LayerState, like: Tensor, batch: int) -> None:
    """Make the state's tensors, of zeros, before the first call."""
    for name in _TENSORS:
        getattr(state, name).get(batch, like)


def hold_nothing(state: LayerState) -> None:
    """Make the lists of kept tokens, of no length, where there are none yet."""
    if not state.kept.num_slots:
        keys, values = state.open_keys.value[:, :0], state.open_values.value[:, :0]
        state.kept.append(keys, values, torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device))


def _rows(layer: NatsL, state: LayerState, rows: Tensor) -> LayerState:
    """A state of some rows, with copies of their tensors."""
    apart = layer.make_state()
    for name in _TENSORS:
        getattr(apart, name).value = getattr(state, name).value[rows]
    apart.parts["kept"] = state.kept.rows(rows)
    return apart
