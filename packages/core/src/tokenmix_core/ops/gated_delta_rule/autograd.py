"""The Triton forms as differentiable functions: directly in eager mode, as torch custom ops where torch traces."""

import torch
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.common import aligned, differentiable, direct_when_eager, parts_of, room_for
from tokenmix_core.ops.gated_delta_rule import hopper
from tokenmix_core.ops.gated_delta_rule.backward import backward
from tokenmix_core.ops.gated_delta_rule.forward import Forward, forward
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, state_layouts, term_layouts
from tokenmix_core.ops.gated_delta_rule.prepare import prepare
from tokenmix_core.ops.gated_delta_rule.recurrent import recurrent_forward
from tokenmix_core.ops.gated_delta_rule.segments import segment_slots, segment_states
from tokenmix_core.ops.replay import Replayed, is_plain


@torch.library.custom_op("tokenmix::gated_delta_rule", mutates_args=())
def chunk_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states, and what the backward pass needs: Ã and the gates, states that enter segments, their M."""
    return run_forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


@torch.library.custom_op("tokenmix::gated_delta_rule_backward", mutates_args=())
def backward_op(
    do: Tensor | None,
    dfinal_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    inverse: Tensor,
    gates: Tensor,
    entering: Tensor,
    transitions: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, β and the initial state (empty where there is none)."""
    inputs = (q, k, v, g, beta, inverse, gates, entering, transitions, initial_state, cu_seqlens)
    return run_backward(do, dfinal_state, *inputs, scale, qk_l2norm)


@torch.library.custom_op("tokenmix::gated_delta_rule_recurrent", mutates_args=())
def recurrent_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states, token by token."""
    return recurrent_forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


@torch.library.custom_op("tokenmix::gated_delta_rule_step", mutates_args={"state"})
def step_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, qk_l2norm: bool
) -> Tensor:
    """The outputs of one token; updates the state."""
    return _step(q, k, v, g, beta, state, scale, qk_l2norm)


def run_forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm):
    """o, the final states, and what `run_backward` takes back: Ã, the gates, states that enter segments and their M."""
    q, k, v, g, beta, initial_state = map(aligned, (q, k, v, g, beta, initial_state))
    terms = _chunk_terms(k, v, g, beta, initial_state, cu_seqlens, qk_l2norm)
    out = forward(q, k, v, *terms[:3], initial_state, cu_seqlens, scale, qk_l2norm)
    return out.o, out.final_state, *terms


def _chunk_terms(k, v, g, beta, initial_state, cu_seqlens, qk_l2norm, into=None):
    """Ã, the gates, the states that enter segments and their M: what forward and backward share."""
    terms = prepare(k, g, beta, cu_seqlens, qk_l2norm, into)
    return *terms, *segment_states(k, v, *terms, initial_state, cu_seqlens, qk_l2norm)


def run_backward(
    do, dfinal_state, q, k, v, g, beta, inverse, gates, entering, transitions, initial_state, cu_seqlens, scale,
    qk_l2norm, residual=None, states=None,
):  # fmt: skip
    """Gradients of q, k, v, g, β and the initial state (empty where there is none)."""
    q, k, v, g, beta = map(aligned, (q, k, v, g, beta))
    do, dfinal_state, initial_state = map(aligned, (do, dfinal_state, initial_state))
    terms, options = (inverse, gates), (cu_seqlens, scale, qk_l2norm)
    # the steps on Hopper sum ⟨dS', S⟩ from what is stored in 16 bits alone
    parts = q.element_size() == 2 and not (do is not None and hopper.takes(q, k, do))
    spare = parts or states is None
    if spare:
        saved = forward(q, k, v, *terms, entering, initial_state, *options, output=False, save=True, remainders=parts)
    else:
        none = v.new_empty(0)
        saved = Forward(none, none, residual, states, none)
    inputs = (q, k, v, g, beta, *terms, transitions, saved)
    return backward(*inputs, do, dfinal_state, *options, initial_state is not None, spare)


def _results(*inputs):
    """`run_forward` where nobody asks for gradients."""
    return run_forward(*inputs)[:2]


def _keep(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm):
    """`run_forward`, with what `_parts` takes: Ã, the gates and, where that is little, R and S of all chunks in one
    buffer; what enters segments and their M, None where there are none."""
    q, k, v, g, beta, initial_state = map(aligned, (q, k, v, g, beta, initial_state))
    layouts, states = term_layouts(k, v.shape[2]), state_layouts(k, v, cu_seqlens)
    if v.shape[3] == 128 and hopper.takes(k, v) and room_for(states) <= tuning.GATED_DELTA_RULE_KEEPS:
        layouts += states
    kept = k.new_empty(room_for(layouts), dtype=torch.uint8)
    inverse, gates, *states = parts_of(kept, layouts)
    *found, transitions = _chunk_terms(k, v, g, beta, initial_state, cu_seqlens, qk_l2norm, (inverse, gates))
    options = initial_state, cu_seqlens, scale, qk_l2norm
    out = forward(q, k, v, *found, *options, save=bool(states), into=states)
    return out.o, out.final_state, kept, *(x if len(x) else None for x in (found[2], transitions))


def _parts(k, v, cu_seqlens, kept, entering, transitions):
    """What `_keep` kept as `run_backward` takes it: Ã, the gates, what enters segments, their M; R and S or neither."""
    layouts = term_layouts(k, v.shape[2])
    if len(kept) > room_for(layouts):
        layouts += state_layouts(k, v, cu_seqlens)
    inverse, gates, *states = parts_of(kept, layouts)
    if entering is None:
        HV, V, K = *v.shape[2:], k.shape[-1]
        entering, transitions = (gates.new_empty(0, HV, K, size) for size in (V, K))
    return (inverse, gates, entering, transitions), states


def _backward(do, dfinal_state, q, k, v, g, beta, kept, entering, transitions, initial_state, cu_seqlens, *options):
    """`run_backward` after `_keep`, with None in place of an empty gradient."""
    terms, states = _parts(k, v, cu_seqlens, kept, entering, transitions)
    inputs = q, k, v, g, beta, *terms, initial_state, cu_seqlens
    *grads, dinitial_state = run_backward(do, dfinal_state, *inputs, *options, *states)
    return *grads, None if initial_state is None else dinitial_state


_replayed_backward = Replayed(_backward)


def _step(q, k, v, g, beta, state, scale, qk_l2norm):
    token = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    return recurrent_forward(*token, state, None, scale, qk_l2norm, state_out=state)[0].squeeze(1)


def _save_chunk(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, *output[2:], initial_state, cu_seqlens)


def _save_recurrent(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens)


def _gradients(ctx, run, do, dfinal_state, *saved):
    """Gradients in the order of the forward arguments."""
    *grads, dinitial_state = run(do, dfinal_state, *saved, *ctx.options)
    *_, initial_state, _ = saved
    return *grads, None if initial_state is None else dinitial_state, None, None, None


def _backward_of_chunk(ctx, do, dfinal_state, *_):
    q, k, v, g, beta, *kept, initial_state, cu_seqlens = ctx.saved_tensors
    run = backward_op
    # by `_keep`, not by the op
    if len(kept) == 3:
        if is_plain(q):
            run = _replayed_backward
        else:
            kept, _ = _parts(k, v, cu_seqlens, *kept)
    return _gradients(ctx, run, do, dfinal_state, q, k, v, g, beta, *kept, initial_state, cu_seqlens)


def _backward_of_recurrent(ctx, do, dfinal_state):
    q, k, v, g, beta, initial_state, cu_seqlens = ctx.saved_tensors
    if is_plain(q):
        run, kept = _replayed_backward, _keep(q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options)
    else:
        run, kept = backward_op, chunk_op(q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options)
    return _gradients(ctx, run, do, dfinal_state, q, k, v, g, beta, *kept[2:], initial_state, cu_seqlens)


chunk = differentiable(chunk_op, _results, _save_chunk, _backward_of_chunk, outputs=2, keep=_keep)
recurrent = differentiable(recurrent_op, recurrent_forward, _save_recurrent, _backward_of_recurrent)
step = direct_when_eager(step_op, _step, writes=5)


@recurrent_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm):
    state = q.new_empty(num_sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state


@chunk_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm):
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        q.new_empty(num_sequences(q, cu_seqlens), HV, K, V, dtype=torch.float32),
        k.new_empty(B, T, HV, CHUNK),
        k.new_empty(HV, B * T, 4, dtype=torch.float32),
        k.new_empty(segment_slots(k, v, cu_seqlens), HV, K, V, dtype=torch.float32),
        k.new_empty(segment_slots(k, v, cu_seqlens), HV, K, K, dtype=torch.float32),
    )


@backward_op.register_fake
def _(
    do, dfinal_state, q, k, v, g, beta, inverse, gates, entering, transitions, initial_state, cu_seqlens, scale,
    qk_l2norm,
):  # fmt: skip
    dinitial_state = q.new_empty(
        0 if initial_state is None else num_sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1],
        dtype=torch.float32,
    )  # fmt: skip
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)), dinitial_state


@step_op.register_fake
def _(q, k, v, g, beta, state, scale, qk_l2norm):
    return torch.empty_like(v, memory_format=torch.contiguous_format)
