"""SSD's kernels with autograd: called directly in eager mode, as torch custom ops under tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields, retried
from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.decode_tiles import gluon_step_tile
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.slots import pool_of
from tokenmix_core.ops.ssd import tuning
from tokenmix_core.ops.ssd.chunk import chunk_backward, chunk_forward
from tokenmix_core.ops.ssd.chunk import prefill as chunk_prefill
from tokenmix_core.ops.ssd.plan import GLUON_STEP
from tokenmix_core.ops.ssd.recurrent import ssd_recurrent
from tokenmix_core.ops.ssd.types import TENSORS, Gradients, Inputs, PrefillInputs, StepInputs, token_rows
from tokenmix_core.ops.types import ScanOutput


class BackwardInputs(NamedTuple):
    """Arguments of the backward pass; `entering` are the states that enter segments, None to compute them again."""

    do: Tensor
    dfinal_state: Tensor | None
    entering: Tensor | None
    inputs: Inputs


@retried
@of_fields
def run_forward(x: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return o, the final states, and the states that enter segments (None if sequences are not split)."""
    return chunk_forward(x)


@of_fields
def _forward_traced(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return o and the final states of a traced call.

    The states that enter segments are not saved: the backward pass computes them again, because their shape depends on
    how sequences are split, and a compiled graph would be specialised on that split.
    """
    return run_forward(*x)[:2]


@retried
@of_fields
def run_backward(given: BackwardInputs) -> Gradients:
    """Return all gradients in the order of `Gradients`; None for Δ or D if the call does not have it."""
    return chunk_backward(given.inputs, do=given.do, dfinal_state=given.dfinal_state, entering=given.entering)


@of_fields
def _backward_traced(given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return all gradients in the order of `Gradients`; an empty tensor for Δ or D if the call does not have it."""
    grads = Gradients(*run_backward(*given[:3], *given.inputs))
    assert grads.initial_state is not None, "one of the scans reaches the first token"
    ddt, dD = (given.inputs.g.new_empty(0) if x is None else x for x in (grads.dt, grads.D))
    return *grads[:4], grads.initial_state, ddt, dD


@of_fields
def _recurrent(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return o and the final states, computed token by token; `x.impl` selects only the backward pass's kernels."""
    final_state = _empty_states(x)
    o = ssd_recurrent(x.aligned(), final_state)
    zero_padding(x.cu_seqlens, o)
    return o, final_state


@retried
@of_fields
def _step(x: StepInputs) -> Tensor:
    """Return o of one token, and overwrite the state."""
    tile = gluon_step_tile(tuning.STATE_STEPS, GLUON_STEP, x.state, x.q, x.impl)
    q, k, v = (token_rows(t.unsqueeze(1)) for t in (x.q, x.k, x.v))
    g, dt, D = map(aligned, (x.g, x.dt, x.D))
    g, dt = (t if t is None else t.unsqueeze(1) for t in (g, dt))
    token = Inputs(q=q, k=k, v=v, g=g, initial_state=x.state, dt=dt, D=D, cu_seqlens=None, scale=x.scale)
    return ssd_recurrent(token, x.state, tile, x.slots).squeeze(1)


@retried
@of_fields
def _prefill(given: PrefillInputs) -> Tensor:
    """Return o of whole sequences, and overwrite their slots of the pool `given.state`."""
    return chunk_prefill(given.inputs, pool_of(given.state, given.slots, given.fresh))


def _empty_states(x: Inputs) -> Tensor:
    shape = (num_sequences(x.v, x.cu_seqlens), x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return x.v.new_empty(shape, dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _empty_results(x: Inputs) -> tuple[Tensor, Tensor]:
    return _like(x.v), _empty_states(x)


def _empty_gradients(given: BackwardInputs) -> tuple[Tensor, ...]:
    x = given.inputs
    ddt, dD = (x.g.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x.dt, x.D))
    return *map(_like, x[:4]), _empty_states(x), ddt, dD


ssd_forward_op = cached_op("tokenmix_core::ssd_forward", _forward_traced, _empty_results)
ssd_recurrent_op = cached_op("tokenmix_core::ssd_recurrent", _recurrent, _empty_results)
ssd_backward_op = cached_op("tokenmix_core::ssd_backward", _backward_traced, _empty_gradients)
ssd_step_op = cached_op("tokenmix_core::ssd_step", _step, lambda x: _like(x.v), mutates_args={"state"})
ssd_prefill_op = cached_op(
    "tokenmix_core::ssd_prefill", _prefill, lambda x: _like(x.inputs.v), mutates_args={"state"}
)  # fmt: skip
_backward = direct_when_eager(ssd_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], output[2] if len(output) > 2 else None)


def _gradients(ctx, do, dfinal_state, _=None):
    *tensors, entering = ctx.saved_tensors
    x = Inputs(*tensors, *ctx.options)
    grads = _backward(torch.zeros_like(x.v) if do is None else do, dfinal_state, entering, *x)
    found = tuple(None if given is None else grad for given, grad in zip(x, grads, strict=False))
    return found + (None,) * (len(x) - len(found))


chunk = differentiable(ssd_forward_op, run_forward, _save, _gradients, outputs=2)
recurrent = differentiable(ssd_recurrent_op, _recurrent, _save, _gradients)
step = direct_when_eager(ssd_step_op, _step, writes=StepInputs._fields.index("state"))
prefill = direct_when_eager(ssd_prefill_op, _prefill, writes=PrefillInputs._fields.index("state"))


def needs_widening(x: Tensor, *sizes: int) -> bool:
    """True if kernels may compute wrong gradients for heads of these sizes, in x's dtype and on x's device.

    With Triton 3.6 on a GPU, dv and dg are wrong for K = 16 and V = 32 in float32.
    """
    return x.is_cuda and x.dtype == torch.float32 and min(sizes) < 64


def run_widened(function: Callable, x: Inputs) -> ScanOutput:
    """Call `chunk` or `recurrent`; if `needs_widening`, pad heads with zeros to 64, which changes no result."""
    K, V = x.q.shape[3], x.v.shape[3]
    if not needs_widening(x.v, K, V):
        return ScanOutput(*function(*x))
    keys, values = max(64 - K, 0), max(64 - V, 0)
    q, k, v = F.pad(x.q, (0, keys)), F.pad(x.k, (0, keys)), F.pad(x.v, (0, values))
    state = None if x.initial_state is None else F.pad(x.initial_state, (0, values, 0, keys))
    o, final_state = function(*x._replace(q=q, k=k, v=v, initial_state=state))
    return ScanOutput(o[..., :V].contiguous(), final_state[..., :K, :V].contiguous())
