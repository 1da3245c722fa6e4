"""SSD's Triton kernels as differentiable functions: directly in eager mode, as torch custom ops where torch traces."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import chunk_slots
from tokenmix_core.ops.common import ScanOutput, differentiable, direct_when_eager


def token_rows(x: Tensor) -> Tensor:
    """x `[B, T, H, D]` itself where its tokens lie at one stride in rows of H · D, as in a slice of a wider tensor."""
    B, T, H, D = x.shape
    stride = x.stride()
    rows = stride[3] == 1 and (H == 1 or stride[2] == D) and (B == 1 or stride[0] == T * stride[1])
    return x if rows and stride[1] % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _plan(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuning.SSDPlan:
    B, T, G, K = q.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    return tuning.ssd(B, T, N, G, v.shape[2], K, v.shape[3], v.dtype)


def _sequences(v: Tensor, cu_seqlens: Tensor | None) -> int:
    return v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1


def run_forward(q, k, v, g, scale, initial_state, cu_seqlens) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final states, and the states before each segment (empty where sequences are not cut up)."""
    from tokenmix_core.ops.ssd.forward import ssd_forward
    from tokenmix_core.ops.ssd.states import segment_states

    plan = _plan(q, v, cu_seqlens)
    q, k, v, g = token_rows(q), token_rows(k), token_rows(v), g.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if not plan.segment:
        o, final_state = ssd_forward(q, k, v, g, scale, initial_state, cu_seqlens, 0, plan.forward)
        assert final_state is not None, "whole sequences end in a state"
        return o, final_state, final_state.new_empty(0)
    before, final_state = segment_states(k, v, g, scale, initial_state, cu_seqlens, plan.segment, False, plan.states)
    o, _ = ssd_forward(q, k, v, g, scale, before, cu_seqlens, plan.segment, plan.forward)
    return o, final_state, before


def run_backward(
    q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dg and the gradient of the initial state; `before` is the third result of `run_forward`."""
    from tokenmix_core.ops.ssd.gradients import ssd_gradients
    from tokenmix_core.ops.ssd.states import border_states, segment_states

    plan = _plan(q, v, cu_seqlens)
    q, k, v, do, g = token_rows(q), token_rows(k), token_rows(v), token_rows(do), g.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    if final_gradient is not None:
        final_gradient = final_gradient.contiguous()
    initial_gradient, after = None, final_gradient
    if plan.segment:
        if before is None:
            before, _ = segment_states(k, v, g, scale, initial_state, cu_seqlens, plan.segment, False, plan.states)
        after, initial_gradient = segment_states(
            q, do, g, scale, final_gradient, cu_seqlens, plan.segment, True, plan.states
        )
    else:
        before = initial_state
    states, gradients, whole = border_states(
        q, k, v, do, g, scale, before, after, cu_seqlens, plan.segment, plan.states
    )
    dq, dk, dv, dg = ssd_gradients(q, k, v, do, g, scale, states, gradients, cu_seqlens, plan.gradients)
    initial_gradient = initial_gradient if plan.segment else whole
    assert initial_gradient is not None, "one of the two passes reaches the first token"
    return dq, dk, dv, dg, initial_gradient


def run_recurrent(q, k, v, g, scale, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """o and the final states, token by token."""
    from tokenmix_core.ops.ssd.recurrent import ssd_recurrent

    q, k, v, g = token_rows(q), token_rows(k), token_rows(v), g.contiguous()
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    shape = (_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    return ssd_recurrent(q, k, v, g, scale, initial_state, final_state, cu_seqlens), final_state


def run_step(q, k, v, g, state, scale) -> Tensor:
    """o of one token; `state` is overwritten."""
    from tokenmix_core.ops.ssd.recurrent import ssd_recurrent

    q, k, v = (token_rows(x.unsqueeze(1)) for x in (q, k, v))
    return ssd_recurrent(q, k, v, g.contiguous().unsqueeze(1), scale, state, state, None).squeeze(1)


@torch.library.custom_op("tokenmix_core::ssd_forward", mutates_args=())
def ssd_forward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return run_forward(q, k, v, g, scale, initial_state, cu_seqlens)


@ssd_forward_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens):
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    segment = _plan(q, v, cu_seqlens).segment
    final_state = v.new_empty((_sequences(v, cu_seqlens), HV, K, V), dtype=torch.float32)
    before = (chunk_slots(B, T, segment, cu_seqlens), HV, K, V) if segment else (0,)
    return torch.empty_like(v, memory_format=torch.contiguous_format), final_state, final_state.new_empty(before)


@torch.library.custom_op("tokenmix_core::ssd_recurrent", mutates_args=())
def ssd_recurrent_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return run_recurrent(q, k, v, g, scale, initial_state, cu_seqlens)


@ssd_recurrent_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens):
    shape = (_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("tokenmix_core::ssd_backward", mutates_args=())
def ssd_backward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    before: Tensor | None, do: Tensor, final_gradient: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return run_backward(q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient)


@ssd_backward_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient):
    shape = (_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g))
    return *grads, v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("tokenmix_core::ssd_step", mutates_args={"state"})
def ssd_step_op(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    return run_step(q, k, v, g, state, scale)


@ssd_step_op.register_fake
def _(q, k, v, g, state, scale):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


backward = direct_when_eager(ssd_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    """What backward needs; the recurrent form has no third result and its backward makes the segments' states anew."""
    q, k, v, g, scale, initial_state, cu_seqlens = inputs
    before = output[2] if len(output) > 2 else None
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens, before)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, final_gradient, _before=None):
    q, k, v, g, initial_state, cu_seqlens, before = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    *grads, initial_gradient = backward(q, k, v, g, ctx.scale, initial_state, cu_seqlens, before, do, final_gradient)
    return *grads, None, initial_gradient if initial_state is not None else None, None


chunk = differentiable(ssd_forward_op, run_forward, _save, _gradients, outputs=2)
recurrent = differentiable(ssd_recurrent_op, run_recurrent, _save, _gradients)
step = direct_when_eager(ssd_step_op, run_step)


def chunk_ssd_triton(q, k, v, g, scale, initial_state, cu_seqlens) -> ScanOutput:
    return ScanOutput(*chunk(q, k, v, g, scale, initial_state, cu_seqlens))


def recurrent_ssd_triton(q, k, v, g, scale, initial_state, cu_seqlens) -> ScanOutput:
    return ScanOutput(*recurrent(q, k, v, g, scale, initial_state, cu_seqlens))


def ssd_step_triton(q, k, v, g, state, scale) -> Tensor:
    return step(q, k, v, g, state, scale)
