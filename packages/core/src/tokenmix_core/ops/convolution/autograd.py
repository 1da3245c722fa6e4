"""The short convolution's kernels as differentiable functions: direct in eager mode, custom ops where torch traces."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core import tuning
from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.common import ScanOutput, differentiable, direct_when_eager, recorded_op


def token_rows(x: Tensor) -> Tensor:
    """x `[B, T, D]` itself where its tokens lie at one stride with channels side by side, as in a slice."""
    B, T, _ = x.shape
    rows = x.stride(2) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    # one token may lie at any stride in what is contiguous
    return x if rows else x.clone(memory_format=torch.contiguous_format)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def run_forward(x, weight, bias, activation, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """o and the last inputs of each sequence."""
    from tokenmix_core.ops.convolution.forward import short_conv_forward

    config = tuning.short_conv(x.shape[0] * x.shape[1], x.shape[2])
    weight, bias, state = _contiguous(weight), _contiguous(bias), _contiguous(initial_state)
    return short_conv_forward(token_rows(x), weight, bias, activation, state, cu_seqlens, config)


def run_backward(
    x, weight, bias, activation, initial_state, cu_seqlens, do, final_gradient
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and the initial state."""
    from tokenmix_core.ops.convolution.backward import short_conv_backward

    B, T, D = x.shape
    return short_conv_backward(
        token_rows(x), weight.contiguous(), _contiguous(bias), activation, _contiguous(initial_state), cu_seqlens,
        token_rows(do), _contiguous(final_gradient), tuning.short_conv_backward(B * T, D),
    )  # fmt: skip


def run_step(x, weight, bias, state, activation) -> Tensor:
    """o of one token; `state` is overwritten."""
    from tokenmix_core.ops.convolution.forward import short_conv_step

    x = x if x.stride(1) == 1 else x.contiguous()
    return short_conv_step(x, weight.contiguous(), _contiguous(bias), state, activation)


def run_steps(x0, x1, x2, weight0, weight1, weight2, state0, state1, state2, activation) -> tuple[Tensor, ...]:
    """o of one token of three inputs, the last one's empty where there is none; the states are overwritten."""
    from tokenmix_core.ops.convolution.forward import short_conv_steps

    xs, weights, states = (
        [x for x in tensors if x is not None]
        for tensors in ((x0, x1, x2), (weight0, weight1, weight2), (state0, state1, state2))
    )
    xs = [x if x.stride(1) == 1 else x.contiguous() for x in xs]
    outputs = short_conv_steps(xs, [weight.contiguous() for weight in weights], states, activation)
    return tuple(outputs) if x2 is not None else (*outputs, torch.empty(0, dtype=x0.dtype, device=x0.device))


@recorded_op("tokenmix_core::short_conv_forward", mutates_args=())
def short_conv_forward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`run_forward` for torch to trace."""
    return run_forward(x, weight, bias, activation, initial_state, cu_seqlens)


@short_conv_forward_op.register_fake
def _(x, weight, bias, activation, initial_state, cu_seqlens):
    D, W = weight.shape
    return x.new_empty(x.shape), x.new_empty((num_sequences(x, cu_seqlens), D, W - 1))


@recorded_op("tokenmix_core::short_conv_backward", mutates_args=())
def short_conv_backward_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, do: Tensor, final_gradient: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """`run_backward` for torch to trace, without what does not exist."""
    grads = run_backward(x, weight, bias, activation, initial_state, cu_seqlens, do, final_gradient)
    return [grad for grad in grads if grad is not None]


@short_conv_backward_op.register_fake
def _(x, weight, bias, activation, initial_state, cu_seqlens, do, final_gradient):
    return [t.new_empty(t.shape) for t in (x, weight, bias, initial_state) if t is not None]


@recorded_op("tokenmix_core::short_conv_step", mutates_args={"state"})
def short_conv_step_op(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None) -> Tensor:
    """`run_step` for torch to trace."""
    return run_step(x, weight, bias, state, activation)


@short_conv_step_op.register_fake
def _(x, weight, bias, state, activation):
    return x.new_empty(x.shape)


@recorded_op("tokenmix_core::short_conv_steps", mutates_args={"state0", "state1", "state2"})
def short_conv_steps_op(
    x0: Tensor, x1: Tensor, x2: Tensor | None, weight0: Tensor, weight1: Tensor, weight2: Tensor | None,
    state0: Tensor, state1: Tensor, state2: Tensor | None, activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`run_steps` for torch to trace."""
    o0, o1, o2 = run_steps(x0, x1, x2, weight0, weight1, weight2, state0, state1, state2, activation)
    return o0, o1, o2


@short_conv_steps_op.register_fake
def _(x0, x1, x2, weight0, weight1, weight2, state0, state1, state2, activation):
    return x0.new_empty(x0.shape), x1.new_empty(x1.shape), x0.new_empty(0 if x2 is None else x2.shape)


backward = direct_when_eager(short_conv_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    x, weight, bias, ctx.activation, initial_state, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, final_gradient):
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(x)
    grads = iter(backward(x, weight, bias, ctx.activation, initial_state, cu_seqlens, do, final_gradient))
    dx, dweight, *rest = (grad for grad in grads if grad is not None)
    dbias = None if bias is None else rest.pop(0)
    return dx, dweight, dbias, None, None if initial_state is None else rest.pop(0), None


convolution = differentiable(short_conv_forward_op, run_forward, _save, _gradients)
step = direct_when_eager(short_conv_step_op, run_step, writes=3)
steps = direct_when_eager(short_conv_steps_op, run_steps, writes=6)


def short_conv_triton(x, weight, bias, activation, initial_state, cu_seqlens) -> ScanOutput:
    """`short_conv` by Triton."""
    return ScanOutput(*convolution(x, weight, bias, activation, initial_state, cu_seqlens))


def short_conv_step_triton(x, weight, bias, state, activation) -> Tensor:
    """`short_conv_step` by Triton."""
    return step(x, weight, bias, state, activation)


def short_conv_steps_triton(xs, weights, states, activation) -> tuple[Tensor, ...]:
    """`short_conv_steps` by Triton."""
    given = (x for tensors in (xs, weights, states) for x in (*tensors, *[None] * (3 - len(tensors))))
    return tuple(steps(*given, activation)[: len(xs)])
