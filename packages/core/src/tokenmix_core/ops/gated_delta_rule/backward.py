"""The backward pass once S and R of all chunks are there: in one step where a device has one, else in two."""

import torch
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.ops.gated_delta_rule.backward_chunk import backward_chunk
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.gqa_reduce import sum_groups
from tokenmix_core.ops.gated_delta_rule.plan import GDNPlan
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs, Reverse, Saved, Terms


def backward(
    x: Inputs,
    terms: Terms,
    saved: Saved,
    *,
    do: Tensor | None,
    dfinal_state: Tensor | None,
    spare: bool,
    plan: GDNPlan,
) -> Gradients:
    """The gradients of a call; what is saved may be overwritten if `spare`."""
    if not plan.reverse_segment:
        terms = terms._replace(transitions=None)
    segment = plan.reverse_segment or cdiv(x.q.shape[1], CHUNK) * CHUNK
    reverse = Reverse(x=x, terms=terms, saved=saved, do=do, dfinal_state=dfinal_state, segment=segment)
    if do is None or not plan.at_once:
        of_states = backward_state(reverse, form=plan.reverse)
        return backward_chunk(reverse, of_states, spare=spare, form=plan.chunks)

    from tokenmix_core.ops.gated_delta_rule.hopper.backward import backward as at_once

    B, T, H, D = x.q.shape
    grads = Gradients(
        q=x.q.new_empty(B, T, x.v.shape[2], D),
        # a program has read a chunk's rows of R when it writes those of dK: one tensor less at the peak of memory
        k=saved.residual if spare else torch.empty_like(saved.residual),
        v=torch.empty_like(x.v),
        g=torch.empty_like(x.g),
        beta=torch.empty_like(x.beta),
        initial_state=None if x.initial_state is None else torch.empty_like(x.initial_state),
        writes=None,
    )
    at_once(reverse, grads)
    dq, dk = sum_groups(grads.q, grads.k, H)
    return grads._replace(q=dq, k=dk)
