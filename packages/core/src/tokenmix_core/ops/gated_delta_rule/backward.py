"""The backward pass once S and R of all chunks are there: in one step where a device has one, else in two."""

import torch
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops.gated_delta_rule import hopper
from tokenmix_core.ops.gated_delta_rule.backward_chunk import backward_chunk
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.forward import Forward
from tokenmix_core.ops.gated_delta_rule.groups import sum_groups
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, sequences


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, β and, if `initial`, the initial state; what is saved may be overwritten."""
    B, T, H, D = q.shape
    HV, N = v.shape[2], sequences(q, cu_seqlens)
    options = (cu_seqlens, scale, qk_l2norm)
    # only norms of 1 bound what a segment may leave out
    segment = tuning.gated_delta_rule_backward_segment(N, HV, B * T, cu_seqlens is not None) if qk_l2norm else 0
    programs = chunk_slots(B, T, segment or -(-T // CHUNK) * CHUNK, cu_seqlens) * HV
    if do is None or not hopper.gradients_at_once(q, k, do, qk_l2norm=qk_l2norm, programs=programs):
        states = (saved.states, saved.remainders, transitions)
        dv, dstates, ends, dinitial_state = backward_state(
            q, k, inverse, gates, *states, do, dfinal_state, *options, v, initial
        )
        dq, dk, dg, dbeta = backward_chunk(
            q, k, g, beta, gates, do, dv, saved.residual, saved.states, dstates, ends, *options
        )
        return dq, dk, dv, dg, dbeta, dinitial_state

    from tokenmix_core.ops.gated_delta_rule.hopper import backward as on_hopper

    # a program has read a chunk's rows of R when it writes those of dK: one tensor less at the peak of memory
    dq, dk, dv = q.new_empty(B, T, HV, D), saved.residual, torch.empty_like(v)
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    dinitial_state = v.new_empty(N if initial else 0, HV, D, D, dtype=torch.float32)
    on_hopper.backward(
        q, k, g, inverse, gates, saved.states, saved.residual, do, dfinal_state, cu_seqlens, scale, segment,
        transitions if segment else transitions[:0], (dq, dk, dv, dg, dbeta, dinitial_state),
    )  # fmt: skip
    return *sum_groups(dq, dk, H), dv, dg, dbeta, dinitial_state
