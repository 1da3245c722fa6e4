"""The Triton forms as torch custom ops and as an autograd function.

Compiled code calls the custom ops. Eager code calls the autograd function, which launches the same kernels: passing
through the dispatcher twice would cost more host time than the launches.
"""

import torch
from torch import Tensor

from tokenmix_core.ops.gated_delta_rule.backward_chunk import backward_chunk
from tokenmix_core.ops.gated_delta_rule.backward_state import backward_state
from tokenmix_core.ops.gated_delta_rule.forward import forward
from tokenmix_core.ops.gated_delta_rule.layout import CHUNK, sequences
from tokenmix_core.ops.gated_delta_rule.prepare import prepare
from tokenmix_core.ops.gated_delta_rule.recurrent import recurrent_forward


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
    readout: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states, and what the backward pass needs: Ã and the gates, as `prepare` gives them."""
    return _chunk_forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, readout)


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
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, β and the initial state (empty where there is none)."""
    return _chunk_backward(
        do, dfinal_state, q, k, v, g, beta, inverse, gates, initial_state, cu_seqlens, scale, qk_l2norm
    )


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


def chunk(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, readout) -> tuple[Tensor, Tensor]:
    """Chunkwise outputs and final states."""
    run = chunk_op if torch.compiler.is_compiling() else Chunk.apply
    return run(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, readout)[:2]


def recurrent(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm) -> tuple[Tensor, Tensor]:
    """Token-by-token outputs and final states."""
    run = recurrent_op if torch.compiler.is_compiling() else Recurrent.apply
    return run(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


def step(q, k, v, g, beta, state, scale, qk_l2norm) -> Tensor:
    """One token; updates the state in place."""
    run = step_op if torch.compiler.is_compiling() else _step
    return run(q, k, v, g, beta, state, scale, qk_l2norm)


class Chunk(torch.autograd.Function):
    """Chunkwise, for eager code."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _chunk_forward(*inputs)
        _save_chunk(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])
        return output

    @staticmethod
    def backward(ctx, do, dfinal_state, *_):
        *saved, readout = ctx.saved_tensors
        do = _wanted(do, readout)
        return *_gradients(ctx, *_chunk_backward(do, dfinal_state, *saved, ctx.scale, ctx.qk_l2norm)), None


class Recurrent(torch.autograd.Function):
    """Token by token, for eager code; its gradient is the chunkwise one."""

    @staticmethod
    def forward(ctx, *inputs):
        output = recurrent_forward(*inputs)
        _save_recurrent(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, do, dfinal_state):
        q, k, v, g, beta, *rest = ctx.saved_tensors
        chunk_terms = prepare(k, g, beta, rest[-1], ctx.qk_l2norm)
        arguments = (do, dfinal_state, q, k, v, g, beta, *chunk_terms, *rest, ctx.scale, ctx.qk_l2norm)
        return _gradients(ctx, *_chunk_backward(*arguments))


def _wanted(do: Tensor | None, readout: Tensor | None) -> Tensor | None:
    """The gradient of the outputs that are read out."""
    return do if do is None or readout is None else do.masked_fill(~readout[..., None, None], 0.0)


def _chunk_forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, readout):
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    initial_state = None if initial_state is None else initial_state.contiguous()
    terms = prepare(k, g, beta, cu_seqlens, qk_l2norm)
    readout = None if readout is None else readout.contiguous()
    o, final_state = forward(q, k, v, *terms, initial_state, cu_seqlens, scale, qk_l2norm, save=False, readout=readout)
    return o, final_state, *terms


def _chunk_backward(do, dfinal_state, q, k, v, g, beta, inverse, gates, initial_state, cu_seqlens, scale, qk_l2norm):
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    do, dfinal_state, initial_state = (None if x is None else x.contiguous() for x in (do, dfinal_state, initial_state))
    terms = (inverse, gates)
    dv, dstates, dinitial_state = backward_state(
        q, k, *terms, do, dfinal_state, cu_seqlens, scale, qk_l2norm, v, initial_state is not None
    )
    residual, states = forward(q, k, v, *terms, initial_state, cu_seqlens, scale, qk_l2norm, save=True)
    dq, dk, dg, dbeta = backward_chunk(
        q, k, g, beta, gates, do, dv, residual, states, dstates, cu_seqlens, scale, qk_l2norm
    )
    return dq, dk, dv, dg, dbeta, dinitial_state


def _step(q, k, v, g, beta, state, scale, qk_l2norm):
    token = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    return recurrent_forward(*token, state, None, scale, qk_l2norm, state_out=state)[0].squeeze(1)


def _save_chunk(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, ctx.scale, ctx.qk_l2norm, readout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, *output[2:], initial_state, cu_seqlens, readout)


def _save_recurrent(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, ctx.scale, ctx.qk_l2norm = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens)


def _gradients(ctx, dq, dk, dv, dg, dbeta, dinitial_state):
    """Gradients in the order of the forward arguments."""
    return dq, dk, dv, dg, dbeta, dinitial_state if ctx.needs_input_grad[5] else None, None, None, None


def _chunk_op_backward(ctx, do, dfinal_state, *_):
    *saved, readout = ctx.saved_tensors
    do = _wanted(do, readout)
    return *_gradients(ctx, *backward_op(do, dfinal_state, *saved, ctx.scale, ctx.qk_l2norm)), None


def _recurrent_op_backward(ctx, do, dfinal_state):
    q, k, v, g, beta, initial_state, cu_seqlens = ctx.saved_tensors
    terms = chunk_op(q, k, v, g, beta, initial_state, cu_seqlens, ctx.scale, ctx.qk_l2norm, None)[2:]
    arguments = (do, dfinal_state, q, k, v, g, beta, *terms, initial_state, cu_seqlens, ctx.scale, ctx.qk_l2norm)
    return _gradients(ctx, *backward_op(*arguments))


chunk_op.register_autograd(_chunk_op_backward, setup_context=_save_chunk)
recurrent_op.register_autograd(_recurrent_op_backward, setup_context=_save_recurrent)


@recurrent_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm):
    state = q.new_empty(sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1], dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state


@chunk_op.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, readout):
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        q.new_empty(sequences(q, cu_seqlens), HV, K, V, dtype=torch.float32),
        k.new_empty(B, T, HV, CHUNK),
        k.new_empty(HV, B * T, 4, dtype=torch.float32),
    )


@backward_op.register_fake
def _(do, dfinal_state, q, k, v, g, beta, inverse, gates, initial_state, cu_seqlens, scale, qk_l2norm):
    dinitial_state = q.new_empty(
        0 if initial_state is None else sequences(q, cu_seqlens), v.shape[2], q.shape[-1], v.shape[-1],
        dtype=torch.float32,
    )  # fmt: skip
    return *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)), dinitial_state


@step_op.register_fake
def _(q, k, v, g, beta, state, scale, qk_l2norm):
    return torch.empty_like(v, memory_format=torch.contiguous_format)
