"""One rank's share of sequences that are split over ranks: states, outputs and gradients of its spans.

The states that enter a span's segments, and the gradients of those that leave them, are linear: they are first computed
for zero at the span's boundary. The contribution of the state that arrives from other ranks, which only decays, is
added later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import of_fields, retried
from tokenmix_core.ops.ssd.chunk import chunk_backward
from tokenmix_core.ops.ssd.forward import ssd_forward
from tokenmix_core.ops.ssd.plan import plan
from tokenmix_core.ops.ssd.states import segment_states
from tokenmix_core.ops.ssd.types import Gradients, Inputs, token_rows

Tensors = tuple[Any, ...]


class ForwardInputs(NamedTuple):
    """The states that enter segments, then the call's arguments."""

    entering: Tensor
    inputs: Inputs


class LocalInputs(NamedTuple):
    """The gradient of the outputs, then the call's arguments."""

    do: Tensor
    inputs: Inputs


class BackwardInputs(NamedTuple):
    """Gradients of outputs and of the states that leave segments, the states that enter them, then the arguments."""

    do: Tensor
    dleaving: Tensor
    entering: Tensor
    inputs: Inputs


def segment_tokens(x: Inputs) -> int:
    """Return the number of tokens of a segment; a sequence that the operation does not split is one segment."""
    return plan(x.q, x.v, None, x.impl).segment or next_power_of_2(x.q.shape[1])


@retried
@Replayed
@of_fields
def span_states(x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states that enter segments, and those after spans, both from zero; and the segments' decays."""
    return segment_states(x.aligned(), segment=segment_tokens(x), config=plan(x.q, x.v, None, x.impl).states)


@retried
@Replayed
@of_fields
def span_outputs(given: ForwardInputs) -> Tensor:
    """Return the outputs."""
    x = given.inputs
    config = plan(x.q, x.v, None, x.impl).forward
    return ssd_forward(x.aligned(), entering=given.entering, segment=segment_tokens(x), config=config)[0]


@retried
@Replayed
@of_fields
def span_gradients(given: LocalInputs) -> tuple[Tensor, Tensor]:
    """Return gradients of the states that leave segments, and of those before spans; both for zero after spans."""
    x, config = given.inputs, plan(given.inputs.q, given.inputs.v, None, given.inputs.impl).states
    return segment_states(x.aligned(), segment=segment_tokens(x), config=config, do=token_rows(given.do))[:2]


@retried
@Replayed
@of_fields
def token_gradients(given: BackwardInputs) -> Gradients:
    """Return all gradients but those of the states before spans."""
    do, dleaving, entering, x = given
    return chunk_backward(x, do=do, dfinal_state=None, entering=entering, dleaving=dleaving, segment=segment_tokens(x))


class Spans:
    """SSD of a rank's spans: the `parallel.kernel_scans.SpanScan` of one call."""

    def __init__(self, scale: float, impl: str | None):
        self.scale, self.impl, self.shape = scale, impl, torch.Size()

    def _inputs(self, tensors: Sequence[Any]) -> Inputs:
        q, k, v, g, dt, D = tensors
        return Inputs(q, k, v, g, None, dt, D, None, self.scale, self.impl)

    def split_states(self, states: Tensor) -> Tensor:
        """Return the states unchanged: kernels take all heads."""
        return states

    join_states = split_states

    def maps(self, tensors: Tensors, initial: Tensor | None) -> tuple[Tensors, Tensor]:
        """Return tensors to save, and M and L of each span in one tensor; L starts from `initial`."""
        entering, after, totals = span_states(*self._inputs(tensors))
        decays = totals.unflatten(0, (len(after), -1)).cumsum(1)
        through = decays[:, -1, :, None, None].exp2()
        # log2 of the decays from a span's start to each segment, and from each segment's end to that of the span
        bounds = decays - totals.view_as(decays), decays[:, -1:] - decays
        factors = [b.exp2()[..., None, None] for b in bounds]
        local = after if initial is None else after + through * initial
        self.shape = local.shape[2:]
        return (*tensors, entering, after, through, *factors), torch.cat((local.flatten(2), through.flatten(2)), -1)

    def unpacked(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """Return M and L of all spans' maps S' = M S + L, from the gathered tensors of `maps`."""
        return gathered[..., -1:].unsqueeze(-1), gathered[..., :-1].unflatten(-1, self.shape)

    def outputs(self, saved: Tensors, entering: Tensor) -> tuple[Tensor, Tensor, Tensors]:
        """Return outputs, the states after spans, and the tensors to save, from the states that enter spans."""
        *tensors, within, after, through, to, since = saved
        states = _added(within, to, entering)
        o = span_outputs(states, *self._inputs(tensors))
        return o, after + through * entering, (*tensors, states, through, since)

    def local_gradients(self, saved: Sequence[Any], do: Tensor, after: Tensor | None) -> tuple[Tensors, Tensor]:
        """Return tensors for `gradients`, and the gradient of the state before each span.

        `after` are gradients of the states after spans; None for zero.
        """
        *tensors, _, through, _ = saved
        leaving, before = span_gradients(do, *self._inputs(tensors))
        return (do, leaving, before), before if after is None else before + through * after

    def recomputed(self, saved: Sequence[Any], kept: Tensors) -> Tensors:
        """Return `kept`: one kernel computes chunk states and their gradients."""
        return kept

    def gradients(self, saved: Sequence[Any], kept: Tensors, leaving: Tensor) -> tuple[Tensors, Tensor]:
        """Return the gradients of the tensors of `maps`, and of the states before spans.

        `leaving` are the complete gradients of the states after spans.
        """
        (*tensors, entering, through, since), (do, within, before) = saved, kept
        grads = Gradients(*token_gradients(do, _added(within, since, leaving), entering, *self._inputs(tensors)))
        return (*grads[:4], grads.dt, grads.D), before + through * leaving


def _added(within: Tensor, factors: Tensor, states: Tensor) -> Tensor:
    """Return `within [segments, ...]` plus the states of spans, `[spans, ...]`, times the decay of each segment."""
    return (within.unflatten(0, (len(states), -1)) + factors * states.unsqueeze(1)).flatten(0, 1)
