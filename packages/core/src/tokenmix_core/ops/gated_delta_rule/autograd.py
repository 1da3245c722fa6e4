"""The Triton forms as differentiable functions: directly in eager mode, as torch custom ops where torch traces."""

import torch
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.launch.replay import Replayed, is_plain
from tokenmix_core.ops.common import (
    aligned,
    differentiable,
    direct_when_eager,
    parts_of,
    recorded_op,
    retried,
    room_for,
)
from tokenmix_core.ops.gated_delta_rule.backward import backward
from tokenmix_core.ops.gated_delta_rule.forward import Forward, forward
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, state_layouts, term_layouts, write_factors
from tokenmix_core.ops.gated_delta_rule.plan import GDNPlan, forward_segment, plan, step_tile
from tokenmix_core.ops.gated_delta_rule.prepare import prepare
from tokenmix_core.ops.gated_delta_rule.recurrent import recurrent_forward
from tokenmix_core.ops.gated_delta_rule.segments import segment_states


@recorded_op("tokenmix::gated_delta_rule", mutates_args=())
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
    impl: str | None = None,
    writes: Tensor | None = None,
    write_chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states, Ã and the gates for torch to trace.

    How sequences are cut up would decide the shapes of what segments need, and a graph be made anew for every other
    cut: the backward pass makes it again.
    """
    return run_forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl, writes, write_chunk)[:4]


@recorded_op("tokenmix::gated_delta_rule_backward", mutates_args=())
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
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
    impl: str | None = None,
    writes: Tensor | None = None,
    write_chunk: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, β, the initial state and `writes` (the last two empty where there are none)."""
    inputs = (q, k, v, g, beta, inverse, gates, initial_state, cu_seqlens)
    return run_whole_backward(do, dfinal_state, *inputs, scale, qk_l2norm, impl, writes, write_chunk)


@recorded_op("tokenmix::gated_delta_rule_recurrent", mutates_args=())
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
    impl: str | None = None,
    writes: Tensor | None = None,
    write_chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states, token by token; `impl` is that of the backward pass."""
    return _recurrent(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl, writes, write_chunk)


@recorded_op("tokenmix::gated_delta_rule_step", mutates_args={"state"})
def step_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, qk_l2norm: bool,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The outputs of one token; updates the state."""
    return _step(q, k, v, g, beta, state, scale, qk_l2norm, impl)


@retried
def run_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl=None, writes=None, write_chunk=64
):  # fmt: skip
    """o, the final states, and what `run_backward` takes back: Ã, the gates, states that enter segments and their M."""
    q, k, v, g, beta, initial_state = map(aligned, (q, k, v, g, beta, initial_state))
    factors = write_factors(writes, write_chunk)
    by = plan(k, v, cu_seqlens, qk_l2norm, impl, q, run=factors.chunks)
    terms = _chunk_terms(k, v, g, beta, factors, initial_state, cu_seqlens, qk_l2norm, by)
    options = factors, initial_state, cu_seqlens, scale, qk_l2norm
    out = forward(q, k, v, *terms[:3], *options, segment=by.segment, form=by.outputs)
    return out.o, out.final_state, *terms


def _chunk_terms(k, v, g, beta, writes, initial_state, cu_seqlens, qk_l2norm, by: GDNPlan, into=None):
    """Ã, the gates, the states that enter segments and their M: what forward and backward share."""
    terms = prepare(k, g, beta, cu_seqlens, qk_l2norm, by.prepare, into)
    return *terms, *segment_states(k, v, *terms, writes, initial_state, cu_seqlens, qk_l2norm, by.segment)


@retried
def run_backward(
    do, dfinal_state, q, k, v, g, beta, inverse, gates, entering, transitions, initial_state, cu_seqlens, scale,
    qk_l2norm, impl=None, writes=None, write_chunk=64, residual=None, states=None,
):  # fmt: skip
    """Gradients of q, k, v, g, β, the initial state and `writes` (the last two empty where there are none)."""
    q, k, v, g, beta = map(aligned, (q, k, v, g, beta))
    do, dfinal_state, initial_state = map(aligned, (do, dfinal_state, initial_state))
    terms, options = (inverse, gates), (cu_seqlens, scale, qk_l2norm)
    factors = write_factors(writes, write_chunk)
    by = plan(k, v, cu_seqlens, qk_l2norm, impl, q, do, through_outputs=do is not None, run=factors.chunks)
    spare = by.remainders or states is None
    if spare:
        saved = forward(
            q, k, v, *terms, entering, factors, initial_state, *options, segment=by.segment, form=by.states,
            output=False, save=True, remainders=by.remainders,
        )  # fmt: skip
    else:
        none = v.new_empty(0)
        saved = Forward(none, none, residual, states, none)
    inputs = (q, k, v, g, beta, *terms, factors, transitions, saved)
    *grads, dfactors, dinitial_state = backward(
        *inputs, do, dfinal_state, *options, initial_state is not None, spare, by
    )
    if writes is None or dfactors is None:
        return *grads, dinitial_state, v.new_empty(0, dtype=torch.float32)
    return *grads, dinitial_state, dfactors.view_as(writes).to(writes.dtype)


@retried
def run_whole_backward(
    do, dfinal_state, q, k, v, g, beta, inverse, gates, initial_state, cu_seqlens, scale, qk_l2norm, impl=None,
    writes=None, write_chunk=64,
):  # fmt: skip
    """`run_backward`, which is given Ã and the gates alone: what segments need is made once more."""
    k, v, initial_state = map(aligned, (k, v, initial_state))
    factors = write_factors(writes, write_chunk)
    segment = forward_segment(k, v, cu_seqlens, impl, factors.chunks)
    of_segments = segment_states(k, v, inverse, gates, factors, initial_state, cu_seqlens, qk_l2norm, segment)
    inputs = (q, k, v, g, beta, inverse, gates, *of_segments, initial_state, cu_seqlens)
    return run_backward(do, dfinal_state, *inputs, scale, qk_l2norm, impl, writes, write_chunk)


def _results(*inputs):
    """`run_forward` where nobody asks for gradients."""
    return run_forward(*inputs)[:2]


@retried
def _keep(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl, writes, write_chunk):
    """`run_forward`, with what `_parts` takes: Ã, the gates and, where that is little, R and S of all chunks in one
    buffer; what enters segments and their M, None where there are none."""
    q, k, v, g, beta, initial_state = map(aligned, (q, k, v, g, beta, initial_state))
    factors = write_factors(writes, write_chunk)
    by = plan(k, v, cu_seqlens, qk_l2norm, impl, q, run=factors.chunks)
    layouts = term_layouts(k, v.shape[2])
    if by.keeps:
        layouts += state_layouts(k, v, cu_seqlens)
    kept = k.new_empty(room_for(layouts), dtype=torch.uint8)
    inverse, gates, *states = parts_of(kept, layouts)
    *found, transitions = _chunk_terms(
        k, v, g, beta, factors, initial_state, cu_seqlens, qk_l2norm, by, (inverse, gates)
    )
    options = factors, initial_state, cu_seqlens, scale, qk_l2norm
    out = forward(q, k, v, *found, *options, segment=by.segment, form=by.outputs, save=bool(states), into=states)
    return out.o, out.final_state, kept, *(x if len(x) else None for x in (found[2], transitions))


def _parts(k, v, cu_seqlens, kept, entering, transitions):
    """The tensors of `_keep` for `run_backward`: Ã, the gates, what enters segments, their M; R and S or neither."""
    layouts = term_layouts(k, v.shape[2])
    if len(kept) > room_for(layouts):
        layouts += state_layouts(k, v, cu_seqlens)
    inverse, gates, *states = parts_of(kept, layouts)
    if entering is None:
        HV, V, K = *v.shape[2:], k.shape[-1]
        entering, transitions = (gates.new_empty(0, HV, K, size) for size in (V, K))
    return (inverse, gates, entering, transitions), states


def _backward(
    do, dfinal_state, q, k, v, g, beta, kept, entering, transitions, initial_state, cu_seqlens, scale, qk_l2norm, impl,
    writes, write_chunk,
):  # fmt: skip
    """`run_backward` after `_keep`, with None in place of an empty gradient."""
    terms, states = _parts(k, v, cu_seqlens, kept, entering, transitions)
    inputs = q, k, v, g, beta, *terms, initial_state, cu_seqlens
    options = scale, qk_l2norm, impl, writes, write_chunk
    *grads, dinitial_state, dwrites = run_backward(do, dfinal_state, *inputs, *options, *states)
    return *grads, None if initial_state is None else dinitial_state, None if writes is None else dwrites


_replayed_backward = retried(Replayed(_backward))


def _recurrent(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, _impl, writes, write_chunk):
    options = cu_seqlens, scale, qk_l2norm
    return recurrent_forward(q, k, v, g, beta, initial_state, *options, writes=writes, write_chunk=write_chunk)


@retried
def _step(q, k, v, g, beta, state, scale, qk_l2norm, impl):
    tile = step_tile(state.shape[0] * state.shape[1], *state.shape[2:], q, impl)
    token = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    return recurrent_forward(*token, state, None, scale, qk_l2norm, tile, state)[0].squeeze(1)


def _save_chunk(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options, writes, ctx.write_chunk = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, *output[2:], initial_state, cu_seqlens, writes)


def _save_recurrent(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options, writes, ctx.write_chunk = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, writes)


def _gradients(ctx, run, do, dfinal_state, *saved):
    """Gradients in the order of the forward arguments."""
    *saved, writes = saved
    *grads, dinitial_state, dwrites = run(do, dfinal_state, *saved, *ctx.options, writes, ctx.write_chunk)
    *_, initial_state, _ = saved
    dinitial_state = None if initial_state is None else dinitial_state
    return *grads, dinitial_state, None, None, None, None, None if writes is None else dwrites, None


def _backward_of_chunk(ctx, do, dfinal_state, *_):
    q, k, v, g, beta, *kept, initial_state, cu_seqlens, writes = ctx.saved_tensors
    run = backward_op
    # by `_keep`, not by the op
    if len(kept) == 3:
        if is_plain(q):
            run = _replayed_backward
        else:
            (*kept, _, _), _ = _parts(k, v, cu_seqlens, *kept)
    return _gradients(ctx, run, do, dfinal_state, q, k, v, g, beta, *kept, initial_state, cu_seqlens, writes)


def _backward_of_recurrent(ctx, do, dfinal_state):
    q, k, v, g, beta, initial_state, cu_seqlens, writes = ctx.saved_tensors
    inputs = q, k, v, g, beta, initial_state, cu_seqlens, *ctx.options, writes, ctx.write_chunk
    run, kept = (_replayed_backward, _keep(*inputs)) if is_plain(q) else (backward_op, chunk_op(*inputs))
    return _gradients(ctx, run, do, dfinal_state, q, k, v, g, beta, *kept[2:], initial_state, cu_seqlens, writes)


chunk = differentiable(chunk_op, _results, _save_chunk, _backward_of_chunk, outputs=2, keep=_keep)
recurrent = differentiable(recurrent_op, _recurrent, _save_recurrent, _backward_of_recurrent)
step = direct_when_eager(step_op, _step, writes=5)


@recurrent_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl=None, writes=None, write_chunk=64):
    state = q.new_empty(num_sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state


@chunk_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl=None, writes=None, write_chunk=64):
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        q.new_empty(num_sequences(q, cu_seqlens), HV, K, V, dtype=torch.float32),
        k.new_empty(B, T, HV, CHUNK),
        k.new_empty(HV, B * T, 4, dtype=torch.float32),
    )


@backward_op.register_fake
def _(
    do, dfinal_state, q, k, v, g, beta, inverse, gates, initial_state, cu_seqlens, scale, qk_l2norm, impl=None,
    writes=None, write_chunk=64,
):  # fmt: skip
    dinitial_state = q.new_empty(
        0 if initial_state is None else num_sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1],
        dtype=torch.float32,
    )  # fmt: skip
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    dwrites = v.new_empty(0, dtype=torch.float32) if writes is None else torch.empty_like(writes)
    return *grads, dinitial_state, dwrites


@step_op.register_fake
def _(q, k, v, g, beta, state, scale, qk_l2norm, impl=None):
    return torch.empty_like(v, memory_format=torch.contiguous_format)
