"""Calls with several tokens: sequences of different lengths are computed in one packed call."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_slots, cu_seqlens_from_lengths, sequence_ids, slot_ids
from tokenmix_core.nn import LayerState, StatePart, at_least_float32
from tokenmix_nats_l.ablations import past_chunk_attention
from tokenmix_nats_l.chunks import Tokens
from tokenmix_nats_l.decoding import BLOCK, TENSORS, attend, create_lists, extend_uniform, prepare, retain
from tokenmix_nats_l.layer import NatsLLayer


def extend(layer: NatsLLayer, x: Tensor, tokens: Tokens, state: LayerState) -> tuple[Tensor, Tensor]:
    """Compute several tokens of each sequence and update the state; return both outputs `[B, T, HA, VA]`.

    The tokens have the layout of `state.span`: dense, or packed without padding.
    """
    span = state.span
    if span.uniform:
        return extend_uniform(layer, x, tokens, state, span.past % layer.chunk, span.past // layer.chunk)
    boundaries, before = span.on_host
    x, *flat = (y.flatten(0, 1).unsqueeze(0) for y in (x, *tokens))
    packed = type(tokens)(*flat)
    prepare(state, x, span.batch)
    if layer.own_chunk == "softmax" or not layer.decay:
        linear, softmax = _extend_in_groups(layer, x, packed, state, boundaries, before)
    elif any(before):
        linear, softmax = _continue_packed(layer, x, packed, state, boundaries, before)
    else:
        linear, softmax = _begin_packed(layer, x, packed, state, boundaries)
    return linear.view_as(tokens.softmax_v), softmax.view_as(tokens.softmax_v)


def _begin_packed(
    layer: NatsLLayer, x: Tensor, tokens: Tokens, state: LayerState, boundaries: list[int]
) -> tuple[Tensor, Tensor]:
    """Compute packed sequences that begin with an empty state, such as padded prompts.

    One call of attention computes all tokens. One call of the delta rule computes the complete chunks of all sequences,
    and a second one the open chunks, starting from the final states of the first.
    """
    C, device, N = layer.chunk, x.device, len(boundaries) - 1
    span = state.span
    cu_seqlens = cu_seqlens_from_lengths(span.after - span.before)
    types = layer.types_of(x, cu_seqlens)
    mix = layer.attend if layer.own_chunk == "both" else partial(past_chunk_attention, layer)
    softmax = mix(tokens, types.softmax, cu_seqlens)

    lengths = cu_seqlens.diff()
    wholes, sequence = lengths // C * C, sequence_ids(cu_seqlens, x.shape[1])
    position = torch.arange(x.shape[1], device=device) - cu_seqlens[sequence]
    # a stable sort: first the tokens of complete chunks, then those of open chunks
    order = (position >= wholes[sequence]).to(torch.uint8).argsort(stable=True)
    total = sum((end - start) // C * C for start, end in pairwise(boundaries))
    first, last = (type(tokens)(*(y[:, at] for y in tokens)) for at in (order[:total], order[total:]))
    outputs, start = [], state.start.value
    if total:
        ends = cu_seqlens_from_lengths(wholes)
        # each complete chunk's entry: `at` in tensors for chunks of all tokens, `slots` in those for complete chunks
        at, slots = slot_ids(cu_seqlens, x.shape[1], C)[order[:total:C]], slot_ids(ends, total, C)[::C]
        writes = types.linear.new_ones(1, chunk_slots(1, total, C, ends), layer.num_heads)
        writes = writes.index_copy(1, slots.long(), types.linear[:, at])
        o, start = layer.delta_rule(first, writes, None, ends)
        outputs.append(o)
    running = start.clone()
    if total < x.shape[1]:
        o, running = layer.delta_rule(last, None, start, cu_seqlens_from_lengths(lengths - wholes))
        outputs.append(o)
        rows, offsets = sequence[order[total:]], position[order[total:]] % C
        state.decay.value = state.decay.value.index_add(0, rows, layer.fit.gates(last.g)[0])
        state.inputs.value = state.inputs.value.index_add(0, rows, at_least_float32(x[0, order[total:]]))
        state.open_keys.value[rows, offsets] = last.softmax_k[0].detach()
        state.open_values.value[rows, offsets] = last.softmax_v[0].detach()
    state.start.value, state.recurrent.value = start, running
    for name in TENSORS:
        getattr(state, name).set(getattr(state, name).value)

    # retain keys and values, for BLOCK chunks of every sequence at a time
    slots = (cu_seqlens[:-1] // C + torch.arange(N, device=device)).unsqueeze(1)
    longest = max((end - start) // C for start, end in pairwise(boundaries))
    for begin in range(0, longest, BLOCK):
        i = torch.arange(begin * C, min(begin + BLOCK, longest) * C, device=device)
        there = i < wholes.unsqueeze(1)
        at = torch.where(there, cu_seqlens[:-1, None] + i, 0)
        first, there = i[::C], there[:, ::C]
        take = (types.softmax[0, torch.where(there, slots + first // C, 0)] > 0.5) & there.unsqueeze(-1)
        retain(layer, state, tokens.softmax_k[0, at], tokens.softmax_v[0, at], take)
    return torch.cat(outputs, 1)[:, order.argsort()], softmax


def _continue_packed(
    layer: NatsLLayer, x: Tensor, tokens: Tokens, state: LayerState, boundaries: list[int], before: list[int]
) -> tuple[Tensor, Tensor]:
    """Extend packed sequences with open chunks of different lengths.

    One call of attention computes all tokens, in rows that begin with the open chunk. Three packed calls of the delta
    rule compute the tokens of the open chunks, of further complete chunks, and of the chunks that are open afterwards.
    """
    C, device, N, span, gates = layer.chunk, x.device, len(before), state.span, layer.fit.gates
    fills, counts = [n % C for n in before], [end - start for start, end in pairwise(boundaries)]
    M = max(cdiv(fill + count, C) for fill, count in zip(fills, counts, strict=True))
    fill, lengths, row = span.before % C, span.after - span.before, span.rows
    position = span.positions - (span.before - fill)[row]
    closed, index = (fill + lengths) // C, torch.arange(M, device=device)

    def by_row(new: Tensor, opened: Tensor | None = None) -> Tensor:
        """Return rows of M chunks: tokens of the open chunk `[N, C, ...]`, if given, and new tokens `[total, ...]`."""
        shape = (N, M * C, *new.shape[1:])
        rows = new.new_zeros(shape) if opened is None else F.pad(opened.to(new.dtype), (0, 0, 0, 0, 0, (M - 1) * C))
        return rows.flatten(0, 1).index_copy(0, row * M * C + position, new).view(shape)

    sums = by_row(x[0]).unflatten(1, (M, C)).sum(2, dtype=state.inputs.value.dtype)
    sums = sums + F.pad(state.inputs.value.unsqueeze(1), (0, 0, 0, M - 1))
    filled = ((fill + lengths).unsqueeze(1) - index * C).clamp(1, C)
    types = layer.types_from(sums / filled.unsqueeze(-1), lambda: (span.before // C).unsqueeze(1) + index)
    k = by_row(tokens.softmax_k[0], state.open_keys.value)
    v = by_row(tokens.softmax_v[0], state.open_values.value)
    rows = tokens._replace(softmax_q=by_row(tokens.softmax_q[0]), softmax_k=k, softmax_v=v)
    softmax = attend(layer, rows, types, state, 0)[row, position].unsqueeze(0)

    # a stable sort: tokens of the open chunks, of further complete chunks, of the chunks that are open afterwards
    chunk = position // C
    order = torch.where(chunk == 0, 0, 1 + (chunk >= closed[row])).to(torch.uint8).argsort(stable=True)
    heads = [min(C - fill, count) for fill, count in zip(fills, counts, strict=True)]
    middles = [max((fill + count) // C - 1, 0) * C for fill, count in zip(fills, counts, strict=True)]
    parts = order.split([sum(heads), sum(middles), len(order) - sum(heads) - sum(middles)])
    head = torch.minimum(lengths, C - fill)
    middle = (closed - 1).clamp(min=0) * C
    ends = [cu_seqlens_from_lengths(n) for n in (head, middle, lengths - head - middle)]
    first, whole, last = (type(tokens)(*(y[:, part] for y in tokens)) for part in parts)

    o, running = layer.delta_rule(first, None, state.recurrent.value, ends[0])
    outputs, decay = [o], state.decay.value.index_add(0, row[parts[0]], gates(first.g)[0])
    # if an open chunk ends as a softmax chunk, the state after it is the decayed state of its start
    bare = (types.softmax[:, 0] > 0.5) & (closed > 0).unsqueeze(1)
    running = torch.where(gates(bare)[..., None, None], decay.exp()[..., None, None] * state.start.value, running)
    if len(parts[1]):
        slots = slot_ids(ends[1], len(parts[1]), C)[::C].long()
        writes = types.linear.new_ones(1, chunk_slots(1, len(parts[1]), C, ends[1]), layer.num_heads)
        at = parts[1][::C]
        writes = writes.index_copy(1, slots, types.linear[row[at], chunk[at]].unsqueeze(0))
        o, running = layer.delta_rule(whole, writes, running, ends[1])
        outputs.append(o)
    ended = closed > 0
    state.start.value = torch.where(ended[:, None, None, None], running, state.start.value)
    decay = decay.masked_fill(ended.unsqueeze(1), 0.0)
    if len(parts[2]):
        o, running = layer.delta_rule(last, None, running, ends[2])
        outputs.append(o)
        decay = decay.index_add(0, row[parts[2]], gates(last.g)[0])
    # rows whose last chunk is complete have an empty open chunk
    opened, number = closed.clamp(max=M - 1), torch.arange(N, device=device)
    state.recurrent.value, state.decay.value = running, decay
    state.inputs.value = sums[number, opened].masked_fill((closed == M).unsqueeze(1), 0.0)
    state.open_keys.value, state.open_values.value = (y.unflatten(1, (M, C))[number, opened] for y in (k, v))
    for name in TENSORS:
        getattr(state, name).set(getattr(state, name).value)
    take = (types.softmax > 0.5) & (index < closed.unsqueeze(1)).unsqueeze(-1)
    for begin in range(0, M, BLOCK):
        here = slice(begin * C, (begin + BLOCK) * C)
        retain(layer, state, k[:, here], v[:, here], take[:, begin : begin + BLOCK])
    return torch.cat(outputs, 1)[:, order.argsort()], softmax


def _extend_in_groups(
    layer: NatsLLayer, x: Tensor, tokens: Tokens, state: LayerState, boundaries: list[int], before: list[int]
) -> tuple[Tensor, Tensor]:
    """Extend packed sequences in groups with equal length of the open chunk and equal number of new tokens."""
    groups: dict[tuple[int, int], list[int]] = {}
    for n, (start, end) in enumerate(pairwise(boundaries)):
        groups.setdefault((before[n] % layer.chunk, end - start), []).append(n)
    create_lists(state)
    kept: list[tuple[StatePart, list[int]]] = [(state.kept, [])] * len(before)
    indices, outputs = [], []
    for (fill, length), members in groups.items():
        rows = torch.tensor(members, device=x.device)
        apart = _rows(layer, state, members, rows)
        for i, n in enumerate(members):
            kept[n] = apart.kept, [i]
        if length == 0:
            continue
        at = torch.tensor([range(boundaries[n], boundaries[n] + length) for n in members], device=x.device)
        here = type(tokens)(*(y[0, at] for y in tokens))
        chunks = state.span.before[rows].unsqueeze(1) // layer.chunk
        both = extend_uniform(layer, x[0, at], here, apart, fill, chunks, (rows, len(before)))
        outputs.append([y.flatten(0, 1) for y in both])
        indices.append(at.flatten())
        for name in TENSORS:
            getattr(state, name).value[rows] = getattr(apart, name).value
    state.kept.gather_rows(kept)
    back = torch.cat(indices).argsort()
    linear, softmax = (torch.cat(y)[back] for y in zip(*outputs, strict=True))
    return linear, softmax


def _rows(layer: NatsLLayer, state: LayerState, members: list[int], rows: Tensor) -> LayerState:
    """Return a new state with copies of the rows `members` of all tensors."""
    apart = layer.make_state()
    for name in TENSORS:
        getattr(apart, name).value = getattr(state, name).value[rows]
    apart.kept.gather_rows([(state.kept, members)])
    return apart
