"""Recurrences computed by kernels on split rows: the boundary between ranks is one more boundary between segments.

Kernels cut long sequences into segments, whose maps S' = M S + L they compose. A rank does so with its spans: it
computes the maps of their segments once, composes them into the span's map, which all ranks gather, and applies them to
the state that arrives. Its outputs are computed once. The backward pass does the same with gradients. `recurrence.py`
has the maps between ranks; it also computes packed rows, and what the reference computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.parallel.exchange import Label, begin_gather, combined
from tokenmix_core.parallel.recurrence import Tensors, entering_states, leaving_gradients
from tokenmix_core.parallel.shard import SequenceShard


class SpanScan(Protocol):
    """The kernels of one call on a rank's spans. States and their gradients are float32 `[B · spans, HV, K, V]`."""

    def split_states(self, states: Tensor) -> Tensor:
        """Return states with the heads that kernels take, as all other methods take and return them."""
        ...

    def join_states(self, states: Tensor) -> Tensor:
        """Undo `split_states`."""
        ...

    def maps(self, tensors: Any, initial: Tensor | None) -> tuple[Tensors, Tensor]:
        """Return tensors to save, and M and L of each span in one tensor `[B · spans, ...]`.

        L starts from `initial`, the states before spans; None for zero.
        """
        ...

    def unpacked(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return M and L of all spans `[spans, B, ...]`, from the tensors of `maps`."""
        ...

    def outputs(self, saved: Tensors, entering: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        """Return outputs, the states after spans, and the tensors to save, from the states that enter spans."""
        ...

    def local_gradients(self, saved: Sequence[Tensor], do: Tensor, after: Tensor | None) -> tuple[Tensors, Tensor]:
        """Return tensors for `gradients`, and the gradient of the state before each span.

        `after` are gradients of the states after spans; None for zero.
        """
        ...

    def recomputed(self, saved: Sequence[Tensor], kept: Tensors) -> Tensors:
        """Return `kept` with tensors that need no gradient of later spans; this runs while gradients travel."""
        ...

    def gradients(self, saved: Sequence[Tensor], kept: Tensors, leaving: Tensor) -> tuple[Sequence[Any], Tensor]:
        """Return the gradients of the tensors of `maps`, and of the states before spans.

        `leaving` are the complete gradients of the states after spans.
        """
        ...


def by_segments(shard: SequenceShard, x: Tensor) -> bool:
    """True if kernels may compute a call with `x` by `split_scan`: unpacked rows that cross ranks, in eager mode."""
    return shard.crosses and not shard.packed and is_plain(x)


def split_scan(
    shard: SequenceShard,
    name: str,
    scan: SpanScan,
    tensors: Iterable[Tensor | None],
    initial_state: Tensor | None,
    final_states: bool | None,
) -> ScanOutput:
    """Return this rank's outputs and, if `final_states`, the final states of all rows (else None).

    `tensors` are the arguments of `scan.maps`, with the spans as rows (`SequenceShard.to_rows`); v is the third.
    """
    wanted = shard.keeps_states if final_states is None else final_states
    o, final = _Split.apply(shard, (shard.layer, name), scan, wanted, initial_state, *tensors)
    return ScanOutput(shard.from_rows(o), combined(shard, final) if wanted else final)


def _by_span(shard: SequenceShard, x: Tensor) -> Tensor:
    """Return `x [B · spans, ...]` as `[spans, B, ...]`, which the ranks gather."""
    return x.unsqueeze(0) if len(shard.local) == 1 else x.unflatten(0, (-1, len(shard.local))).transpose(0, 1)


def _of_spans(states: list[Tensor]) -> Tensor:
    """Undo `_by_span`, given one tensor `[B, ...]` per span."""
    return states[0] if len(states) == 1 else torch.stack(states, 1).flatten(0, 1)


def _only(shard: SequenceShard, states: Tensor, span: int) -> Tensor:
    """Return `states [B, ...]` for one local span and zero for the others."""
    if len(shard.local) == 1:
        return states
    zero = torch.zeros_like(states)
    return _of_spans([states if i == span else zero for i in range(len(shard.local))])


class _Split(torch.autograd.Function):
    """Return this rank's outputs and final states; the latter are zero, except on the rank of the last span."""

    @staticmethod
    def forward(ctx: Any, shard: SequenceShard, label: Label, scan: SpanScan, wanted: bool, initial_state, *tensors):
        # the first span starts from the initial states
        begins = shard.local[0].depth == 0
        initial = None
        if begins and initial_state is not None:
            initial = _only(shard, scan.split_states(initial_state.float()), 0).contiguous()
        saved, found = scan.maps(tensors, initial)
        m, local = scan.unpacked(begin_gather(shard, _by_span(shard, found), label)())
        entering = _of_spans(entering_states(shard, m, local)).contiguous()
        o, after, saved = scan.outputs(saved, entering if initial is None else entering + initial)
        ctx.shard, ctx.label, ctx.scan = shard, label, scan
        ctx.shapes = [None if t is None else t.shape for t in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(m, *saved)
        o = o.view(tensors[2].shape)
        if not wanted:
            return o, None
        ends = shard.local[-1].stop == shard.tokens
        final = scan.join_states(after[len(shard.local) - 1 :: len(shard.local)])
        return o, final.clone() if ends else torch.zeros_like(final)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None):
        shard, (m, *saved) = ctx.shard, ctx.saved_tensors
        do = m.new_zeros(ctx.shapes[2], dtype=saved[2].dtype) if do is None else do.contiguous()
        ends = shard.local[-1].stop == shard.tokens
        after = None
        if ends and dfinal is not None:
            after = _only(shard, ctx.scan.split_states(dfinal), len(shard.local) - 1).contiguous()
        kept, local = ctx.scan.local_gradients(saved, do, after)
        layer, name = ctx.label
        arriving = begin_gather(shard, _by_span(shard, local), (layer, f"{name}, backward"))
        kept = ctx.scan.recomputed(saved, kept)
        leaving = _of_spans(leaving_gradients(shard, m, arriving())).contiguous()
        grads, before = ctx.scan.gradients(saved, kept, leaving if after is None else leaving + after)
        found = [None if x is None else x.view(shape) for x, shape in zip(grads, ctx.shapes, strict=True)]
        dinitial = None
        if ctx.needs_input_grad[4]:
            first = ctx.scan.join_states(before[:: len(shard.local)]).contiguous()
            dinitial = first if shard.local[0].depth == 0 else torch.zeros_like(first)
        return None, None, None, None, dinitial, *found
