"""The gated delta rule's kernels on split rows: the end of a rank's tokens is one more boundary of their segments.

Each rank cuts its spans into rows and computes their maps S' = M S + L once (`ops.gated_delta_rule.rank_split`). Scans
over the rows give the span's map, which the ranks gather, and then the state that enters each row. The outputs are
computed once. The backward pass does the same with gradients. `recurrence.py` has the maps between ranks, and computes
packed rows and the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.ops.gated_delta_rule import head_split
from tokenmix_core.ops.gated_delta_rule.api import check_scan
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs
from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.parallel.exchange import Label, begin_gather, combined
from tokenmix_core.parallel.recurrence import entering_states, leaving_gradients
from tokenmix_core.parallel.shard import SequenceShard

NAME = "chunk_gated_delta_rule"


def kernel_inputs(shard: SequenceShard, x: Inputs) -> Inputs | None:
    """Return the arguments for `split_by_kernels` if kernels compute x in rows of whole chunks, else None.

    This holds for calls in eager mode that the reference does not compute, with unpacked rows and spans of a multiple
    of 64 tokens. All ranks decide alike.

    Raises:
        ValueError: the arguments do not fit.
    """
    shard.check_local(NAME, x.q)
    if shard.packed or not shard.crosses or shard.local[0].tokens % CHUNK or not is_plain(x.q):
        return None
    impl, scale = check_scan(NAME, *x)
    return None if impl == "reference" else x._replace(impl=impl, scale=scale)


def split_by_kernels(shard: SequenceShard, x: Inputs, final_states: bool | None) -> ScanOutput:
    """Return this rank's outputs and, if `final_states`, the final states of all rows (else None)."""
    wanted = shard.keeps_states if final_states is None else final_states
    tensors = [shard.to_rows(t) for t in x[:5]]
    o, final = _Split.apply(shard, (shard.layer, NAME), x[6:], wanted, x.initial_state, *tensors)
    return ScanOutput(shard.from_rows(o), combined(shard, final) if wanted else final)


def _by_span(x: Tensor, shard: SequenceShard) -> Tensor:
    """Return states of local spans `[B · spans, ...]` as `[spans, B, ...]`, which the ranks gather."""
    return x.unflatten(0, (-1, len(shard.local))).transpose(0, 1)


def _of_spans(states: list[Tensor]) -> Tensor:
    """Undo `_by_span`, given one tensor `[B, ...]` per span."""
    return torch.stack(states, 1).flatten(0, 1)


def _only(shard: SequenceShard, states: Tensor | None, span: int, like: Tensor) -> Tensor | None:
    """Return `states [B, ...]` for one local span and zero for all others, in float32; None if `states` are."""
    if states is None:
        return None
    found = like.new_zeros(len(states), len(shard.local), *states.shape[1:])
    found[:, span] = states
    return found.flatten(0, 1)


class _Split(torch.autograd.Function):
    """Outputs of this rank's spans; `final` has final states on the rank of the last span, and is zero on others."""

    @staticmethod
    def forward(ctx: Any, shard: SequenceShard, label: Label, options: tuple, wanted: bool, initial_state, *tensors):
        from tokenmix_core.ops.gated_delta_rule import rank_split

        x, parts = head_split.split_heads(Inputs(*tensors, initial_state, *options).aligned())
        rows = rank_split.rows_per_span(x)
        before, x = x.initial_state, _rows(x, rows)
        maps = rank_split.RowMaps(*rank_split.row_maps(*x))
        V = x.v.shape[-1]
        # the first span's L starts from the initial state; no other rank applies its M
        begins = shard.local[0].depth == 0
        initial = _only(shard, before, 0, maps.states) if begins else None
        _, composed = rank_split.scan_rows(maps, maps.states, initial, rows, compose=True)
        gathered = begin_gather(shard, _by_span(composed, shard), label)()
        transitions, states = gathered[..., V:], gathered[..., :V]
        entering = _of_spans(entering_states(shard, transitions, states))
        if initial is not None:
            entering = entering + initial
        entering, after = rank_split.scan_rows(maps, maps.states, entering, rows)
        o = rank_split.row_outputs(maps.inverse, maps.gates, *x._replace(initial_state=entering))
        ctx.shard, ctx.label, ctx.options, ctx.shape = shard, label, (options, parts, rows), tensors[2].shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*x[:5], entering, *maps[:3], maps.carries, transitions)
        o, final = head_split.join_outputs(o, after[len(shard.local) - 1 :: len(shard.local)], parts)
        if shard.local[-1].stop != shard.tokens:
            final = torch.zeros_like(final)
        return o.view(ctx.shape), final if wanted else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None):
        from tokenmix_core.ops.gated_delta_rule import rank_split
        from tokenmix_core.ops.gated_delta_rule.autograd import backward_op

        shard, (options, parts, rows) = ctx.shard, ctx.options
        *tensors, entering, inverse, gates, m, carries, transitions = ctx.saved_tensors
        maps = rank_split.RowMaps(inverse, gates, m, entering, carries)
        do = tensors[2].new_zeros(ctx.shape) if do is None else do
        do, dfinal = head_split.split_output_gradients(do.contiguous(), dfinal, parts)
        do = do.view(tensors[2].shape)
        x = Inputs(*tensors, entering, *options)
        local = rank_split.local_gradients(do, inverse, gates, *x)
        ends = shard.local[-1].stop == shard.tokens
        after = _only(shard, dfinal, len(shard.local) - 1, local) if ends else None
        _, composed = rank_split.scan_rows(maps, local, after, rows, reverse=True)
        layer, name = ctx.label
        gathered = begin_gather(shard, _by_span(composed, shard), (layer, f"{name}, backward"))()
        leaving = _of_spans(leaving_gradients(shard, transitions, gathered))
        if after is not None:
            leaving = leaving + after
        leaving, before = rank_split.scan_rows(maps, local, leaving, rows, reverse=True)
        grads = Gradients(*backward_op(do, leaving, inverse, gates, *x)[:5], None, None)
        if ctx.needs_input_grad[4]:
            first = before[:: len(shard.local)]
            grads = grads._replace(initial_state=first if shard.local[0].depth == 0 else torch.zeros_like(first))
        grads = head_split.join_gradients(grads, parts)
        spans = [t.view(ctx.shape[0], -1, *t.shape[2:]) for t in grads[:5]]
        return None, None, None, None, grads.initial_state, *spans


def _rows(x: Inputs, rows: int) -> Inputs:
    """Cut each sequence into `rows` sequences, without initial states."""
    cut = (t.unflatten(1, (rows, -1)).flatten(0, 1) for t in x[:5])
    return Inputs(*cut, None, *x[6:])
