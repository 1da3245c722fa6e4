"""The operation forward and backward, step by step, and as torch custom ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.launch.kernels import compiled_together
from tokenmix_core.ops.common import (
    aligned,
    differentiable,
    direct_when_eager,
    of_fields,
    parts_of,
    recorded_op,
    retried,
    room_for,
)
from tokenmix_nha.ops.slot_window.backward_gates import gate_gradients
from tokenmix_nha.ops.slot_window.backward_keys import key_gradients
from tokenmix_nha.ops.slot_window.backward_queries import query_gradients
from tokenmix_nha.ops.slot_window.backward_values import value_gradients
from tokenmix_nha.ops.slot_window.forward import window_outputs
from tokenmix_nha.ops.slot_window.plan import plan
from tokenmix_nha.ops.slot_window.states import chunk_gates, slot_gradients, slot_states
from tokenmix_nha.ops.slot_window.steps import (
    Backward,
    Gates,
    Gradients,
    Inputs,
    Kept,
    Layout,
    Results,
    empty_gradients,
    empty_results,
    empty_softmax,
    kept_layouts,
    layout,
)


class Outputs(NamedTuple):
    """Results, and what the backward pass needs of `Kept`, in one buffer of bytes."""

    o: Tensor
    final_k: Tensor
    final_v: Tensor
    kept: Tensor


class BackwardInputs(NamedTuple):
    """What a call was given, what it left, and the gradients of its results.

    Attributes:
        inputs: without initial slots, which no gradient needs.
        do, dfinal_k, dfinal_v: None is zero.
        initial: whether there were slots to begin with.
    """

    inputs: Inputs
    o: Tensor
    kept: Tensor
    do: Tensor | None
    dfinal_k: Tensor | None
    dfinal_v: Tensor | None
    initial: bool


@retried
@of_fields
def _forward(x: Inputs) -> Outputs:
    """Slots at the borders of chunks, then what each chunk's queries see of them and of the window."""
    x = x.aligned()
    y = layout(x)
    out = _empty_outputs(x, y)
    results, kept = Results(*out[:3]), Kept(*parts_of(out.kept, kept_layouts(x, y)))
    gluon = plan(y.M, y.window, x.impl, x.q, x.k, x.v, x.f, x.q_slots, x.k_slots).forward == "gluon"
    with compiled_together() as launch:
        if gluon:
            from tokenmix_nha.ops.slot_window.hopper.forward import hopper_window_outputs
            from tokenmix_nha.ops.slot_window.hopper.states import hopper_slot_states

            hopper_slot_states(launch, x, y, results, kept)
            hopper_window_outputs(launch, x, y, results, kept)
            # strong chunks find theirs themselves
            gates = Gates(None, None, None)
        else:
            gates = chunk_gates(launch, x, y, kept)
            slot_states(launch, x, y, gates, results, kept)
            window_outputs(launch, x, y, gates, results, kept, strong=False)
        window_outputs(launch, x, y, gates, results, kept, strong=True)
    return out


@retried
def _backward(given: BackwardInputs) -> Gradients:
    """The queries' gradients, those of the slots back along time, then those of keys, values and gates."""
    x = given.inputs.aligned()
    y = layout(x)
    kept = Kept(*parts_of(given.kept, kept_layouts(x, y)))
    do, dfinal_k, dfinal_v = map(aligned, (_or_zeros(given.do, given.o), given.dfinal_k, given.dfinal_v))
    grads = empty_gradients(x, given.initial)
    b = Backward(x, y, kept, given.o, do, dfinal_k, dfinal_v, grads)
    gluon = plan(y.M, y.window, x.impl, x.q, x.k, x.v, do, x.q_slots, x.k_slots).backward == "gluon"
    # strong chunks are always portable kernels'
    kinds = (True,) if gluon else (False, True)
    with compiled_together() as launch:
        # no kernel for weak chunks on Hopper reads gates
        gates = chunk_gates(launch, x, y, kept, only_strong=gluon)
        softmax = empty_softmax(x, y)
        if gluon:
            from tokenmix_nha.ops.slot_window.hopper.backward_queries import hopper_query_gradients

            hopper_query_gradients(launch, b, softmax)
        for strong in kinds:
            query_gradients(launch, b, gates, softmax, strong=strong)
        slots = slot_gradients(launch, b, softmax)
        if gluon and y.M == 32:
            from tokenmix_nha.ops.slot_window.hopper.backward_tokens import hopper_token_gradients

            hopper_token_gradients(launch, b, softmax, slots)
        elif gluon:
            from tokenmix_nha.ops.slot_window.hopper.backward_gates import hopper_gate_gradients
            from tokenmix_nha.ops.slot_window.hopper.backward_keys import hopper_key_gradients

            hopper_key_gradients(launch, b, softmax, slots)
            hopper_gate_gradients(launch, b, softmax, slots)
        for strong in kinds:
            value_gradients(launch, b, gates, softmax, slots, strong=strong)
            key_gradients(launch, b, gates, softmax, slots, strong=strong)
            gate_gradients(launch, b, gates, softmax, slots, strong=strong)
    return grads


def _or_zeros(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else gradient


slot_window_attention_op = recorded_op("tokenmix_nha::slot_window_attention", _forward, mutates_args=())


@slot_window_attention_op.register_fake
@of_fields
def _(x: Inputs) -> Outputs:
    return _empty_outputs(x, layout(x))


def _empty_outputs(x: Inputs, y: Layout) -> Outputs:
    return Outputs(*empty_results(x, y), x.q.new_empty(room_for(kept_layouts(x, y)), dtype=torch.uint8))


@of_fields
def _present(given: BackwardInputs) -> list[Tensor]:
    """`_backward` without gradients that there are not: an op returns tensors only."""
    return [grad for grad in _backward(given) if grad is not None]


slot_window_attention_backward_op = recorded_op(
    "tokenmix_nha::slot_window_attention_backward", _present, mutates_args=()
)
_backward_pass = direct_when_eager(slot_window_attention_backward_op, _present)


@slot_window_attention_backward_op.register_fake
@of_fields
def _(given: BackwardInputs) -> list[Tensor]:
    return [grad for grad in empty_gradients(given.inputs, given.initial) if grad is not None]


def _save(ctx, inputs, output) -> None:
    x, out = Inputs(*inputs), Outputs(*output)
    ctx.options = dict(before=x.before, window=x.window, scale=x.scale, impl=x.impl)
    ctx.initial = x.slots_k is not None
    # else torch would fill gradients of all outputs with zeros, those of the chunks' slots included
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x.q, x.k, x.v, x.f, x.q_slots, x.k_slots, x.start, x.cu_seqlens, out.o, out.kept)


def _gradients(ctx, do, dfinal_k, dfinal_v, *_):
    q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, kept = ctx.saved_tensors
    x = Inputs(
        q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots, slots_k=None, slots_v=None, start=start,
        cu_seqlens=cu_seqlens, **ctx.options,
    )  # fmt: skip
    dq, dk, dv, df, *grads = _backward_pass(*x, o, kept, do, dfinal_k, dfinal_v, ctx.initial)
    own = (None, None) if q_slots is None else (grads.pop(0), grads.pop(0))
    initial = grads if ctx.initial else (None, None)
    return dq, dk, dv, df, *own, *initial, *[None] * (len(Inputs._fields) - len(Gradients._fields))


# o and the final slots, by the kernels; keys are the window before the queries and theirs
slot_window_attention_kernels = differentiable(slot_window_attention_op, _forward, _save, _gradients, outputs=3)
