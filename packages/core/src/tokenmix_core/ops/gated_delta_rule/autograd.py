"""The Triton forms as differentiable functions: directly in eager mode, as torch custom ops where torch traces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.launch.cache.replay import Replayed, is_plain
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, retried
from tokenmix_core.ops.buffers import aligned, buffer_bytes, buffer_views
from tokenmix_core.ops.decode_tiles import gluon_step_tile
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.backward import backward
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK, narrowed_heads, state_layouts, term_layouts
from tokenmix_core.ops.gated_delta_rule.forward import forward, room_to_save
from tokenmix_core.ops.gated_delta_rule.head_split import joined, joined_gradients, narrowed, narrowed_states
from tokenmix_core.ops.gated_delta_rule.plan import GLUON_STEP, GDNPlan, forward_segment, narrow_heads, plan
from tokenmix_core.ops.gated_delta_rule.prepare import prepare
from tokenmix_core.ops.gated_delta_rule.recurrent import recurrent_forward
from tokenmix_core.ops.gated_delta_rule.sequence_split import segment_states
from tokenmix_core.ops.gated_delta_rule.types import Gradients, Inputs, Saved, Terms


@retried
def run_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, qk_l2norm: bool, impl: str | None = None, writes: Tensor | None = None, write_chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, final states, Ã and the gates.

    How sequences are cut up would decide the shapes of what segments need, and a graph be made anew for every other
    cut: the backward pass makes it again.
    """
    inputs = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, impl=impl, writes=writes, write_chunk=write_chunk,
    )  # fmt: skip
    x, parts = _as_taken(inputs)
    by = _forward_plan(x)
    terms = _chunk_terms(x, by)
    o, final_state = forward(x, terms, segment=by.segment, form=by.outputs)
    if parts > 1:
        o, final_state = joined(o, final_state, parts)
    return o, final_state, terms.inverse, terms.gates


def _as_taken(inputs: Inputs) -> tuple[Inputs, int]:
    """A call as kernels take it, and how many heads each one of V is for them."""
    x, parts = inputs.aligned(), narrow_heads(inputs.k, inputs.v, inputs.impl, inputs.run)
    return x if parts == 1 else narrowed(x, parts), parts


def _forward_plan(x: Inputs) -> GDNPlan:
    return plan(k=x.k, v=x.v, cu_seqlens=x.cu_seqlens, qk_l2norm=x.qk_l2norm, impl=x.impl, others=(x.q,), run=x.run)


def _chunk_terms(x: Inputs, by: GDNPlan, into: Sequence[Tensor] | None = None) -> Terms:
    """What forward and backward pass share; Ã and the gates go `into` two tensors, if they are given."""
    inverse, gates = prepare(
        k=x.k, g=x.g, beta=x.beta, cu_seqlens=x.cu_seqlens, qk_l2norm=x.qk_l2norm, form=by.prepare, out=into
    )
    return Terms(inverse, gates, *segment_states(x, inverse=inverse, gates=gates, segment=by.segment))


def _gradients(
    x: Inputs, terms: Terms, saved: Saved | None, do: Tensor | None, dfinal_state: Tensor | None, parts: int
) -> Gradients:
    """The gradients of a call, given as kernels take it; what is not `saved`, the forward pass makes again."""
    do, dfinal_state = aligned(do), aligned(dfinal_state)
    if parts > 1:
        do = None if do is None else narrowed_heads(do, parts)
        dfinal_state = None if dfinal_state is None else narrowed_states(dfinal_state, parts)
    by = plan(
        k=x.k, v=x.v, cu_seqlens=x.cu_seqlens, qk_l2norm=x.qk_l2norm, impl=x.impl, others=(x.q, do),
        through_outputs=do is not None, run=x.run,
    )  # fmt: skip
    spare = saved is None or by.remainders
    if saved is None or by.remainders:
        saved = room_to_save(x, by.remainders)
        forward(x, terms, segment=by.segment, form=by.states, output=False, saved=saved)
    grads = backward(x, terms, saved, do=do, dfinal_state=dfinal_state, spare=spare, plan=by)
    return grads if parts == 1 else joined_gradients(grads, parts)


def _of_writes(factors: Tensor | None, writes: Tensor | None) -> Tensor | None:
    """The gradient of `writes` as they were given, from that of the factors that kernels read."""
    return None if factors is None or writes is None else factors.view_as(writes).to(writes.dtype)


@retried
def run_whole_backward(
    do: Tensor | None, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    inverse: Tensor, gates: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    qk_l2norm: bool, impl: str | None = None, writes: Tensor | None = None, write_chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, β, the initial state and `writes` (the last two empty where there are none).

    Of the forward pass Ã and the gates alone are given: what segments need is made once more.
    """
    inputs = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, impl=impl, writes=writes, write_chunk=write_chunk,
    )  # fmt: skip
    x, parts = _as_taken(inputs)
    segment = forward_segment(k=x.k, v=x.v, cu_seqlens=cu_seqlens, impl=impl, run=x.run)
    terms = Terms(inverse, gates, *segment_states(x, inverse=inverse, gates=gates, segment=segment))
    grads = _gradients(x, terms, None, do, dfinal_state, parts)
    dinitial_state, dwrites = grads.initial_state, _of_writes(grads.writes, writes)
    if dinitial_state is None:
        dinitial_state = gates.new_empty(0, v.shape[2], k.shape[-1], v.shape[-1])
    return *grads[:5], dinitial_state, gates.new_empty(0) if dwrites is None else dwrites


def _results(*inputs):
    """`run_forward` where nobody asks for gradients."""
    return run_forward(*inputs)[:2]


@retried
def _keep(*inputs):
    """`run_forward`, with what `_kept` takes: Ã, the gates and, where that is little, R and S of all chunks in one
    buffer; what enters segments and their M, None where there are none."""
    x, parts = _as_taken(Inputs(*inputs))
    by = _forward_plan(x)
    layouts = term_layouts(x.k, x.v.shape[2])
    if by.keeps:
        layouts += state_layouts(x.k, x.v, x.cu_seqlens)
    kept = x.k.new_empty(buffer_bytes(layouts), dtype=torch.uint8)
    inverse, gates, *states = buffer_views(kept, layouts)
    terms = _chunk_terms(x, by, into=(inverse, gates))
    saved = Saved(*states) if states else None
    o, final_state = forward(x, terms, segment=by.segment, form=by.outputs, saved=saved)
    if parts > 1:
        o, final_state = joined(o, final_state, parts)
    return o, final_state, kept, terms.entering, terms.transitions


def _kept(x: Inputs, kept: Tensor, entering: Tensor | None, transitions: Tensor | None) -> tuple[Terms, Saved | None]:
    """What `_keep` has kept; of x shapes alone are asked, before or after it is narrowed."""
    v = narrowed_heads(x.v, narrow_heads(x.k, x.v, x.impl, x.run))
    layouts = term_layouts(x.k, v.shape[2])
    if len(kept) > buffer_bytes(layouts):
        layouts += state_layouts(x.k, v, x.cu_seqlens)
    inverse, gates, *states = buffer_views(kept, layouts)
    return Terms(inverse, gates, entering, transitions), Saved(*states) if states else None


def _backward(do, dfinal_state, kept, entering, transitions, *inputs):
    """The gradients after `_keep`."""
    inputs = Inputs(*inputs)
    x, parts = _as_taken(inputs)
    terms, saved = _kept(x, kept, entering, transitions)
    grads = _gradients(x, terms, saved, do, dfinal_state, parts)
    return grads._replace(writes=_of_writes(grads.writes, inputs.writes))


_replayed_backward = retried(Replayed(_backward))


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, qk_l2norm: bool, impl: str | None = None, writes: Tensor | None = None, write_chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and final states, token by token; `impl` is that of the backward pass."""
    return recurrent_forward(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, writes=writes, write_chunk=write_chunk,
    )  # fmt: skip


@retried
def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, qk_l2norm: bool,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    """The outputs of one token; updates the state."""
    tile = gluon_step_tile(tuning.STATE_STEPS, GLUON_STEP, state, q, impl)
    q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    o, _ = recurrent_forward(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=state, cu_seqlens=None, scale=scale, qk_l2norm=qk_l2norm,
        tile=tile, state_out=state,
    )  # fmt: skip
    return o.squeeze(1)


chunk_op = cached_op("tokenmix::gated_delta_rule", run_forward, mutates_args=())
backward_op = cached_op("tokenmix::gated_delta_rule_backward", run_whole_backward, mutates_args=())
recurrent_op = cached_op("tokenmix::gated_delta_rule_recurrent", _recurrent, mutates_args=())
step_op = cached_op("tokenmix::gated_delta_rule_step", _step, mutates_args={"state"})


def _save(ctx, inputs, output) -> None:
    x = Inputs(*inputs)
    ctx.options = x.scale, x.qk_l2norm, x.impl, x.write_chunk
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x.q, x.k, x.v, x.g, x.beta, x.initial_state, x.cu_seqlens, x.writes, *output[2:])


def _saved(ctx) -> tuple[Inputs, list]:
    """The inputs, and what the forward pass kept."""
    q, k, v, g, beta, initial_state, cu_seqlens, writes, *kept = ctx.saved_tensors
    scale, qk_l2norm, impl, write_chunk = ctx.options
    inputs = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, scale=scale,
        qk_l2norm=qk_l2norm, impl=impl, writes=writes, write_chunk=write_chunk,
    )  # fmt: skip
    return inputs, kept


def _backward_of_chunk(ctx, do, dfinal_state, *_):
    inputs, kept = _saved(ctx)
    return _in_order(inputs, kept, do, dfinal_state)


def _backward_of_recurrent(ctx, do, dfinal_state):
    inputs, _ = _saved(ctx)
    _, _, *kept = (_keep if is_plain(inputs.q) else chunk_op)(*inputs)
    return _in_order(inputs, kept, do, dfinal_state)


def _in_order(inputs: Inputs, kept: list, do: Tensor | None, dfinal_state: Tensor | None) -> tuple:
    """Gradients in the order of the inputs, from what `_keep` or the op kept."""
    if len(kept) == 3 and is_plain(inputs.q):
        dq, dk, dv, dg, dbeta, dinitial_state, dwrites = _replayed_backward(do, dfinal_state, *kept, *inputs)
    else:
        inverse, gates = kept if len(kept) == 2 else _kept(inputs, *kept)[0][:2]
        dq, dk, dv, dg, dbeta, dinitial_state, dwrites = backward_op(
            do=do, dfinal_state=dfinal_state, inverse=inverse, gates=gates, **inputs._asdict()
        )
    dinitial_state = None if inputs.initial_state is None else dinitial_state
    dwrites = None if inputs.writes is None else dwrites
    return dq, dk, dv, dg, dbeta, dinitial_state, None, None, None, None, dwrites, None


chunk = differentiable(chunk_op, _results, _save, _backward_of_chunk, outputs=2, keep=_keep)
recurrent = differentiable(recurrent_op, _recurrent, _save, _backward_of_recurrent)
step = direct_when_eager(step_op, _step, writes=5)


@recurrent_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl=None, writes=None, write_chunk=64):
    state = q.new_empty(num_sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state


@chunk_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, impl=None, writes=None, write_chunk=64):
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    heads = HV * narrow_heads(k, v, impl, 0 if writes is None else write_chunk // CHUNK)
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        q.new_empty(num_sequences(q, cu_seqlens), HV, K, V, dtype=torch.float32),
        k.new_empty(B, T, heads, CHUNK),
        k.new_empty(heads, B * T, 4, dtype=torch.float32),
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
