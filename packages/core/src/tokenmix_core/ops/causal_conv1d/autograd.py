"""The short convolution's kernels with autograd: called directly in eager mode, as torch custom ops under tracing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmix_core.chunking import num_sequences
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields
from tokenmix_core.ops.causal_conv1d.backward import short_convs_backward
from tokenmix_core.ops.causal_conv1d.forward import short_conv_steps, short_convs_forward
from tokenmix_core.ops.causal_conv1d.types import (
    BackwardInputs,
    Inputs,
    PrefillInputs,
    PrefillsInputs,
    SeveralBackwardInputs,
    SeveralInputs,
    SeveralStates,
    StepInputs,
    StepsInputs,
)
from tokenmix_core.ops.slots import pool_of
from tokenmix_core.ops.types import ScanOutput


def _each(step: Any, name: str) -> list[Tensor]:
    """Return the fields `name0` to `name2` of a NamedTuple that are not None."""
    return [x for i in range(3) if (x := getattr(step, f"{name}{i}")) is not None]


def _listed(x: Tensor | None) -> list[Tensor] | None:
    return None if x is None else [x]


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return three tensors: the given ones and, if they are two, an empty tensor."""
    return [*tensors, *(tensors[0].new_empty(0) for _ in range(3 - len(tensors)))]


def _empty(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Allocate a contiguous tensor like each one that is not None."""
    return [x.new_empty(x.shape) for x in tensors if x is not None]


def _last_inputs(x: Tensor, cu_seqlens: Tensor | None, weight: Tensor) -> Tensor:
    """Allocate a final state: the last W − 1 inputs of each sequence."""
    return x.new_empty((num_sequences(x, cu_seqlens), len(weight), weight.shape[1] - 1))


@of_fields
def _forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Return o, and the last W − 1 inputs of each sequence."""
    x, weight, bias, activation, initial_state, cu_seqlens = given
    (o,), (final_state,) = short_convs_forward([x], [weight], bias, activation, _listed(initial_state), cu_seqlens)
    return o, final_state


@of_fields
def _backward(given: BackwardInputs) -> list[Tensor]:
    """Return the gradients of x, weight, bias and initial state, without those of an absent bias or state."""
    (x, weight, bias, activation, initial_state, cu_seqlens), do, final_gradient = given
    (dx,), dweight, dbias, initial_gradients = short_convs_backward(
        [x], [weight], bias, activation, _listed(initial_state), cu_seqlens, [do], _listed(final_gradient)
    )
    return [dx, dweight, *([] if dbias is None else [dbias]), *initial_gradients]


@of_fields
def _several(given: SeveralInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return o of each of three inputs, then their three final states; with two inputs, each third tensor is empty."""
    outputs, final_states = short_convs_forward(
        _each(given, "x"), _each(given, "weight"), None, given.activation, _each(given, "initial") or None,
        given.cu_seqlens,
    )  # fmt: skip
    return *_three(outputs), *_three(final_states)  # type: ignore[return-value]


def _empty_several(given: SeveralInputs) -> tuple[Tensor, ...]:
    final_states = [_last_inputs(given.x0, given.cu_seqlens, w) for w in _each(given, "weight")]
    return *_three(_empty(_each(given, "x"))), *_three(final_states)


@of_fields
def _several_backward(given: SeveralBackwardInputs) -> list[Tensor]:
    """Return the gradients of the inputs, of all weights together `[sum of D, W]`, and of the initial states, if any.

    The weights have one gradient tensor, because tensors that an operator returns may not share memory.
    """
    x = given.inputs
    dxs, dweights, _, initial_gradients = short_convs_backward(
        _each(x, "x"), _each(x, "weight"), None, x.activation, _each(x, "initial") or None, x.cu_seqlens,
        _each(given, "do"), _each(given, "dfinal") or None,
    )  # fmt: skip
    return [*dxs, dweights, *initial_gradients]


def _empty_several_gradients(given: SeveralBackwardInputs) -> list[Tensor]:
    weights = _each(given.inputs, "weight")
    dweights = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]))
    return [*_empty(_each(given.inputs, "x")), dweights, *_empty(_each(given.inputs, "initial"))]


@of_fields
def _prefill(given: PrefillInputs) -> Tensor:
    """Return o of whole sequences, and update their slots."""
    x, weight, bias, state, slots, fresh, activation, cu_seqlens = given
    pools = [pool_of(state, slots, fresh)]
    return short_convs_forward([x], [weight], bias, activation, None, cu_seqlens, pools)[0][0]


@of_fields
def _prefills(given: PrefillsInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return o of whole sequences for two or three inputs, and update their slots; for two, the third o is empty."""
    x = given.tensors
    pools = [pool_of(state, given.slots, given.fresh) for state in _each(x, "state")]
    xs, weights = _each(x, "x"), _each(x, "weight")
    o0, o1, o2 = _three(short_convs_forward(xs, weights, None, given.activation, None, given.cu_seqlens, pools)[0])
    return o0, o1, o2


@of_fields
def _step(given: StepInputs) -> Tensor:
    """Return o of one token, and update the state."""
    x, weight, bias, state, activation, slots = given
    return short_conv_steps([x], [weight], bias, [state], activation, slots)[0]


@of_fields
def _steps(given: StepsInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return o of one token for three inputs, and update their states; with two inputs, the third tensor is empty."""
    x = given.tensors
    tensors = _each(x, "x"), _each(x, "weight"), None, _each(x, "state")
    o0, o1, o2 = _three(short_conv_steps(*tensors, given.activation, given.slots))
    return o0, o1, o2


def _empty_three(given: PrefillsInputs | StepsInputs) -> tuple[Tensor, ...]:
    return tuple(_three(_empty(_each(given.tensors, "x"))))


short_conv_forward_op = cached_op(
    "tokenmix_core::short_conv_forward", _forward,
    lambda x: (x.x.new_empty(x.x.shape), _last_inputs(x.x, x.cu_seqlens, x.weight)),
)  # fmt: skip
short_conv_backward_op = cached_op(
    "tokenmix_core::short_conv_backward", _backward,
    lambda given: _empty([given.inputs[i] for i in (0, 1, 2, 4)]),
)  # fmt: skip
short_convs_forward_op = cached_op("tokenmix_core::short_convs_forward", _several, _empty_several)
short_convs_backward_op = cached_op("tokenmix_core::short_convs_backward", _several_backward, _empty_several_gradients)
short_conv_prefill_op = cached_op(
    "tokenmix_core::short_conv_prefill", _prefill, lambda x: x.x.new_empty(x.x.shape), mutates_args={"state"}
)
short_conv_step_op = cached_op(
    "tokenmix_core::short_conv_step", _step, lambda x: x.x.new_empty(x.x.shape), mutates_args={"state"}
)
_STATES = {"state0", "state1", "state2"}
short_convs_prefill_op = cached_op("tokenmix_core::short_convs_prefill", _prefills, _empty_three, mutates_args=_STATES)
short_conv_steps_op = cached_op("tokenmix_core::short_conv_steps", _steps, _empty_three, mutates_args=_STATES)
backward = direct_when_eager(short_conv_backward_op, _backward)
several_backward = direct_when_eager(short_convs_backward_op, _several_backward)


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
prefill = direct_when_eager(short_conv_prefill_op, _prefill, writes=PrefillInputs._fields.index("state"))
prefills = direct_when_eager(short_convs_prefill_op, _prefills, writes=SeveralStates._fields.index("state0"))
step = direct_when_eager(short_conv_step_op, _step, writes=StepInputs._fields.index("state"))
steps = direct_when_eager(short_conv_steps_op, _steps, writes=SeveralStates._fields.index("state0"))


def _padded(*groups: Sequence[Tensor]) -> list[Tensor | None]:
    """Return three arguments of an operator for each group of tensors: the group, then None."""
    return [x for tensors in groups for x in (*tensors, *[None] * (3 - len(tensors)))]


def short_convs_triton(xs, weights, activation, initial_states, cu_seqlens) -> tuple[ScanOutput, ...]:
    """Compute `short_convs` with a Triton kernel."""
    found = convolutions(*_padded(xs, weights), activation, *_padded(initial_states or ()), cu_seqlens)
    return tuple(ScanOutput(found[i], found[3 + i]) for i in range(len(xs)))


def prefill_triton(xs, weights, bias, states, slots, fresh, activation, cu_seqlens) -> tuple[Tensor, ...]:
    """Compute a prefill of one to three inputs with a Triton kernel; only a single input may have a bias."""
    if len(xs) == 1:
        return (prefill(xs[0], weights[0], bias, states[0], slots, fresh, activation, cu_seqlens),)
    return tuple(prefills(*_padded(xs, weights, states), slots, fresh, activation, cu_seqlens)[: len(xs)])


def steps_triton(xs, weights, bias, states, activation, slots) -> tuple[Tensor, ...]:
    """Compute a decoding step of one to three inputs with a Triton kernel; only a single input may have a bias."""
    if len(xs) == 1:
        return (step(xs[0], weights[0], bias, states[0], activation, slots),)
    return tuple(steps(*_padded(xs, weights, states), activation, slots)[: len(xs)])
