"""SSD's Triton kernels as differentiable functions: directly in eager mode, as torch custom ops where torch traces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, retried
from tokenmix_core.ops.buffers import aligned
from tokenmix_core.ops.decode_tiles import gluon_step_tile
from tokenmix_core.ops.ssd import tuning
from tokenmix_core.ops.ssd.plan import GLUON_STEP, plan
from tokenmix_core.ops.ssd.tuning import SSDStates
from tokenmix_core.ops.ssd.types import Gradients, Inputs, token_rows
from tokenmix_core.ops.types import ScanOutput


@retried
def run_forward(
    q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, the final states, and the states before each segment (None where sequences are not cut up)."""
    from tokenmix_core.ops.ssd.forward import ssd_forward

    x = Inputs(
        q=q, k=k, v=v, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl
    ).aligned()
    by = plan(q, v, cu_seqlens, impl)
    if not by.segment:
        o, final_state = ssd_forward(x, before=x.initial_state, segment=0, config=by.forward)
        assert final_state is not None, "whole sequences end in a state"
        return o, final_state, None
    before, final_state = _states_before(x, by.segment, by.states)
    o, _ = ssd_forward(x, before=before, segment=by.segment, config=by.forward)
    return o, final_state, before


def _states_before(x: Inputs, segment: int, config: SSDStates) -> tuple[Tensor, Tensor]:
    """The states before each segment, and the final ones."""
    from tokenmix_core.ops.ssd.states import segment_states

    return segment_states(
        x=x.k, y=x.v, g=x.g, dt=x.dt, scale=x.scale, initial=x.initial_state, cu_seqlens=x.cu_seqlens, segment=segment,
        reverse=False, config=config,
    )  # fmt: skip


def _gradients_after(
    x: Inputs, do: Tensor, final_gradient: Tensor | None, segment: int, config: SSDStates
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after each segment, and those of the initial states."""
    from tokenmix_core.ops.ssd.states import segment_states

    return segment_states(
        x=x.q, y=do, g=x.g, dt=None, scale=x.scale, initial=final_gradient, cu_seqlens=x.cu_seqlens, segment=segment,
        reverse=True, config=config,
    )  # fmt: skip


@retried
def run_backward(
    do, final_gradient, before, q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None
) -> Gradients:
    """All gradients; `before` is the third result of `run_forward`, or None to be made again."""
    from tokenmix_core.ops.ssd.gradients import ssd_gradients, ssd_walk
    from tokenmix_core.ops.ssd.states import boundary_states

    inputs = Inputs(
        q=q, k=k, v=v, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl
    )
    by = plan(q, v, cu_seqlens, impl)
    fused = by.gradients.hopper is not None
    walks = fused and by.gradients.scans
    if not fused and not (dt is None and D is None):
        return _composed_backward(inputs, before, do, final_gradient)
    x, do, after, initial_gradient = inputs.aligned(), token_rows(do), aligned(final_gradient), None
    if not by.segment:
        before = x.initial_state
    else:
        if before is None:
            before, _ = _states_before(x, by.segment, by.states)
        after, initial_gradient = _gradients_after(x, do, after, by.segment, by.states)
    states, gradients, whole = boundary_states(
        x, do=do, before=before, after=after, segment=by.segment, config=by.states, gradients=not walks
    )
    if walks:
        grads = ssd_walk(x, do=do, states=states, after=after, segment=by.segment)
        whole = grads.initial_state
    else:
        grads = ssd_gradients(x, do=do, states=states, gradients=gradients, config=by.gradients)
    # one of the passes reaches the first token
    return grads._replace(initial_state=initial_gradient if by.segment else whole)


def _composed_backward(inputs: Inputs, before: Tensor | None, do: Tensor, final_gradient: Tensor | None) -> Gradients:
    """`run_backward` where the kernels know neither Δ nor D."""
    v, dt, D = inputs.v, inputs.dt, inputs.D
    scaled = v if dt is None else (v * dt.unsqueeze(-1)).to(v.dtype)
    alone = inputs._replace(v=scaled, dt=None, D=None)
    grads = run_backward(do, final_gradient, before, **alone._asdict())
    dv, ddt, dD = grads.v.float(), None, None
    if dt is not None:
        ddt = (dv * v).sum(-1).to(dt.dtype)
        dv = dv * dt.unsqueeze(-1)
    if D is not None:
        dD = (do.float() * v).sum((0, 1, 3)).to(D.dtype)
        dv = dv + do * D.unsqueeze(-1)
    return grads._replace(v=dv.to(v.dtype), dt=ddt, D=dD)


def run_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt: Tensor | None = None, D: Tensor | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and the final states, token by token; what is asked for matters to the backward pass alone."""
    from tokenmix_core.ops.ssd.recurrent import ssd_recurrent

    x = Inputs(
        q=q, k=k, v=v, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl
    ).aligned()
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    o = ssd_recurrent(
        q=x.q, k=x.k, v=x.v, g=x.g, dt=x.dt, D=x.D, scale=scale, initial_state=x.initial_state,
        final_state=final_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, final_state


@retried
def run_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float, dt: Tensor | None = None,
    D: Tensor | None = None, impl: str | None = None,
) -> Tensor:  # fmt: skip
    """o of one token; `state` is overwritten."""
    from tokenmix_core.ops.ssd.recurrent import ssd_recurrent

    tile = gluon_step_tile(tuning.STATE_STEPS, GLUON_STEP, state, q, impl)
    q, k, v = (token_rows(x.unsqueeze(1)) for x in (q, k, v))
    g, dt, D = map(aligned, (g, dt, D))
    g, dt = (x if x is None else x.unsqueeze(1) for x in (g, dt))
    o = ssd_recurrent(
        q=q, k=k, v=v, g=g, dt=dt, D=D, scale=scale, initial_state=state, final_state=state, cu_seqlens=None, tile=tile
    )
    return o.squeeze(1)


@cached_op("tokenmix_core::ssd_forward", mutates_args=())
def ssd_forward_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt: Tensor | None = None, D: Tensor | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and the final states for torch to trace.

    How sequences are cut up would decide the shape of the states before segments, and a graph be made anew for every
    other cut: the backward pass makes them again.
    """
    o, final_state, _ = run_forward(
        q=q, k=k, v=v, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl
    )
    return o, final_state


@ssd_forward_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None):
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(shape, dtype=torch.float32)


ssd_recurrent_op = cached_op("tokenmix_core::ssd_recurrent", run_recurrent, mutates_args=())


@ssd_recurrent_op.register_fake
def _(q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None):
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    return torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(shape, dtype=torch.float32)


@cached_op("tokenmix_core::ssd_backward", mutates_args=())
def ssd_backward_op(
    do: Tensor, final_gradient: Tensor | None, before: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None, dt: Tensor | None = None,
    D: Tensor | None = None, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`run_backward` for torch to trace; what does not exist is empty."""
    dq, dk, dv, dg, initial_gradient, ddt, dD = run_backward(
        do=do, final_gradient=final_gradient, before=before, q=q, k=k, v=v, g=g, scale=scale,
        initial_state=initial_state, cu_seqlens=cu_seqlens, dt=dt, D=D, impl=impl,
    )  # fmt: skip
    assert initial_gradient is not None, "one of the passes reaches the first token"
    ddt, dD = (g.new_empty(0) if x is None else x for x in (ddt, dD))
    return dq, dk, dv, dg, initial_gradient, ddt, dD


@ssd_backward_op.register_fake
def _(do, final_gradient, before, q, k, v, g, scale, initial_state, cu_seqlens, dt=None, D=None, impl=None):
    shape = (num_sequences(v, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g))
    of_steps = (g.new_empty(0) if x is None else x.new_empty(x.shape) for x in (dt, D))
    return *grads, v.new_empty(shape, dtype=torch.float32), *of_steps


ssd_step_op = cached_op("tokenmix_core::ssd_step", run_step, mutates_args={"state"})


@ssd_step_op.register_fake
def _(q, k, v, g, state, scale, dt=None, D=None, impl=None):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


backward = direct_when_eager(ssd_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    """Keep what backward needs; where there is no third result it makes the segments' states anew."""
    x = Inputs(*inputs)
    before = output[2] if len(output) > 2 else None
    ctx.save_for_backward(x.q, x.k, x.v, x.g, x.initial_state, x.cu_seqlens, x.dt, x.D, before)
    ctx.scale, ctx.impl = x.scale, x.impl
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, final_gradient, _before=None):
    q, k, v, g, initial_state, cu_seqlens, dt, D, before = ctx.saved_tensors
    inputs = Inputs(
        q=q, k=k, v=v, g=g, scale=ctx.scale, initial_state=initial_state, cu_seqlens=cu_seqlens, dt=dt, D=D,
        impl=ctx.impl,
    )  # fmt: skip
    do = torch.zeros_like(v) if do is None else do
    grads = Gradients(*backward(do, final_gradient, before, *inputs))
    initial_gradient = None if initial_state is None else grads.initial_state
    ddt, dD = None if dt is None else grads.dt, None if D is None else grads.D
    return grads.q, grads.k, grads.v, grads.g, None, initial_gradient, None, ddt, dD, None


chunk = differentiable(ssd_forward_op, run_forward, _save, _gradients, outputs=2)
recurrent = differentiable(ssd_recurrent_op, run_recurrent, _save, _gradients)
step = direct_when_eager(ssd_step_op, run_step, writes=4)


def needs_widening(x: Tensor, *sizes: int) -> bool:
    """Tell whether gradients of heads of such sizes, and of x's dtype and device, may be wrong as they are.

    dv and dg of K 16, V 32 are in float32 on a GPU, Triton 3.6.
    """
    return x.is_cuda and x.dtype == torch.float32 and min(sizes) < 64


def _widened(form, x: Inputs) -> ScanOutput:
    """`form`, of heads widened by zeros, which add nothing to any product, where its gradients might be wrong."""
    K, V = x.q.shape[3], x.v.shape[3]
    if not needs_widening(x.v, K, V):
        return ScanOutput(*form(*x))
    keys, values = max(64 - K, 0), max(64 - V, 0)
    q, k, v = F.pad(x.q, (0, keys)), F.pad(x.k, (0, keys)), F.pad(x.v, (0, values))
    state = None if x.initial_state is None else F.pad(x.initial_state, (0, values, 0, keys))
    o, final_state = form(*x._replace(q=q, k=k, v=v, initial_state=state))
    return ScanOutput(o[..., :V].contiguous(), final_state[..., :K, :V].contiguous())


def chunk_ssd_kernels(x: Inputs) -> ScanOutput:
    """`chunk_ssd` by kernels."""
    return _widened(chunk, x)


def recurrent_ssd_kernels(x: Inputs) -> ScanOutput:
    """`recurrent_ssd` by kernels."""
    return _widened(recurrent, x)


def ssd_step_kernels(q, k, v, g, dt, D, state, scale, impl) -> Tensor:
    """`ssd_step` by kernels."""
    return step(q, k, v, g, state, scale, dt, D, impl)
