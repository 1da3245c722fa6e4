"""The backward pass once S and R of all chunks are there: in one step where a device has one, else in two."""

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv, num_sequences
from tokenmix_core.ops.gated_delta_rule.backward_chunk import backward_chunk
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.forward import Forward
from tokenmix_core.ops.gated_delta_rule.groups import sum_groups
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, Writes
from tokenmix_core.ops.gated_delta_rule.plan import GDNPlan


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverse: Tensor,
    gates: Tensor,
    writes: Writes,
    transitions: Tensor,
    saved: Forward,
    do: Tensor | None,
    dfinal_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    initial: bool,
    spare: bool,
    plan: GDNPlan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of q, k, v, g, β, of the factors of writes and, if `initial`, of the initial state.

    What is saved may be overwritten if `spare`.
    """
    B, T, H, D = q.shape
    HV, N = v.shape[2], num_sequences(q, cu_seqlens)
    transitions = transitions if plan.reverse_segment else transitions[:0]
    segment = plan.reverse_segment or cdiv(T, CHUNK) * CHUNK
    options = (cu_seqlens, scale, qk_l2norm)
    if do is None or not plan.at_once:
        states = (saved.residual, saved.states, saved.remainders, transitions)
        dv, dstates, ends, of_runs, dinitial_state = backward_state(
            q, k, inverse, gates, writes, *states, do, dfinal_state, *options, segment, v, initial, plan.reverse
        )
        parts = (saved.residual, saved.states, dstates, ends, of_runs)
        dq, dk, dg, dbeta, dfactors = backward_chunk(
            q, k, g, beta, gates, writes, do, dv, *parts, *options, spare, plan.chunks
        )
        return dq, dk, dv, dg, dbeta, dfactors, dinitial_state

    from tokenmix_core.ops.gated_delta_rule.hopper.backward import backward as at_once
    from tokenmix_core.ops.gated_delta_rule.hopper.backward_state import Reverse

    # a program has read a chunk's rows of R when it writes those of dK: one tensor less at the peak of memory
    dk = saved.residual if spare else torch.empty_like(saved.residual)
    dq, dv = q.new_empty(B, T, HV, D), torch.empty_like(v)
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    dinitial_state = v.new_empty(N if initial else 0, HV, D, D, dtype=torch.float32)
    reverse = Reverse(q, k, inverse, gates, saved.states, do, dfinal_state, *options, segment)
    at_once(reverse, g, saved.residual, transitions, (dq, dk, dv, dg, dbeta, dinitial_state))
    return *sum_groups(dq, dk, H), dv, dg, dbeta, None, dinitial_state
