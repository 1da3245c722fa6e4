"""The gated delta rule's kernels with autograd: called directly in eager mode, as torch custom ops under tracing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.kernels.launch.cache.capture import is_plain
from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields, retried
from tokenmix_core.ops.decode_tiles import gluon_step_tile
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.gated_delta_rule.chunk import chunk_backward, chunk_forward, read_buffer
from tokenmix_core.ops.gated_delta_rule.constants import CHUNK
from tokenmix_core.ops.gated_delta_rule.plan import GLUON_STEP, head_parts
from tokenmix_core.ops.gated_delta_rule.recurrent import recurrent_forward
from tokenmix_core.ops.gated_delta_rule.types import TENSORS, Gradients, Inputs, PrefillInputs, StepInputs
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.slots import pool_of


class BackwardInputs(NamedTuple):
    """Arguments of the traced backward: both results' gradients, then Ã and the gates, then the forward's arguments."""

    do: Tensor | None
    dfinal_state: Tensor | None
    inverse: Tensor
    gates: Tensor
    inputs: Inputs


class SavedBackwardInputs(NamedTuple):
    """Arguments of the eager backward: the results' gradients, `_forward_saving`'s tensors, the forward's arguments."""

    do: Tensor | None
    dfinal_state: Tensor | None
    buffer: Tensor
    entering: Tensor | None
    transitions: Tensor | None
    inputs: Inputs


@retried
@of_fields
def run_forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, final states, Ã and the gates of a call that is traced, or part of another operation.

    The states that enter segments, and the segments' transition matrices, are not saved: the backward pass computes
    them again, because their shapes depend on how sequences are split, which would specialise a compiled graph.
    """
    found = chunk_forward(x)
    return found.o, found.final_state, found.terms.inverse, found.terms.gates


@of_fields
def _forward_without_gradients(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return the outputs and final states of `run_forward`, without Ã and the gates."""
    return run_forward(*x)[:2]


@retried
@of_fields
def _forward_saving(x: Inputs) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return outputs, final states, and three tensors to save for the backward: a buffer and two tensors of segments.

    The buffer holds Ã, the gates and, if they are small, the residuals R and the chunk states. The other two tensors
    are the states that enter segments and the segments' transition matrices; None if sequences are not split.
    """
    found = chunk_forward(x, save=True)
    return found.o, found.final_state, found.buffer, found.terms.entering, found.terms.transitions


@retried
@of_fields
def run_backward(given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients in the order of `Gradients`; those of an absent initial state or `writes` are empty tensors."""
    do, dfinal_state, inverse, gates, x = given
    grads = chunk_backward(x, inverse=inverse, gates=gates, segments=None, saved=None, do=do, dfinal_state=dfinal_state)
    dinitial_state, dwrites = grads.initial_state, _like_writes(grads.writes, x.writes)
    if dinitial_state is None:
        dinitial_state = gates.new_empty(0, x.v.shape[2], x.k.shape[-1], x.v.shape[-1])
    return *grads[:5], dinitial_state, gates.new_empty(0) if dwrites is None else dwrites


@retried
@Replayed
@of_fields
def _backward_saved(given: SavedBackwardInputs) -> Gradients:
    """Return the gradients of a call, computed from the tensors that `_forward_saving` saved."""
    x = given.inputs
    inverse, gates, saved = read_buffer(x, given.buffer)
    segments = given.entering, given.transitions
    grads = chunk_backward(
        x, inverse=inverse, gates=gates, segments=segments, saved=saved, do=given.do, dfinal_state=given.dfinal_state
    )
    return grads._replace(writes=_like_writes(grads.writes, x.writes))


def _like_writes(factors: Tensor | None, writes: Tensor | None) -> Tensor | None:
    """Convert the gradient of the write factors, float32 `[factors, HV]`, to the shape and dtype of `writes`."""
    return None if factors is None or writes is None else factors.view_as(writes).to(writes.dtype)


@of_fields
def _recurrent(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return outputs and final states, computed token by token; `x.impl` selects only the backward pass's kernels."""
    o, final_state = recurrent_forward(x)
    zero_padding(x.cu_seqlens, o)
    return o, final_state


@retried
@of_fields
def _step(x: StepInputs) -> Tensor:
    """Return the output of one token, and overwrite the state."""
    tile = gluon_step_tile(tuning.STATE_STEPS, GLUON_STEP, x.state, x.q, x.impl)
    q, k, v, g, beta = (t.unsqueeze(1) for t in x[:5])
    token = Inputs(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=x.state, writes=None, cu_seqlens=None, scale=x.scale,
        qk_l2norm=x.qk_l2norm,
    )  # fmt: skip
    o, _ = recurrent_forward(token, tile=tile, state_out=x.state, slots=x.slots)
    return o.squeeze(1)


@retried
@of_fields
def _prefill(given: PrefillInputs) -> Tensor:
    """Return the outputs of whole sequences, and overwrite their slots of the pool `given.state`."""
    return chunk_forward(given.inputs, pool=pool_of(given.state, given.slots, given.fresh)).o


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_states(x: Inputs) -> Tensor:
    return x.q.new_empty(
        num_sequences(x.q, x.cu_seqlens), x.v.shape[2], x.q.shape[-1], x.v.shape[-1], dtype=torch.float32
    )


def _empty_results(x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, HV, _ = x.v.shape
    heads = HV * head_parts(x.k, x.v, x.impl, x.chunks_per_write)
    inverse, gates = x.k.new_empty(B, T, heads, CHUNK), x.k.new_empty(heads, B * T, 4, dtype=torch.float32)
    return _like(x.v), _empty_states(x), inverse, gates


def _empty_gradients(given: BackwardInputs) -> tuple[Tensor, ...]:
    x = given.inputs
    dinitial_state = _empty_states(x) if x.initial_state is not None else _empty_states(x)[:0]
    dwrites = x.v.new_empty(0, dtype=torch.float32) if x.writes is None else torch.empty_like(x.writes)
    return *map(_like, x[:5]), dinitial_state, dwrites


chunk_op = cached_op("tokenmix::gated_delta_rule", run_forward, _empty_results)
backward_op = cached_op("tokenmix::gated_delta_rule_backward", run_backward, _empty_gradients)
recurrent_op = cached_op(
    "tokenmix::gated_delta_rule_recurrent", _recurrent, lambda x: (_like(x.v), _empty_states(x))
)  # fmt: skip
step_op = cached_op("tokenmix::gated_delta_rule_step", _step, lambda x: _like(x.v), mutates_args={"state"})
prefill_op = cached_op(
    "tokenmix::gated_delta_rule_prefill", _prefill, lambda x: _like(x.inputs.v), mutates_args={"state"}
)  # fmt: skip


def _save(ctx, inputs, output) -> None:
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output[2:])


def _gradients_of_chunk(ctx, do, dfinal_state, *_):
    saved = ctx.saved_tensors
    return _gradients(Inputs(*saved[:TENSORS], *ctx.options), saved[TENSORS:], do, dfinal_state)


def _gradients_of_recurrent(ctx, do, dfinal_state):
    x = Inputs(*ctx.saved_tensors, *ctx.options)
    _, _, *saved = (_forward_saving if is_plain(x.q) else chunk_op)(*x)
    return _gradients(x, saved, do, dfinal_state)


def _gradients(x: Inputs, saved, do: Tensor | None, dfinal_state: Tensor | None) -> tuple:
    """Return gradients in the order of `Inputs`; `saved` are the tensors of `_forward_saving` or of `chunk_op`."""
    if len(saved) == 3 and is_plain(x.q):
        grads = _backward_saved(do, dfinal_state, *saved, *x)
    else:
        inverse, gates = saved if len(saved) == 2 else read_buffer(x, saved[0])[:2]
        grads = backward_op(do, dfinal_state, inverse, gates, *x)
    found = tuple(None if given is None else grad for given, grad in zip(x, grads, strict=False))
    return found + (None,) * (len(x) - len(found))


chunk = differentiable(
    chunk_op, _forward_without_gradients, _save, _gradients_of_chunk, outputs=2, keep=_forward_saving
)
recurrent = differentiable(recurrent_op, _recurrent, _save, _gradients_of_recurrent)
step = direct_when_eager(step_op, _step, writes=StepInputs._fields.index("state"))
prefill = direct_when_eager(prefill_op, _prefill, writes=PrefillInputs._fields.index("state"))
