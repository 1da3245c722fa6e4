"""The chunkwise gated delta rule: one function call per step of the algorithm; README.md derives it and its letters.

Forward: gates and Ã of each chunk; the states that enter segments; then the scan over chunks, with the outputs.
Backward: the forward scan again for residuals R and chunk states S unless they are saved; the reverse scan for dV and
dS; then dQ, dK, dg and dβ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.buffers import aligned, buffer_bytes, buffer_views
from tokenmix_core.ops.gated_delta_rule import head_split
from tokenmix_core.ops.gated_delta_rule.backward_chunk import backward_chunk
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, split_values, state_layouts, term_layouts
from tokenmix_core.ops.gated_delta_rule.forward import empty_saved, forward
from tokenmix_core.ops.gated_delta_rule.gqa_reduce import sum_groups
from tokenmix_core.ops.gated_delta_rule.plan import head_parts, plan
from tokenmix_core.ops.gated_delta_rule.prepare import prepare
from tokenmix_core.ops.gated_delta_rule.sequence_split import segment_states
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs, Reverse, Saved, Terms
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.slots import Pool


class Forward(NamedTuple):
    """Results of the forward pass, and the tensors that the backward pass needs.

    `buffer` is one allocation for Ã, the gates and, if they are small, the residuals R and the chunk states; None if
    nothing is saved.
    """

    o: Tensor
    final_state: Tensor
    terms: Terms
    buffer: Tensor | None


def chunk_forward(
    inputs: Inputs, save: bool = False, pool: Pool | None = None, prepared: tuple[Tensor, Tensor] | None = None
) -> Forward:
    """Compute outputs and final states; with `save` also store the tensors for the backward pass in one buffer.

    With `pool`, initial states are read from its slots, which the final states overwrite: `final_state` is then None.
    `prepared` are Ã and the gates, if they are known.
    """
    x, parts = head_split.split_heads(inputs.aligned())
    by = plan(x.k, x.v, x.cu_seqlens, x.qk_l2norm, x.impl, others=(x.q,), chunks_per_write=x.chunks_per_write)
    buffer, term_tensors, saved = _saving_buffer(x, by.saves_states) if save else (None, None, None)

    # within each chunk: cumulative log2 decays b, β r, r (inverse key norms), β, and Ã = (I + L̃)⁻¹
    inverse, gates = prepared or prepare(
        k=x.k, g=x.g, beta=x.beta, cu_seqlens=x.cu_seqlens, qk_l2norm=x.qk_l2norm, form=by.prepare, out=term_tensors
    )
    # compute the states that enter segments
    entering, transitions = segment_states(x, inverse=inverse, gates=gates, segment=by.segment, pool=pool)
    # scan: pass the state from chunk to chunk, and compute each chunk's outputs
    terms = Terms(inverse, gates, entering, transitions)
    o, final_state = forward(x, terms, segment=by.segment, form=by.outputs, saved=saved, pool=pool)

    o, final_state = head_split.join_outputs(o, final_state, parts)
    zero_padding(x.cu_seqlens, o)
    return Forward(o, final_state, terms, buffer)


def chunk_backward(
    inputs: Inputs,
    *,
    inverse: Tensor,
    gates: Tensor,
    segments: tuple[Tensor | None, Tensor | None] | None,
    saved: Saved | None,
    do: Tensor | None,
    dfinal_state: Tensor | None,
) -> Gradients:
    """Compute the gradients of a call's arguments from the gradients of its results.

    Args:
        inverse, gates: Ã and the gates, from the forward pass.
        segments: the states that enter segments, and the segments' transition matrices; None to compute both again.
        saved: the residuals R and the chunk states; None to compute both again.
        do, dfinal_state: gradients of outputs and final states; None for zero.
    """
    x, parts = head_split.split_heads(inputs.aligned())
    do, dfinal_state = head_split.split_output_gradients(aligned(do), aligned(dfinal_state), parts)
    by = plan(
        x.k, x.v, x.cu_seqlens, x.qk_l2norm, x.impl, others=(x.q, do), has_do=do is not None,
        chunks_per_write=x.chunks_per_write,
    )  # fmt: skip

    # unless R and the chunk states are saved, run the forward scan again
    entering, transitions = segments or segment_states(x, inverse=inverse, gates=gates, segment=by.segment)
    recompute = saved is None or (by.remainders and saved.remainders is None)
    if recompute:
        terms, saved = Terms(inverse, gates, entering, transitions), empty_saved(x, by.remainders)
        forward(x, terms, segment=by.segment, form=by.states, output=False, saved=saved)

    # the reverse scan computes dV and the gradients dS' of chunk states; then dQ, dK, dg and dβ follow for each chunk
    terms = Terms(inverse, gates, entering, transitions if by.backward_segment else None)
    segment = by.backward_segment or cdiv(x.q.shape[1], CHUNK) * CHUNK
    reverse = Reverse(x=x, terms=terms, saved=saved, do=do, dfinal_state=dfinal_state, segment=segment)
    if by.fused_backward:
        grads = _backward_fused(reverse, may_overwrite=recompute)
    else:
        of_states = backward_state(reverse, form=by.backward_state)
        grads = backward_chunk(reverse, of_states, may_overwrite=recompute, form=by.backward_chunk)

    dq, dk = sum_groups(grads.q, grads.k, x.q.shape[2])
    grads = head_split.join_gradients(grads._replace(q=dq, k=dk), parts)
    zero_padding(x.cu_seqlens, *grads[:5])
    return grads


def _backward_fused(reverse: Reverse, may_overwrite: bool) -> Gradients:
    """Compute all gradients in one Hopper kernel; if `may_overwrite`, dK is written over the saved residuals R."""
    from tokenmix_core.ops.gated_delta_rule.hopper import backward as on_hopper

    x, residual = reverse.x, reverse.saved.residual
    B, T, _, D = x.q.shape
    grads = Gradients(
        q=x.q.new_empty(B, T, x.v.shape[2], D),
        # dK takes the memory of R, for a lower peak: a program reads a chunk's rows of R before it writes these rows
        # of dK
        k=residual if may_overwrite else torch.empty_like(residual),
        v=torch.empty_like(x.v),
        g=torch.empty_like(x.g),
        beta=torch.empty_like(x.beta),
        initial_state=None if x.initial_state is None else torch.empty_like(x.initial_state),
        writes=None,
    )
    on_hopper.backward(reverse, grads)
    return grads


def _saving_buffer(x: Inputs, saves_states: bool) -> tuple[Tensor, tuple[Tensor, Tensor], Saved | None]:
    """Allocate the buffer of `Forward`; return it, its views for Ã and the gates, and those for R and chunk states.

    R and chunk states are None unless `saves_states`.
    """
    layouts = term_layouts(x.k, x.v.shape[2])
    if saves_states:
        layouts += state_layouts(x.k, x.v, x.cu_seqlens)
    buffer = x.k.new_empty(buffer_bytes(layouts), dtype=torch.uint8)
    inverse, gates, *states = buffer_views(buffer, layouts)
    return buffer, (inverse, gates), Saved(*states) if states else None


def read_buffer(inputs: Inputs, buffer: Tensor) -> tuple[Tensor, Tensor, Saved | None]:
    """Return views of the buffer of `Forward`: Ã, the gates, and R with the chunk states (None if not saved)."""
    v = split_values(inputs.v, head_parts(inputs.k, inputs.v, inputs.impl, inputs.chunks_per_write))
    layouts = term_layouts(inputs.k, v.shape[2])
    if len(buffer) > buffer_bytes(layouts):
        layouts += state_layouts(inputs.k, v, inputs.cu_seqlens)
    inverse, gates, *states = buffer_views(buffer, layouts)
    return inverse, gates, Saved(*states) if states else None
