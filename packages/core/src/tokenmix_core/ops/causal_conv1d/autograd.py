"""The short convolution's kernels with autograd: called directly in eager mode, as torch custom ops under tracing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields
from tokenmix_core.ops.causal_conv1d import tuning
from tokenmix_core.ops.causal_conv1d.types import (
    BackwardInputs,
    Inputs,
    PrefillInputs,
    PrefillsInputs,
    SeveralBackwardInputs,
    SeveralInputs,
    StepInputs,
    StepsInputs,
)
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.slots import pool_of
from tokenmix_core.ops.types import ScanOutput


def token_rows(x: Tensor) -> Tensor:
    """Return x `[B, T, D]` if one stride separates all tokens and channels are contiguous; else a contiguous copy."""
    B, T, _ = x.shape
    rows = x.stride(2) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    # call `clone`, because `contiguous` returns a single token (T = 1) unchanged, whatever its stride
    return x if rows else x.clone(memory_format=torch.contiguous_format)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _each(step: NamedTuple, name: str) -> list[Tensor]:
    """Return the fields `name0` to `name2` of a NamedTuple that are not None."""
    return [x for i in range(3) if (x := getattr(step, f"{name}{i}")) is not None]


def _dense(step: NamedTuple, name: str) -> list[Tensor]:
    """Return the fields `name0` to `name2` that are not None, each as a contiguous tensor."""
    return [x.contiguous() for x in _each(step, name)]


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return three tensors: the given ones and, if they are two, an empty tensor."""
    return [*tensors, *(tensors[0].new_empty(0) for _ in range(3 - len(tensors)))]


@of_fields
def _forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Return o, and the last W − 1 inputs of each sequence."""
    from tokenmix_core.ops.causal_conv1d.forward import short_conv_forward

    x, weight, bias, activation, initial_state, cu_seqlens = given
    config = tuning.conv1d_forward_tile(x.shape[0] * x.shape[1], x.shape[2])
    weight, bias, state = weight.contiguous(), _contiguous(bias), _contiguous(initial_state)
    found = short_conv_forward(token_rows(x), weight, bias, activation, state, cu_seqlens, config)
    zero_padding(cu_seqlens, found[0])
    return found


short_conv_forward_op = cached_op("tokenmix_core::short_conv_forward", _forward, mutates_args=())


@short_conv_forward_op.register_fake
@of_fields
def _(given: Inputs):
    x, (D, W) = given.x, given.weight.shape
    return x.new_empty(x.shape), x.new_empty((num_sequences(x, given.cu_seqlens), D, W - 1))


@of_fields
def _backward(given: BackwardInputs) -> list[Tensor]:
    """Return the gradients of x, weight, bias and initial state, without those of an absent bias or state."""
    from tokenmix_core.ops.causal_conv1d.backward import short_conv_backward

    (x, weight, bias, activation, initial_state, cu_seqlens), do, final_gradient = given
    B, T, D = x.shape
    grads = short_conv_backward(
        token_rows(x), weight.contiguous(), _contiguous(bias), activation, _contiguous(initial_state), cu_seqlens,
        token_rows(do), _contiguous(final_gradient), tuning.conv1d_backward_tile(B * T, D),
    )  # fmt: skip
    zero_padding(cu_seqlens, grads[0])
    return [grad for grad in grads if grad is not None]


short_conv_backward_op = cached_op("tokenmix_core::short_conv_backward", _backward, mutates_args=())
backward = direct_when_eager(short_conv_backward_op, _backward)


@short_conv_backward_op.register_fake
@of_fields
def _(given: BackwardInputs):
    x, weight, bias, _, initial_state, _ = given.inputs
    return [t.new_empty(t.shape) for t in (x, weight, bias, initial_state) if t is not None]


@of_fields
def _several(given: SeveralInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return o of each of three inputs, then their three final states; with two inputs, each third tensor is empty."""
    from tokenmix_core.ops.causal_conv1d.forward import short_convs_forward

    xs = _each(given, "x")
    config = tuning.conv1d_forward_tile(given.x0.shape[0] * given.x0.shape[1], sum(t.shape[2] for t in xs))
    outputs, final_states = short_convs_forward(
        [token_rows(t) for t in xs], _dense(given, "weight"), given.activation, _dense(given, "initial") or None,
        given.cu_seqlens, config,
    )  # fmt: skip
    zero_padding(given.cu_seqlens, *outputs)
    return *_three(outputs), *_three(final_states)  # type: ignore[return-value]


short_convs_forward_op = cached_op("tokenmix_core::short_convs_forward", _several, mutates_args=())


@short_convs_forward_op.register_fake
@of_fields
def _(given: SeveralInputs):
    N = num_sequences(given.x0, given.cu_seqlens)
    final_states = [given.x0.new_empty((N, len(w), w.shape[1] - 1)) for w in _each(given, "weight")]
    return *_three([t.new_empty(t.shape) for t in _each(given, "x")]), *_three(final_states)


@of_fields
def _several_backward(given: SeveralBackwardInputs) -> list[Tensor]:
    """Return the gradients of the inputs, of all weights together `[sum of D, W]`, and of the initial states, if any.

    The weights have one gradient tensor, because tensors that an operator returns may not share memory.
    """
    from tokenmix_core.ops.causal_conv1d.backward import short_convs_backward

    x = given.inputs
    xs = _each(x, "x")
    config = tuning.conv1d_backward_tile(x.x0.shape[0] * x.x0.shape[1], sum(t.shape[2] for t in xs))
    dxs, dweights, initial_gradients = short_convs_backward(
        [token_rows(t) for t in xs], _dense(x, "weight"), x.activation, _dense(x, "initial") or None, x.cu_seqlens,
        [token_rows(t) for t in _each(given, "do")], _dense(given, "dfinal") or None, config,
    )  # fmt: skip
    zero_padding(x.cu_seqlens, *dxs)
    return [*dxs, dweights, *(initial_gradients or ())]


short_convs_backward_op = cached_op("tokenmix_core::short_convs_backward", _several_backward, mutates_args=())
several_backward = direct_when_eager(short_convs_backward_op, _several_backward)


@short_convs_backward_op.register_fake
@of_fields
def _(given: SeveralBackwardInputs):
    x = given.inputs
    weights = _each(x, "weight")
    dweights = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]))
    dxs, initial_gradients = ([t.new_empty(t.shape) for t in _each(x, name)] for name in ("x", "initial"))
    return [*dxs, dweights, *initial_gradients]


@of_fields
def _prefill(given: PrefillInputs) -> Tensor:
    """Return o of whole sequences, and update their slots."""
    from tokenmix_core.ops.causal_conv1d.forward import short_conv_forward

    x, weight, bias, state, slots, fresh, activation, cu_seqlens = given
    config, pool = tuning.conv1d_forward_tile(x.shape[0] * x.shape[1], x.shape[2]), pool_of(state, slots, fresh)
    rows, weight, bias = token_rows(x), weight.contiguous(), _contiguous(bias)
    o, _ = short_conv_forward(rows, weight, bias, activation, None, cu_seqlens, config, pool)
    zero_padding(cu_seqlens, o)
    return o


short_conv_prefill_op = cached_op("tokenmix_core::short_conv_prefill", _prefill, mutates_args={"state"})


@short_conv_prefill_op.register_fake
@of_fields
def _(given: PrefillInputs):
    return given.x.new_empty(given.x.shape)


@of_fields
def _prefills(given: PrefillsInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return o of whole sequences for two or three inputs, and update their slots; for two, the third o is empty."""
    from tokenmix_core.ops.causal_conv1d.forward import short_convs_forward

    xs, weights, activation = _each(given, "x"), _dense(given, "weight"), given.activation
    config = tuning.conv1d_forward_tile(given.x0.shape[0] * given.x0.shape[1], sum(t.shape[2] for t in xs))
    pools = [pool_of(state, given.slots, given.fresh) for state in _each(given, "state")]
    rows = [token_rows(t) for t in xs]
    outputs, _ = short_convs_forward(rows, weights, activation, None, given.cu_seqlens, config, pools)
    zero_padding(given.cu_seqlens, *outputs)
    o0, o1, o2 = _three(outputs)
    return o0, o1, o2


short_convs_prefill_op = cached_op(
    "tokenmix_core::short_convs_prefill", _prefills, mutates_args={"state0", "state1", "state2"}
)


@short_convs_prefill_op.register_fake
@of_fields
def _(given: PrefillsInputs):
    return tuple(_three([t.new_empty(t.shape) for t in _each(given, "x")]))


@of_fields
def _step(given: StepInputs) -> Tensor:
    """Return o of one token, and update the state."""
    from tokenmix_core.ops.causal_conv1d.forward import short_conv_step

    x, weight, bias, state, activation, slots = given
    x = x if x.stride(1) == 1 else x.contiguous()
    return short_conv_step(x, weight.contiguous(), _contiguous(bias), state, activation, _contiguous(slots))


short_conv_step_op = cached_op("tokenmix_core::short_conv_step", _step, mutates_args={"state"})


@short_conv_step_op.register_fake
@of_fields
def _(given: StepInputs):
    return given.x.new_empty(given.x.shape)


@of_fields
def _steps(given: StepsInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return o of one token for three inputs, and update their states; with two inputs, the third tensor is empty."""
    from tokenmix_core.ops.causal_conv1d.forward import short_conv_steps

    xs = [t if t.stride(1) == 1 else t.contiguous() for t in _each(given, "x")]
    weights, states, slots = _dense(given, "weight"), _each(given, "state"), _contiguous(given.slots)
    o0, o1, o2 = _three(short_conv_steps(xs, weights, states, given.activation, slots))
    return o0, o1, o2


short_conv_steps_op = cached_op("tokenmix_core::short_conv_steps", _steps, mutates_args={"state0", "state1", "state2"})


@short_conv_steps_op.register_fake
@of_fields
def _(given: StepsInputs):
    return tuple(_three([t.new_empty(t.shape) for t in _each(given, "x")]))


def _save(ctx, inputs, output) -> None:
    x, weight, bias, ctx.activation, initial_state, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, final_gradient):
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(x)
    dx, dweight, *rest = backward(x, weight, bias, ctx.activation, initial_state, cu_seqlens, do, final_gradient)
    dbias = None if bias is None else rest.pop(0)
    return dx, dweight, dbias, None, None if initial_state is None else rest.pop(0), None


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


convolution = differentiable(short_conv_forward_op, _forward, _save, _gradients)
convolutions = differentiable(short_convs_forward_op, _several, _save_several, _several_gradients)
step = direct_when_eager(short_conv_step_op, _step, writes=StepInputs._fields.index("state"))
steps = direct_when_eager(short_conv_steps_op, _steps, writes=StepsInputs._fields.index("state0"))
prefill = direct_when_eager(short_conv_prefill_op, _prefill, writes=PrefillInputs._fields.index("state"))
prefills = direct_when_eager(short_convs_prefill_op, _prefills, writes=PrefillsInputs._fields.index("state0"))


def short_conv_triton(x, weight, bias, activation, initial_state, cu_seqlens) -> ScanOutput:
    """Compute `short_conv` with Triton kernels."""
    return ScanOutput(*convolution(x, weight, bias, activation, initial_state, cu_seqlens))


def short_convs_triton(xs, weights, activation, initial_states, cu_seqlens) -> tuple[ScanOutput, ...]:
    """Compute `short_convs` with a Triton kernel."""
    lacking = [None] * (3 - len(xs))
    states = [None] * 3 if initial_states is None else [*initial_states, *lacking]
    found = convolutions(*xs, *lacking, *weights, *lacking, activation, *states, cu_seqlens)
    return tuple(ScanOutput(found[i], found[3 + i]) for i in range(len(xs)))


def short_convs_prefill_triton(xs, weights, states, slots, fresh, activation, cu_seqlens) -> tuple[Tensor, ...]:
    """Compute `short_convs_prefill` with a Triton kernel."""
    given = (x for tensors in (xs, weights, states) for x in (*tensors, *[None] * (3 - len(tensors))))
    return tuple(prefills(*given, slots, fresh, activation, cu_seqlens)[: len(xs)])


def short_conv_step_triton(x, weight, bias, state, activation, slots) -> Tensor:
    """Compute `short_conv_step` with a Triton kernel."""
    return step(x, weight, bias, state, activation, slots)


def short_conv_steps_triton(xs, weights, states, activation, slots) -> tuple[Tensor, ...]:
    """Compute `short_conv_steps` with a Triton kernel."""
    given = (x for tensors in (xs, weights, states) for x in (*tensors, *[None] * (3 - len(tensors))))
    return tuple(steps(*given, activation, slots)[: len(xs)])
