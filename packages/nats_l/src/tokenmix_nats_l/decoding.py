"""Inference with a cache. Each sequence ends in an open chunk, whose type is determined at its last token.

For complete chunks, the state has the delta rule's state and, per head, the keys and values of softmax chunks. For the
open chunk it has keys and values, the sum of inputs, the state at the chunk's start, the decay since then, and the
running state. At the chunk's last token the type is determined: keys and values of a linear chunk are dropped; those of
a softmax chunk are retained, and the running state becomes the state of the chunk's start after the decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.kernels import Asked
from tokenmix_core.nn import LayerState, Pages, Rotation, at_least_float32, normed_for_step
from tokenmix_core.ops import (
    attention_decode,
    gated_delta_rule_step,
    kept_attention,
    merge_attention,
    rotate_step,
    unless_gluon,
)
from tokenmix_nats_l.ablations import past_chunk_attention_of_last, read_state
from tokenmix_nats_l.chunks import ChunkTypes, Tokens, chunk_means
from tokenmix_nats_l.layer import NatsLLayer

# maximum number of chunks of a call for which lists grow by an upper bound, without the host reading their lengths;
# also the number of chunks of each row that `packed.py` retains at once
BLOCK = 32


def step(
    layer: NatsLLayer, x: Tensor, tokens: Tokens, state: LayerState, rotary: Rotation | None
) -> tuple[Tensor, Tensor]:
    """Compute one token of each sequence and overwrite the state; return both operations' outputs `[N, 1, HA, VA]`.

    The q and k of the softmax heads come directly from the convolutions: one launch normalises and rotates them, and
    stores k and v.
    """
    span, fit = state.span, layer.fit
    prepare(state, x, len(x))
    start, recurrent, decay = state.start.value, state.recurrent.value, state.decay.value
    keys, values = state.open_keys.value, state.open_values.value

    q, k, v = fit.keys(tokens.q), fit.keys(tokens.k), fit.values(tokens.v)
    q, k, v, g, beta = (y.squeeze(1) for y in (q, k, v, fit.gates(tokens.g), fit.gates(tokens.beta)))
    o = gated_delta_rule_step(q, k, v, g, beta, recurrent, scale=layer.head_dim**-0.5, qk_l2norm=True, impl=layer.impl)
    linear = layer.as_softmax_heads(fit.outputs(o.unsqueeze(1), layer.num_heads))
    if layer.own_chunk == "softmax":
        linear = read_state(layer, tokens, start, decay)
    decay += g
    state.inputs.value.add_(x.squeeze(1))

    index, filled = span.fill(layer.chunk)
    softmax_q, softmax_k, norms = normed_for_step(tokens.softmax_q, tokens.softmax_k, layer.q_norm, layer.k_norm)
    softmax_q, softmax_k, softmax_v = (y.squeeze(1) for y in (softmax_q, softmax_k, tokens.softmax_v))
    cos, sin = (None, None) if rotary is None else (y.squeeze(1) for y in rotary)
    softmax_q = rotate_step(
        softmax_q, softmax_k, softmax_v, cos, sin, keys, values, index,
        impl=unless_gluon(layer.impl), **norms,
    )  # fmt: skip
    seen = []
    if layer.own_chunk != "linear":
        seen.append(attention_decode(softmax_q.unsqueeze(1), keys, values, filled, impl=layer.impl))
    if state.kept.tensors:
        seen.append(state.kept.attend(softmax_q, impl=layer.impl))
    softmax = merge_attention(seen, impl=unless_gluon(layer.impl)).o if seen else torch.zeros_like(tokens.softmax_v)

    if layer.step_form(span):
        # the rows whose chunk ends in this step; None if all rows have equal lengths, since all chunks then end in it
        ending = None if span.lengths is None else filled == layer.chunk
        means = (state.inputs.value / layer.chunk).unsqueeze(1)
        types = layer.types_from(means, lambda: (span.before // layer.chunk).unsqueeze(1))
        _close(layer, state, types.softmax.squeeze(1) > 0.5, ending)
    return linear, softmax


def extend_uniform(
    layer: NatsLLayer,
    x: Tensor,
    tokens: Tokens,
    state: LayerState,
    fill: int,
    index: int | Tensor,
    among: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Extend rows whose open (incomplete) chunks have `fill` tokens; return both operations' outputs `[N, T, HA, VA]`.

    `index` is the index of the open chunk in its sequence: one for all rows, or `[N, 1]`. `among` is the same as for
    `NatsLLayer.types_from`.
    """
    C, T = layer.chunk, x.shape[1]
    types = _types(layer, _means(layer, state, x, fill), index, among)
    # start to copy the page counts to the host before the long kernels, and read them after these kernels are launched
    known = _pages(layer, state, types, (fill + T) // C)
    softmax = attend(layer, tokens, types, state, fill)

    # head: new tokens of the open chunk; whole: tokens of complete chunks; the rest begin the next open chunk
    head = min(C - fill, T) if fill else 0
    whole = (T - head) // C * C
    outputs = []
    if head:
        outputs.append(_append(layer, x, tokens, state, slice(0, head), fill))
        if fill + head == C:
            _close(layer, state, types.softmax[:, 0] > 0.5, known=known)
    first = 1 if head else 0
    if layer.own_chunk == "softmax" or not layer.decay:
        # with these options one call of the delta rule cannot compute several chunks: compute one chunk after another
        for i in range(whole // C):
            outputs.append(_append(layer, x, tokens, state, slice(head + i * C, head + (i + 1) * C), 0))
            _close(layer, state, types.softmax[:, first + i] > 0.5, known=known)
    elif whole:
        chunks = tokens if whole == T else type(tokens)(*(y[:, head : head + whole] for y in tokens))
        slots = slice(first, first + whole // C)
        o, after = layer.delta_rule(chunks, types.linear[:, slots], state.recurrent.value)
        outputs.append(o)
        state.recurrent.value, state.start.value = after, after.clone()
        retain(layer, state, chunks.softmax_k, chunks.softmax_v, types.softmax[:, slots] > 0.5, known)
    if head + whole < T:
        outputs.append(_append(layer, x, tokens, state, slice(head + whole, T), 0))
    prepare(state, x, len(x))
    # `set` detaches tensors: gradients pass between the chunks of one call, but not from call to call
    for name in TENSORS:
        getattr(state, name).set(getattr(state, name).value)
    return _joined(outputs), softmax


def _append(layer: NatsLLayer, x: Tensor, tokens: Tokens, state: LayerState, here: slice, fill: int) -> Tensor:
    """Append tokens to the open (incomplete) chunk, which has `fill` tokens; return the delta rule's outputs."""
    prepare(state, x, len(x))
    new = type(tokens)(*(y[:, here] for y in tokens))
    o, after = layer.delta_rule(new, None, state.recurrent.value)
    if layer.own_chunk == "softmax":
        o = read_state(layer, new, state.start.value, state.decay.value)
    state.recurrent.value = after
    state.decay.value = state.decay.value + layer.fit.gates(new.g).sum(1)
    state.inputs.value = state.inputs.value + at_least_float32(x[:, here]).sum(1)
    slots = slice(fill, fill + here.stop - here.start)
    state.open_keys.value[:, slots] = new.softmax_k.detach()
    state.open_values.value[:, slots] = new.softmax_v.detach()
    return o


def attend(layer: NatsLLayer, tokens: Tokens, types: ChunkTypes, state: LayerState, fill: int) -> Tensor:
    """Return attention from the new tokens to retained chunks, to the open (incomplete) chunk, and to each other."""
    C, kept = layer.chunk, state.kept
    keys, values, marks = [tokens.softmax_k], [tokens.softmax_v], [types.softmax]
    if fill:
        keys.insert(0, state.open_keys.value[:, :fill])
        values.insert(0, state.open_values.value[:, :fill])
    if kept.tensors:
        # mask of retained chunks, one entry per page (a page holds exactly one complete chunk): True if the page is in
        # use
        held = [x.transpose(1, 2) for x in kept.lists()]
        keys.insert(0, held[0])
        values.insert(0, held[1])
        page = torch.arange(held[0].shape[1] // C, device=held[0].device)
        filled = page * C < kept.lengths[:, :: layer.group, None]
        marks.insert(0, filled.transpose(1, 2).to(types.softmax.dtype))
    k, v, keep = (_joined(y) for y in (keys, values, marks))
    if layer.own_chunk == "linear":
        return past_chunk_attention_of_last(layer, tokens.softmax_q, k, v, keep)
    return kept_attention(tokens.softmax_q, k, v, keep, unit=C, impl=layer.impl).o


def _means(layer: NatsLLayer, state: LayerState, x: Tensor, fill: int) -> Tensor:
    """Return the mean inputs of the open chunk, whose first `fill` tokens are already summed, and of later chunks."""
    head = min(layer.chunk - fill, x.shape[1]) if fill else 0
    means = []
    if head:
        sums = x[:, :head].sum(1, dtype=state.inputs.value.dtype)
        means.append((state.inputs.value + sums).unsqueeze(1) / (fill + head))
    if head < x.shape[1]:
        means.append(chunk_means(x[:, head:], layer.chunk))
    return _joined(means)


def _types(layer: NatsLLayer, means: Tensor, first: int | Tensor, among: tuple[Tensor, int] | None) -> ChunkTypes:
    """Return the types of chunks with the given mean inputs; `first` is the index of each row's first chunk."""

    def indices() -> Tensor:
        return (torch.arange(means.shape[1], device=means.device) + first).expand(len(means), -1)

    return layer.types_from(means, indices, among)


def _pages(layer: NatsLLayer, state: LayerState, types: ChunkTypes, ending: int) -> tuple[Asked, Asked] | None:
    """Start to copy to the host the page counts after the next `ending` chunks.

    Return None for up to BLOCK chunks, for which an upper bound of the counts is used.
    """
    if ending <= BLOCK:
        return None
    pages = types.softmax[:, :ending].sum(1, dtype=torch.int32)
    if state.kept.tensors:
        pages = pages + state.kept.lengths[:, :: layer.group] // layer.chunk
    return Asked(layer.group * pages.sum(1).max()), Asked(pages.max())


def retain(
    layer: NatsLLayer,
    state: LayerState,
    k: Tensor,
    v: Tensor,
    softmax: Tensor,
    known: tuple[Asked, Asked] | None = None,
) -> None:
    """Retain the keys and values of the complete chunks for which `softmax [N, chunks, H]` is True."""
    pages = None if known is None else Pages(*(x.read() for x in known))
    # repeat the types of each delta-rule head for its softmax heads
    take = softmax.mT.unsqueeze(2).expand(-1, -1, layer.group, -1).flatten(1, 2).mT
    state.kept.append(k, v, take, known=pages)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the outputs of parts along time."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _close(
    layer: NatsLLayer,
    state: LayerState,
    softmax: Tensor,
    rows: Tensor | None = None,
    known: tuple[Asked, Asked] | None = None,
) -> None:
    """Close the open chunk of all rows, or of those in the mask `rows [N]`; `softmax [N, H]` is True for softmax."""
    start, recurrent, decay = state.start.value, state.recurrent.value, state.decay.value
    take = softmax if rows is None else softmax & rows.unsqueeze(-1)
    bare = decay.exp()[..., None, None] * start if layer.decay else start
    recurrent = torch.where(layer.fit.gates(take)[..., None, None], bare, recurrent)
    retain(layer, state, state.open_keys.value, state.open_values.value, take.unsqueeze(1), known)
    if rows is None:
        rows = torch.ones(len(start), dtype=torch.bool, device=start.device)
    # keep a copy, because decoding steps overwrite the running state `recurrent`
    state.start.put(torch.where(rows[:, None, None, None], recurrent, start))
    state.recurrent.put(recurrent)
    state.decay.put(decay.masked_fill(rows.unsqueeze(-1), 0.0))
    state.inputs.put(state.inputs.value.masked_fill(rows.unsqueeze(-1), 0.0))


TENSORS = ("recurrent", "start", "decay", "inputs", "open_keys", "open_values")


def prepare(state: LayerState, like: Tensor, batch: int) -> None:
    """Allocate the tensors of the state, filled with zeros, before the first call."""
    for name in TENSORS:
        getattr(state, name).get(batch, like)


def create_lists(state: LayerState) -> None:
    """Create empty lists of retained tokens, unless the state already has lists."""
    if not state.kept.tensors:
        state.kept.allocate(len(state.open_keys.value), state.open_keys.value)
