"""Chunkwise SSD: one function call per step of the algorithm, which README.md derives.

Forward: the states that enter segments, if sequences are split; then states and outputs of all chunks in one kernel.
Backward: the state before each chunk, and the gradient of the state after it; then all other gradients of each chunk.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.slots import Pool
from tokenmix_core.ops.ssd.forward import ssd_forward
from tokenmix_core.ops.ssd.gradients import backward_scan, ssd_gradients
from tokenmix_core.ops.ssd.plan import plan
from tokenmix_core.ops.ssd.states import boundary_states, segment_states
from tokenmix_core.ops.ssd.types import Gradients, Inputs, token_rows


def chunk_forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return o, the final states, and the states that enter segments (None if sequences are not split)."""
    x, by = inputs.aligned(), plan(inputs.q, inputs.v, inputs.cu_seqlens, inputs.impl)
    if not by.segment:
        # one kernel passes the state from chunk to chunk and computes the outputs
        o, final_state = ssd_forward(x, entering=x.initial_state, segment=0, config=by.forward)
        assert final_state is not None, "whole sequences end in a state"
        zero_padding(x.cu_seqlens, o)
        return o, final_state, None
    # compute the states that enter segments; then scan the chunks of each segment, which also computes outputs
    entering, final_state, _ = segment_states(x, segment=by.segment, config=by.states)
    o, _ = ssd_forward(x, entering=entering, segment=by.segment, config=by.forward)
    zero_padding(x.cu_seqlens, o)
    return o, final_state, entering


def prefill(inputs: Inputs, pool: Pool) -> Tensor:
    """Return o; initial states are read from slots of `pool`, which final states overwrite."""
    x, by = inputs.aligned(), plan(inputs.q, inputs.v, inputs.cu_seqlens, inputs.impl)
    entering = segment_states(x, segment=by.segment, config=by.states, pool=pool)[0] if by.segment else None
    o, _ = ssd_forward(x, entering=entering, segment=by.segment, config=by.forward, pool=pool)
    zero_padding(x.cu_seqlens, o)
    return o


def chunk_backward(
    inputs: Inputs,
    *,
    do: Tensor,
    dfinal_state: Tensor | None,
    entering: Tensor | None,
    dleaving: Tensor | None = None,
    segment: int | None = None,
) -> Gradients:
    """Return all gradients; `entering` are the states that enter segments, or None to compute these again.

    With `dleaving`, the gradients of the states that leave segments of `segment` tokens, `dfinal_state` is not read,
    and the initial states' gradient is None.
    """
    fused = plan(inputs.q, inputs.v, inputs.cu_seqlens, inputs.impl).gradients.hopper is not None
    composed = not fused and not (inputs.dt is None and inputs.D is None)
    backward = _composed_backward if composed else _backward
    grads = backward(inputs, do=do, dfinal_state=dfinal_state, entering=entering, dleaving=dleaving, segment=segment)
    zero_padding(inputs.cu_seqlens, *grads[:4], grads.dt)
    return grads


def _backward(
    inputs: Inputs,
    *,
    do: Tensor,
    dfinal_state: Tensor | None,
    entering: Tensor | None,
    dleaving: Tensor | None,
    segment: int | None,
) -> Gradients:
    """Return all gradients; only fused (Gluon) kernels accept Δ and D."""
    by = plan(inputs.q, inputs.v, inputs.cu_seqlens, inputs.impl)
    fused = by.gradients.hopper is not None
    # if sequences are split, compute the gradients of the states that leave segments, unless `dleaving` gives them
    x, do = inputs.aligned(), token_rows(do)
    segment = by.segment if segment is None else segment
    dinitial_state = None
    if not segment:
        entering, dleaving = x.initial_state, aligned(dfinal_state)
    elif dleaving is None:
        dleaving = aligned(dfinal_state)
        if entering is None:
            entering = segment_states(x, segment=segment, config=by.states)[0]
        dleaving, dinitial_state, _ = segment_states(x, segment=segment, config=by.states, do=do, dfinal_state=dleaving)
    # compute states before chunks and, unless the fused reverse scan does so itself, gradients of states after chunks
    scans = fused and by.gradients.scans
    states, dstates, dinitial_of_whole = boundary_states(
        x, do=do, entering=entering, dleaving=dleaving, segment=segment, config=by.states, with_gradients=not scans
    )
    # compute all other gradients, for each chunk
    if scans:
        grads = backward_scan(x, do=do, states=states, dleaving=dleaving, segment=segment)
        dinitial_of_whole = grads.initial_state
    else:
        grads = ssd_gradients(x, do=do, states=states, dstates=dstates, config=by.gradients)
    return grads._replace(initial_state=dinitial_state if segment else dinitial_of_whole)


def _composed_backward(inputs: Inputs, *, do: Tensor, **states: Any) -> Gradients:
    """Return all gradients by kernels that lack Δ and D: scale v by Δ beforehand, add the terms of D afterwards."""
    v, dt, D = inputs.v, inputs.dt, inputs.D
    scaled = v if dt is None else (v * dt.unsqueeze(-1)).to(v.dtype)
    grads = _backward(inputs._replace(v=scaled, dt=None, D=None), do=do, **states)
    dv, ddt, dD = grads.v.float(), None, None
    if dt is not None:
        ddt = (dv * v).sum(-1).to(dt.dtype)
        dv = dv * dt.unsqueeze(-1)
    if D is not None:
        of_skip = (do.float() * v).contiguous()
        zero_padding(inputs.cu_seqlens, of_skip)
        dD = of_skip.sum((0, 1, 3)).to(D.dtype)
        dv = dv + do * D.unsqueeze(-1)
    return grads._replace(v=dv.to(v.dtype), dt=ddt, D=dD)
