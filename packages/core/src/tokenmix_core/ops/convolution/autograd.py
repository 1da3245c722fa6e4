"""The short convolution's kernels as differentiable functions: direct in eager mode, custom ops where torch traces."""

from __future__ import annotations

from collections.abc import Sequence

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


def run_several(
    x0, x1, x2, weight0, weight1, weight2, activation, initial0, initial1, initial2, cu_seqlens
) -> tuple[Tensor, ...]:
    """o of three inputs, then the last inputs of each; the last one's are empty where there is none."""
    from tokenmix_core.ops.convolution.forward import short_convs_forward

    xs, weights, states = _given((x0, x1, x2), (weight0, weight1, weight2), (initial0, initial1, initial2))
    config = tuning.short_conv(x0.shape[0] * x0.shape[1], sum(x.shape[2] for x in xs))
    outputs, final_states = short_convs_forward(
        [token_rows(x) for x in xs], weights, activation, states or None, cu_seqlens, config
    )
    return *_three(outputs), *_three(final_states)


def run_several_backward(
    x0, x1, x2, weight0, weight1, weight2, activation, initial0, initial1, initial2, cu_seqlens, do0, do1, do2,
    dfinal0, dfinal1, dfinal2,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs, of all weights `[sum of D, W]`, and of the initial states, without what does not exist.

    Weights' gradients are one tensor, as those that an operator returns may not share one.
    """
    from tokenmix_core.ops.convolution.backward import short_convs_backward

    xs, weights, states = _given((x0, x1, x2), (weight0, weight1, weight2), (initial0, initial1, initial2))
    dos, final_gradients = _given((do0, do1, do2), (dfinal0, dfinal1, dfinal2))
    config = tuning.short_conv_backward(x0.shape[0] * x0.shape[1], sum(x.shape[2] for x in xs))
    dxs, dweights, initial_gradients = short_convs_backward(
        [token_rows(x) for x in xs], weights, activation, states or None, cu_seqlens, [token_rows(x) for x in dos],
        final_gradients or None, config,
    )  # fmt: skip
    return [*dxs, dweights, *(initial_gradients or ())]


def _given(inputs: tuple, *others: tuple) -> list[list[Tensor]]:
    """Of three inputs those there are, as they are; of what belongs to them likewise, contiguous."""
    present = [[x for x in tensors if x is not None] for tensors in (inputs, *others)]
    return [present[0], *([x.contiguous() for x in tensors] for tensors in present[1:])]


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, and an empty one for a third input that there is not."""
    return [*tensors, *(tensors[0].new_empty(0) for _ in range(3 - len(tensors)))]


def run_step(x, weight, bias, state, activation) -> Tensor:
    """o of one token; `state` is overwritten."""
    from tokenmix_core.ops.convolution.forward import short_conv_step

    x = x if x.stride(1) == 1 else x.contiguous()
    return short_conv_step(x, weight.contiguous(), _contiguous(bias), state, activation)


def run_steps(x0, x1, x2, weight0, weight1, weight2, state0, state1, state2, activation) -> tuple[Tensor, ...]:
    """o of one token of three inputs, the last one's empty where there is none; the states are overwritten."""
    from tokenmix_core.ops.convolution.forward import short_conv_steps

    xs, weights, states = _given((x0, x1, x2), (weight0, weight1, weight2), (state0, state1, state2))
    xs = [x if x.stride(1) == 1 else x.contiguous() for x in xs]
    return tuple(_three(short_conv_steps(xs, weights, states, activation)))


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


@recorded_op("tokenmix_core::short_convs_forward", mutates_args=())
def short_convs_forward_op(
    x0: Tensor, x1: Tensor, x2: Tensor | None, weight0: Tensor, weight1: Tensor, weight2: Tensor | None,
    activation: str | None, initial0: Tensor | None, initial1: Tensor | None, initial2: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`run_several` for torch to trace."""
    given = x0, x1, x2, weight0, weight1, weight2, activation, initial0, initial1, initial2, cu_seqlens
    o0, o1, o2, final0, final1, final2 = run_several(*given)
    return o0, o1, o2, final0, final1, final2


@short_convs_forward_op.register_fake
def _(x0, x1, x2, weight0, weight1, weight2, activation, initial0, initial1, initial2, cu_seqlens):
    weights = [weight for weight in (weight0, weight1, weight2) if weight is not None]
    outputs = [x.new_empty(x.shape) for x in (x0, x1, x2) if x is not None]
    final_states = [x0.new_empty((num_sequences(x0, cu_seqlens), len(w), w.shape[1] - 1)) for w in weights]
    return *_three(outputs), *_three(final_states)


@recorded_op("tokenmix_core::short_convs_backward", mutates_args=())
def short_convs_backward_op(
    x0: Tensor, x1: Tensor, x2: Tensor | None, weight0: Tensor, weight1: Tensor, weight2: Tensor | None,
    activation: str | None, initial0: Tensor | None, initial1: Tensor | None, initial2: Tensor | None,
    cu_seqlens: Tensor | None, do0: Tensor, do1: Tensor, do2: Tensor | None, dfinal0: Tensor | None,
    dfinal1: Tensor | None, dfinal2: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """`run_several_backward` for torch to trace."""
    given = x0, x1, x2, weight0, weight1, weight2, activation, initial0, initial1, initial2, cu_seqlens
    return run_several_backward(*given, do0, do1, do2, dfinal0, dfinal1, dfinal2)


@short_convs_backward_op.register_fake
def _(
    x0, x1, x2, weight0, weight1, weight2, activation, initial0, initial1, initial2, cu_seqlens, do0, do1, do2,
    dfinal0, dfinal1, dfinal2,
):  # fmt: skip
    xs, weights, states = _given((x0, x1, x2), (weight0, weight1, weight2), (initial0, initial1, initial2))
    dweights = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]))
    return [*(x.new_empty(x.shape) for x in xs), dweights, *(x.new_empty(x.shape) for x in states)]


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


several_backward = direct_when_eager(short_convs_backward_op, run_several_backward)


def _save_several(ctx, inputs, output) -> None:
    ctx.activation = inputs[6]
    ctx.save_for_backward(*inputs[:6], *inputs[7:])
    ctx.set_materialize_grads(False)


def _several_gradients(ctx, *gradients):
    *tensors, initial0, initial1, initial2, cu_seqlens = ctx.saved_tensors
    xs, weights = tensors[:3], [x for x in tensors[3:] if x is not None]
    number = len(weights)
    dos = [torch.zeros_like(x) if do is None else do for x, do in zip(xs[:number], gradients[:3], strict=False)]
    dfinals = list(gradients[3 : 3 + number])
    if any(x is not None for x in dfinals):
        N, W = num_sequences(xs[0], cu_seqlens), weights[0].shape[1]
        shapes = [(N, x.shape[2], W - 1) for x in xs[:number]]
        dfinals = [xs[0].new_zeros(s) if x is None else x for s, x in zip(shapes, dfinals, strict=True)]
    lacking = [None] * (3 - number)
    grads = several_backward(
        *tensors, ctx.activation, initial0, initial1, initial2, cu_seqlens, *dos, *lacking, *dfinals, *lacking
    )
    dxs, dweights, dinitial = grads[:number], grads[number], grads[number + 1 :]
    dweights = dweights.split([len(x) for x in weights])
    dinitial = [*dinitial, *lacking] if dinitial else [None] * 3
    return *dxs, *lacking, *dweights, *lacking, None, *dinitial, None


convolution = differentiable(short_conv_forward_op, run_forward, _save, _gradients)
convolutions = differentiable(short_convs_forward_op, run_several, _save_several, _several_gradients)
step = direct_when_eager(short_conv_step_op, run_step, writes=3)
steps = direct_when_eager(short_conv_steps_op, run_steps, writes=6)


def short_conv_triton(x, weight, bias, activation, initial_state, cu_seqlens) -> ScanOutput:
    """`short_conv` by Triton."""
    return ScanOutput(*convolution(x, weight, bias, activation, initial_state, cu_seqlens))


def short_convs_triton(xs, weights, activation, initial_states, cu_seqlens) -> tuple[ScanOutput, ...]:
    """`short_convs` by Triton."""
    lacking = [None] * (3 - len(xs))
    states = [None] * 3 if initial_states is None else [*initial_states, *lacking]
    found = convolutions(*xs, *lacking, *weights, *lacking, activation, *states, cu_seqlens)
    return tuple(ScanOutput(found[i], found[3 + i]) for i in range(len(xs)))


def short_conv_step_triton(x, weight, bias, state, activation) -> Tensor:
    """`short_conv_step` by Triton."""
    return step(x, weight, bias, state, activation)


def short_conv_steps_triton(xs, weights, states, activation) -> tuple[Tensor, ...]:
    """`short_conv_steps` by Triton."""
    given = (x for tensors in (xs, weights, states) for x in (*tensors, *[None] * (3 - len(tensors))))
    return tuple(steps(*given, activation)[: len(xs)])
