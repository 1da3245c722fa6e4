"""SSD's Triton kernels as differentiable functions: directly in eager mode, as torch custom ops where torch traces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.common import ScanOutput, aligned, differentiable, direct_when_eager, recorded_op, retried
from tokenmix_core.ops.ssd.plan import plan, step_tile


def token_rows(x: Tensor) -> Tensor:
    """x `[B, T, H, D]` itself where its tokens lie at one stride in rows of H · D, as in a slice of a wider tensor."""
    B, T, H, D = x.shape
    stride = x.stride()
    rows = stride[3] == 1 and (H == 1 or stride[2] == D) and (B == 1 or stride[0] == T * stride[1])
    # at strides that are no multiples of 16 Triton reads element by element, and 3.6 compiled states wrong beside that
    if rows and stride[1] % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    # one token may lie at any stride in what is contiguous
    return x.clone(memory_format=torch.contiguous_format)


@retried
def run_forward(
    q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final states, and the states before each segment (empty where sequences are not cut up)."""
    from tokenmix_core.ops.ssd.forward import ssd_forward
    from tokenmix_core.ops.ssd.states import segment_states

    by = plan(q, v, cu_seqlens, impl)
    q, k, v, g = token_rows(q), token_rows(k), token_rows(v), aligned(g)
    initial_state, dt, D = map(aligned, (initial_state, dt, D))
    if not by.segment:
        o, final_state = ssd_forward(q, k, v, g, dt, D, scale, initial_state, cu_seqlens, 0, by.forward)
        assert final_state is not None, "whole sequences end in a state"
        return o, final_state, final_state.new_empty(0)
    before, final_state = segment_states(k, v, g, dt, scale, initial_state, cu_seqlens, by.segment, False, by.states)
    o, _ = ssd_forward(q, k, v, g, dt, D, scale, before, cu_seqlens, by.segment, by.forward)
    return o, final_state, before


@retried
def run_backward(
    q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient, dt=None, D=None, impl=None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, dg, the gradient of the initial state, dΔ and dD; `before` is the third result of `run_forward`."""
    from tokenmix_core.ops.ssd.gradients import ssd_gradients, ssd_walk
    from tokenmix_core.ops.ssd.states import border_states, segment_states

    by = plan(q, v, cu_seqlens, impl)
    fused = by.gradients.hopper is not None
    walks = fused and by.gradients.walks
    if not fused and not (dt is None and D is None):
        return _composed_backward(q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient, dt, D, impl)
    q, k, v, do, g = token_rows(q), token_rows(k), token_rows(v), token_rows(do), aligned(g)
    initial_state, final_gradient, dt, D = map(aligned, (initial_state, final_gradient, dt, D))
    initial_gradient, after = None, final_gradient
    if by.segment:
        if before is None or not len(before):
            before, _ = segment_states(k, v, g, dt, scale, initial_state, cu_seqlens, by.segment, False, by.states)
        after, initial_gradient = segment_states(
            q, do, g, None, scale, final_gradient, cu_seqlens, by.segment, True, by.states
        )
    else:
        before = initial_state
    states, gradients, whole = border_states(
        q, k, v, do, g, dt, scale, before, after, cu_seqlens, by.segment, by.states, gradients=not walks
    )
    if walks:
        dq, dk, dv, dg, whole, ddt, dD = ssd_walk(q, k, v, do, g, dt, D, scale, states, after, cu_seqlens, by.segment)
    else:
        dq, dk, dv, dg, ddt, dD = ssd_gradients(
            q, k, v, do, g, dt, D, scale, states, gradients, cu_seqlens, by.gradients
        )
    initial_gradient = initial_gradient if by.segment else whole
    assert initial_gradient is not None, "one of the passes reaches the first token"
    return dq, dk, dv, dg, initial_gradient, ddt, dD


def _composed_backward(q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient, dt, D, impl):
    """`run_backward` where the kernels know neither Δ nor D."""
    x = v if dt is None else (v * dt.unsqueeze(-1)).to(v.dtype)
    dq, dk, dx, dg, initial_gradient, ddt, dD = run_backward(
        q, k, x, g, scale, initial_state, cu_seqlens, before, do, final_gradient, impl=impl
    )
    dv = dx.float()
    if dt is not None:
        ddt = (dv * v).sum(-1).to(dt.dtype)
        dv = dv * dt.unsqueeze(-1)
    if D is not None:
        dD = (do.float() * v).sum((0, 1, 3)).to(D.dtype)
        dv = dv + do * D.unsqueeze(-1)
    return dq, dk, dv.to(v.dtype), dg, initial_gradient, ddt, dD


def run_recurrent(q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, _impl=None) -> tuple[Tensor, Tensor]:
    """o and the final states, token by token; what is asked for matters to the backward pass alone."""
    from tokenmix_core.ops.ssd.recurrent import ssd_recurrent

    q, k, v, g = token_rows(q), token_rows(k), token_rows(v), aligned(g)
    initial_state, dt, D = map(aligned, (initial_state, dt, D))
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    return ssd_recurrent(q, k, v, g, dt, D, scale, initial_state, final_state, cu_seqlens), final_state


@retried
def run_step(q, k, v, g, state, scale, dt=None, D=None, impl=None) -> Tensor:
    """o of one token; `state` is overwritten."""
    from tokenmix_core.ops.ssd.recurrent import ssd_recurrent

    tile = step_tile(state.shape[0] * state.shape[1], *state.shape[2:], q, impl)
    q, k, v = (token_rows(x.unsqueeze(1)) for x in (q, k, v))
    g, dt, D = map(aligned, (g, dt, D))
    g, dt = (x if x is None else x.unsqueeze(1) for x in (g, dt))
    return ssd_recurrent(q, k, v, g, dt, D, scale, state, state, None, tile).squeeze(1)


@recorded_op("tokenmix_core::ssd_forward", mutates_args=())
def ssd_forward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt: Tensor | None = None, D: Tensor | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and the final states for torch to trace.

    How sequences are cut up would decide the shape of the states before segments, and a graph be made anew for every
    other cut: the backward pass makes them again.
    """
    return run_forward(q, k, v, g, scale, initial_state, cu_seqlens, dt, D, impl)[:2]


@ssd_forward_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None):
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(shape, dtype=torch.float32)


@recorded_op("tokenmix_core::ssd_recurrent", mutates_args=())
def ssd_recurrent_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt: Tensor | None = None, D: Tensor | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`run_recurrent` for torch to trace."""
    return run_recurrent(q, k, v, g, scale, initial_state, cu_seqlens, dt, D)


@ssd_recurrent_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None):
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(shape, dtype=torch.float32)


@recorded_op("tokenmix_core::ssd_backward", mutates_args=())
def ssd_backward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    before: Tensor | None, do: Tensor, final_gradient: Tensor | None, dt: Tensor | None = None, D: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`run_backward` for torch to trace; what does not exist is empty."""
    dq, dk, dv, dg, initial_gradient, ddt, dD = run_backward(
        q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient, dt, D, impl
    )
    ddt, dD = (g.new_empty(0) if x is None else x for x in (ddt, dD))
    return dq, dk, dv, dg, initial_gradient, ddt, dD


@ssd_backward_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens, before, do, final_gradient, dt=None, D=None, impl=None):
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g))
    of_steps = (g.new_empty(0) if x is None else x.new_empty(x.shape) for x in (dt, D))
    return *grads, v.new_empty(shape, dtype=torch.float32), *of_steps


@recorded_op("tokenmix_core::ssd_step", mutates_args={"state"})
def ssd_step_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float, dt: Tensor | None = None,
    D: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """`run_step` for torch to trace."""
    return run_step(q, k, v, g, state, scale, dt, D, impl)


@ssd_step_op.register_fake
def _(q, k, v, g, state, scale, dt=None, D=None, impl=None):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


backward = direct_when_eager(ssd_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    """Keep what backward needs; where there is no third result it makes the segments' states anew."""
    q, k, v, g, scale, initial_state, cu_seqlens, dt, D, ctx.impl = inputs
    before = output[2] if len(output) > 2 else None
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens, before, dt, D)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, final_gradient, _before=None):
    q, k, v, g, initial_state, cu_seqlens, before, dt, D = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(v)
    *grads, initial_gradient, ddt, dD = backward(
        q, k, v, g, ctx.scale, initial_state, cu_seqlens, before, do, final_gradient, dt, D, ctx.impl
    )
    initial_gradient = None if initial_state is None else initial_gradient
    return (*grads, None, initial_gradient, None, None if dt is None else ddt, None if D is None else dD, None)


def _forward(*inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """`run_forward`, with None for what it leaves empty: a buffer less to make and to keep."""
    o, final_state, before = run_forward(*inputs)
    return o, final_state, before if len(before) else None


chunk = differentiable(ssd_forward_op, _forward, _save, _gradients, outputs=2)
recurrent = differentiable(ssd_recurrent_op, run_recurrent, _save, _gradients)
step = direct_when_eager(ssd_step_op, run_step, writes=4)


def needs_widening(x: Tensor, *sizes: int) -> bool:
    """Tell whether gradients of heads of such sizes, and of x's dtype and device, may be wrong as they are.

    dv and dg of K 16, V 32 are in float32 on a GPU, Triton 3.6.
    """
    return x.is_cuda and x.dtype == torch.float32 and min(sizes) < 64


def _widened(form, q, k, v, g, scale, initial_state, cu_seqlens, dt, D, impl) -> ScanOutput:
    """`form`, of heads widened by zeros, which add nothing to any product, where its gradients might be wrong."""
    K, V = q.shape[3], v.shape[3]
    if not needs_widening(v, K, V):
        return ScanOutput(*form(q, k, v, g, scale, initial_state, cu_seqlens, dt, D, impl))
    keys, values = max(64 - K, 0), max(64 - V, 0)
    q, k, v = F.pad(q, (0, keys)), F.pad(k, (0, keys)), F.pad(v, (0, values))
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, values, 0, keys))
    o, final_state = form(q, k, v, g, scale, initial_state, cu_seqlens, dt, D, impl)
    return ScanOutput(o[..., :V].contiguous(), final_state[..., :K, :V].contiguous())


def chunk_ssd_kernels(q, k, v, g, dt, D, scale, initial_state, cu_seqlens, impl) -> ScanOutput:
    """`chunk_ssd` by kernels."""
    return _widened(chunk, q, k, v, g, scale, initial_state, cu_seqlens, dt, D, impl)


def recurrent_ssd_kernels(q, k, v, g, dt, D, scale, initial_state, cu_seqlens, impl) -> ScanOutput:
    """`recurrent_ssd` by kernels."""
    return _widened(recurrent, q, k, v, g, scale, initial_state, cu_seqlens, dt, D, impl)


def ssd_step_kernels(q, k, v, g, dt, D, state, scale, impl) -> Tensor:
    """`ssd_step` by kernels."""
    return step(q, k, v, g, state, scale, dt, D, impl)
