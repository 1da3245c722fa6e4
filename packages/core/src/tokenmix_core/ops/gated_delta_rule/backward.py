"""The backward pass once S and R of all chunks are there: in one step where a device has one, else in two."""

import torch
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import cdiv, chunk_slots, num_sequences
from tokenmix_core.ops.gated_delta_rule import hopper
from tokenmix_core.ops.gated_delta_rule.backward_chunk import backward_chunk
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.forward import Forward
from tokenmix_core.ops.gated_delta_rule.groups import sum_groups
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, walks


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverse: Tensor,
    gates: Tensor,
    transitions: Tensor,
    saved: Forward,
    do: Tensor | None,
    dfinal_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    initial: bool,
    spare: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, β and, if `initial`, the initial state; what is saved may be overwritten if `spare`."""
    B, T, H, D = q.shape
    HV, N = v.shape[2], num_sequences(q, cu_seqlens)
    segment = 0
    # only norms of 1 bound what a segment may leave out
    if qk_l2norm:
        packed = cu_seqlens is not None
        segment = tuning.gated_delta_rule_backward_segment(N, HV, B * T, packed, walks(k, v))
    transitions = transitions if segment else transitions[:0]
    segment = segment or cdiv(T, CHUNK) * CHUNK
    programs = chunk_slots(B, T, segment, cu_seqlens) * HV
    options = (cu_seqlens, scale, qk_l2norm)
    if do is None or not hopper.gradients_at_once(q, k, do, qk_l2norm=qk_l2norm, programs=programs):
        states = (saved.states, saved.remainders, transitions)
        dv, dstates, ends, dinitial_state = backward_state(
            q, k, inverse, gates, *states, do, dfinal_state, *options, segment, v, initial
        )
        dq, dk, dg, dbeta = backward_chunk(
            q, k, g, beta, gates, do, dv, saved.residual, saved.states, dstates, ends, *options, spare
        )
        return dq, dk, dv, dg, dbeta, dinitial_state

    from tokenmix_core.ops.gated_delta_rule.hopper.backward import backward as at_once
    from tokenmix_core.ops.gated_delta_rule.hopper.backward_state import Reverse

    # a program has read a chunk's rows of R when it writes those of dK: one tensor less at the peak of memory
    dk = saved.residual if spare else torch.empty_like(saved.residual)
    dq, dv = q.new_empty(B, T, HV, D), torch.empty_like(v)
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    dinitial_state = v.new_empty(N if initial else 0, HV, D, D, dtype=torch.float32)
    reverse = Reverse(q, k, inverse, gates, saved.states, do, dfinal_state, *options, segment)
    at_once(reverse, g, saved.residual, transitions, (dq, dk, dv, dg, dbeta, dinitial_state))
    return *sum_groups(dq, dk, H), dv, dg, dbeta, dinitial_state
