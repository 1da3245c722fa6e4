"""Operations of `tokenmix_core.ops` for sequences that are split over ranks, and `shift_tokens`.

Each of the functions applies the operation of the same name and takes its arguments. Inside the context
`sequence_shard`, or with the argument `sequence_shard`, the tensors contain only this rank's tokens of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core import ops
from tokenmix_core.ops.gated_delta_rule.api import check_scan
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.types import Inputs
from tokenmix_core.ops.ssd.api import check_scan as check_ssd
from tokenmix_core.ops.ssd.span_states import final_state, initial_gradient, span_decay
from tokenmix_core.ops.ssd.types import Inputs as SSDInputs
from tokenmix_core.ops.types import AttentionOutput, ScanOutput
from tokenmix_core.parallel.exchange import begin_receive, combined, receive, requested_tokens
from tokenmix_core.parallel.kernel_scans import by_segments, split_scan
from tokenmix_core.parallel.overlap import HeadGroup, head_groups, in_turn
from tokenmix_core.parallel.recurrence import Recurrence, Tensors, split_recurrence
from tokenmix_core.parallel.shard import Range, SequenceShard, Span, require_shard


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    writes: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    final_states: bool | None = None,
    **options: Any,
) -> ScanOutput:
    """Apply `ops.chunk_gated_delta_rule`, also to split sequences.

    Args:
        q, k, v, g, beta, initial_state, cu_seqlens, writes, options: as for the operation. If sequences are split,
            `initial_state` contains the states of all rows or documents on every rank, and `cu_seqlens` and `writes`
            must be None.
        sequence_shard: how sequences are split; None for the shard of the current context, if any.
        final_states: for split sequences, whether to return final states (of all rows or documents, on every rank)
            instead of None; by default the shard's `keeps_states`.
    """
    name = "chunk_gated_delta_rule"
    shard = require_shard(name, sequence_shard, cu_seqlens)
    if shard is None:
        more = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "writes": writes, **options}
        return ops.chunk_gated_delta_rule(q, k, v, g, beta, **more)
    if writes is not None:
        raise ValueError(f"{name}: writes cannot be split over ranks, as their chunks would cross them")
    shard.check_local(name, q)
    if by_segments(shard, q) and shard.local[0].tokens % CHUNK == 0:
        x = Inputs(q, k, v, g, beta, initial_state, None, None, **{"scale": None, "qk_l2norm": False, **options})
        impl, scale = check_scan(name, *x)
        if impl != "reference":
            from tokenmix_core.ops.gated_delta_rule.rank_split import Spans

            scan = Spans(x._replace(impl=impl, scale=scale))
            return split_scan(shard, name, scan, map(shard.to_rows, x[:5]), initial_state, final_states)
    if options.get("scale") is None:
        options["scale"] = q.shape[-1] ** -0.5

    def run(x: Tensors, before: Tensor | None, boundaries: Tensor | None) -> ScanOutput:
        return ops.chunk_gated_delta_rule(*x, initial_state=before, cu_seqlens=boundaries, **options)

    def transition(x: Tensors) -> tuple[Tensor, Tensor]:
        # with the identity as initial state and v = 0, the final state is M and the outputs are P; with another initial
        # state S they are M S and P S
        (batch, tokens, _, K), heads = x[1].shape, x[2].shape[2]
        wide = torch.promote_types(torch.promote_types(x[0].dtype, x[3].dtype), torch.float32)
        eye = torch.eye(K, dtype=wide, device=q.device).expand(batch, heads, K, K).contiguous()
        out = run((x[0], x[1], x[2].new_zeros(batch, tokens, heads, K), x[3], x[4]), eye, None)
        return out.final_state, out.o

    def pull(x: Tensors, rows: Tensor | None, do: Tensor) -> Tensor:
        # Pᵀ do is the gradient of the initial state in an SSD without decay whose queries are P
        return initial_gradient(cast(Tensor, rows), do, torch.zeros_like(x[3]), impl=options.get("impl"))

    def of(group: HeadGroup) -> Recurrence:
        shape = group.of(v).shape[2], q.shape[3], v.shape[3]
        return Recurrence(
            name, run, lambda x, before: run(x, before, None).final_state, transition, pull, shape, shape[1]
        )

    return _by_head_groups(shard, of, q.shape[3], (q, k, v, g, beta), initial_state, final_states)


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    dt: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    final_states: bool | None = None,
    **options: Any,
) -> ScanOutput:
    """Apply `ops.chunk_ssd`, also to split sequences.

    `initial_state`, `cu_seqlens`, `sequence_shard` and `final_states` are as for `chunk_gated_delta_rule`.
    """
    shard = require_shard("chunk_ssd", sequence_shard, cu_seqlens)
    if shard is None:
        more = {"dt": dt, "scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens, **options}
        return ops.chunk_ssd(q, k, v, g, **more)
    shard.check_local("chunk_ssd", q)
    if by_segments(shard, q):
        x = SSDInputs(q, k, v, g, initial_state, dt, cu_seqlens=None, scale=scale, **{"D": None, **options})
        impl, scale = check_ssd("chunk_ssd", *x)
        if impl != "reference":
            from tokenmix_core.ops.ssd.autograd import needs_widening
            from tokenmix_core.ops.ssd.rank_split import Spans

            if not needs_widening(v, q.shape[3], v.shape[3]):
                rows = [None if t is None else shard.to_rows(t) for t in (q, k, v, g, dt)]
                return split_scan(shard, "chunk_ssd", Spans(scale, impl), [*rows, x.D], initial_state, final_states)

    def of(group: HeadGroup) -> Recurrence:
        own = options if options.get("D") is None else options | {"D": group.of(options["D"], 0)}

        def run(x: Tensors, before: Tensor | None, boundaries: Tensor | None) -> ScanOutput:
            steps = None if dt is None else x[-1]
            more = {"dt": steps, "scale": scale, "initial_state": before, "cu_seqlens": boundaries, **own}
            return ops.chunk_ssd(*x[:4], **more)

        return Recurrence("chunk_ssd", run, state, transition, pull, (group.of(v).shape[2], q.shape[3], v.shape[3]), 1)

    def state(x: Tensors, before: Tensor | None) -> Tensor:
        found = final_state(*x[1:4], dt=None if dt is None else x[4], impl=options.get("impl"))
        return found if before is None else found + transition(x)[0] * before

    def transition(x: Tensors) -> tuple[Tensor, None]:
        return span_decay(x[3])[..., None, None].exp(), None

    def pull(x: Tensors, rows: Tensor | None, do: Tensor) -> Tensor:
        return initial_gradient(x[0], do, x[3], scale, options.get("impl"))

    tensors = (q, k, v, g) if dt is None else (q, k, v, g, dt)
    return _by_head_groups(shard, of, 1, tensors, initial_state, final_states)


def _by_head_groups(
    shard: SequenceShard,
    of: Callable[[HeadGroup], Recurrence],
    width: int,
    tensors: Tensors,
    initial_state: Tensor | None,
    final_states: bool | None,
) -> ScanOutput:
    """Compute a recurrence; large states of one group of heads are gathered while another group computes.

    `of` returns the recurrence of a group of heads. `width` is the number of rows and columns of a transition: K, or 1
    for decays. Queries, keys and values are the first three of `tensors`.
    """
    q, _, v = tensors[:3]
    batch, _, heads, K = q.shape
    state = v.shape[2] * (v.shape[3] * K + width**2)
    sent = (shard.size - 1) * len(shard.local) * batch * state * 4 if shard.crosses else 0
    calls = []
    for group in head_groups(v.shape[2] if heads == 1 else heads, sent):
        before = None if initial_state is None else group.of(initial_state, 1)
        calls.append(split_recurrence(shard, of(group), tuple(group.of(t) for t in tensors), before, final_states))
    outputs, states = zip(*in_turn(calls), strict=True)
    final = None if states[0] is None else _joined(cast("tuple[Tensor, ...]", states), 1)
    return ScanOutput(_joined(outputs, 2), cast(Tensor, final))


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    **options: Any,
) -> ScanOutput:
    """Apply `ops.short_conv`, also to split sequences; these must not have an initial state."""
    shard = require_shard("short_conv", sequence_shard, cu_seqlens)
    if shard is None:
        return ops.short_conv(x, weight, bias, initial_state=initial_state, cu_seqlens=cu_seqlens, **options)
    _refuse_state("short_conv", initial_state)
    (before,) = _tokens_before(shard, [x], weight.shape[1] - 1)
    boundaries = shard.cu_seqlens(x.device)
    out = ops.short_conv(shard.to_rows(x), weight, bias, initial_state=before, cu_seqlens=boundaries, **options)
    return _convolved(shard, out)


def short_convs(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    initial_states: Sequence[Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    **options: Any,
) -> tuple[ScanOutput, ...]:
    """Apply `ops.short_convs`, also to split sequences; these must not have initial states."""
    shard = require_shard("short_convs", sequence_shard, cu_seqlens)
    if shard is None:
        return ops.short_convs(xs, weights, initial_states=initial_states, cu_seqlens=cu_seqlens, **options)
    _refuse_state("short_convs", initial_states)
    before = _tokens_before(shard, xs, weights[0].shape[1] - 1)
    states = None if before[0] is None else cast("list[Tensor]", before)
    rows, boundaries = [shard.to_rows(x) for x in xs], shard.cu_seqlens(xs[0].device)
    found = ops.short_convs(rows, weights, initial_states=states, cu_seqlens=boundaries, **options)
    return tuple(_convolved(shard, out) for out in found)


def _convolved(shard: SequenceShard, out: ScanOutput) -> ScanOutput:
    """Return this rank's outputs; the final states are those of whole rows if the shard keeps them."""
    final = out.final_state
    if shard.keeps_states:
        ends = shard.local[-1].stop == shard.tokens
        last = final[len(shard.local) - 1 :: len(shard.local)]
        final = combined(shard, last if ends else torch.zeros_like(last))
    return ScanOutput(shard.from_rows(out.o), final)


def _refuse_state(name: str, state: Any) -> None:
    if state is not None:
        raise ValueError(f"{name}: split sequences begin without an initial state, so initial_state must be None")


def _tokens_before(shard: SequenceShard, xs: Sequence[Tensor], count: int) -> list[Tensor | None]:
    """For each x, return the `count` inputs before each local row: `[N, D, count]`; None if no document crosses spans.

    The local rows are each row's spans on this rank or, if rows are packed, `shard.parts`. Inputs of other documents
    are replaced by 0.
    """
    shard.check_local("short_conv", xs[0])
    if not shard.crosses:
        return [None for _ in xs]
    found = begin_receive(shard, xs, lambda span: tail_of(span, count), "short_conv", count)()
    before: list[Tensor | None] = []
    for spans in zip(*found, strict=True):
        padded = torch.stack([F.pad(t, (0, 0, count - t.shape[1], 0)).mT for t in spans], 1).flatten(0, 1)
        if shard.packed:
            rows = padded.new_zeros(len(shard.parts), *padded.shape[1:])
            padded = rows.index_copy(0, torch.tensor(shard.heads, device=padded.device), padded)
        before.append(padded.contiguous())
    return before


def tail_of(span: Span, count: int) -> list[Range]:
    """Return the ranges of the last `count` tokens before a span, limited to the document of the span's first token."""
    return [(span.start - min(span.depth, count), span.start)]


def shift_tokens(x: Tensor, *, cu_seqlens: Tensor | None = None, sequence_shard: SequenceShard | None = None) -> Tensor:
    """Return, for each token of `x [B, T, ...]`, the token before it; zero for the first of a row or document."""
    shard = require_shard("shift_tokens", sequence_shard, cu_seqlens)
    shifted = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    if shard is None:
        if cu_seqlens is None:
            return shifted
        firsts = cu_seqlens[:-1].long().clamp(max=x.shape[1] - 1)
        # mark only documents with tokens: an empty last document begins at index T, which no token has
        shifted = torch.where(_marked(x, firsts, cu_seqlens[:-1] < x.shape[1]), torch.zeros_like(x), shifted)
        return ops.without_padding(shifted, cu_seqlens)
    shard.check_local("shift_tokens", x)
    found = receive(shard, x, lambda span: tail_of(span, 1), "shift_tokens", 1)
    starts = torch.tensor([a for a, _ in shard.parts], device=x.device)
    shifted = shifted.index_fill(1, starts, 0)
    for span, before in zip(shard.local, found, strict=True):
        padded = F.pad(before.flatten(2), (0, 0, 1 - before.shape[1], 0)).view(x.shape[0], 1, *x.shape[2:])
        shifted = shifted.index_copy(1, torch.tensor([span.offset], device=x.device), padded)
    return shifted


def _marked(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    mask[index[real]] = True
    return mask.view(1, -1, *[1] * (x.dim() - 2))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    cu_seqlens: Tensor | None = None,
    sequence_shard: SequenceShard | None = None,
    **options: Any,
) -> AttentionOutput:
    """Apply `ops.attention`, also to split sequences; for these it must be causal.

    For its first document, a span receives the earlier keys and values that its queries see: all of them, or those of
    the window and the sinks. Attention is causal, so that no later keys are sent. If there are many keys, those of one
    group of heads travel while the preceding group is computed.
    """
    shard = require_shard("attention", sequence_shard, cu_seqlens)
    options |= {"window": window, "sinks": sinks}
    if shard is None:
        return ops.attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens, **options)
    if not causal:
        raise ValueError("attention: split sequences need causal=True")
    shard.check_local("attention", q)
    if not shard.crosses:
        out = ops.attention(*map(shard.to_rows, (q, k, v)), cu_seqlens=shard.cu_seqlens(q.device), **options)
        return AttentionOutput(*map(shard.from_rows, out))

    def seen(span: Span) -> list[Range]:
        first, near = span.start - span.depth, span.depth if window is None else window - 1
        if near + sinks >= span.depth:
            return [(first, span.start)]
        return [(first, first + sinks), (span.start - near, span.start)]

    key = window, sinks
    sent = requested_tokens(shard, seen, "attention", key) * (k[:, 0].numel() + v[:, 0].numel()) * k.element_size()
    groups = head_groups(k.shape[2], sent)
    arrivals = [begin_receive(shard, [group.of(k), group.of(v)], seen, "attention", key) for group in groups]
    parts = [
        _attend(shard, group.of(q), group.of(k), group.of(v), arrival(), options)
        for group, arrival in zip(groups, arrivals, strict=True)
    ]
    return AttentionOutput(*(_joined(x, 2) for x in zip(*parts, strict=True)))


def _attend(
    shard: SequenceShard, q: Tensor, k: Tensor, v: Tensor, received: list[list[Tensor]], options: dict[str, Any]
) -> AttentionOutput:
    """Return the attention of local queries; `received` has the earlier keys and values of each span."""
    parts: list[AttentionOutput] = []
    for span, (far_k, far_v) in zip(shard.local, received, strict=True):
        first, stop = span.offset, span.offset + span.tokens
        head = first + (span.head or (0 if shard.packed else span.tokens))
        if first < head:
            # keys of the first document: those received from earlier spans, then the span's own ones
            keys, values = torch.cat((far_k, k[:, first:head]), 1), torch.cat((far_v, v[:, first:head]), 1)
            parts.append(ops.attention(q[:, first:head], keys, values, **options))
        if head < stop:
            rest = [x[:, head:stop] for x in (q, k, v)]
            if first == head:
                # make the result depend on the unused received tensor: every rank must take part in the exchange of the
                # backward pass
                rest[1:] = torch.cat((far_k, rest[1]), 1), torch.cat((far_v, rest[2]), 1)
            cuts = [b - head for _, b in shard.parts if head < b <= stop]
            boundaries = torch.tensor([0, *cuts], dtype=torch.int32, device=q.device)
            parts.append(ops.attention(*rest, cu_seqlens=boundaries, **options))
    return AttentionOutput(*(_joined(x, 1) for x in zip(*parts, strict=True)))
