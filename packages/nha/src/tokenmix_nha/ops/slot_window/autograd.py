"""Forward and backward of slot-window attention: sequences of kernel launches, also registered as torch custom ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels import compiled_together
from tokenmix_core.ops import (
    aligned,
    buffer_bytes,
    buffer_views,
    cached_op,
    differentiable,
    direct_when_eager,
    of_fields,
    retried,
    zero_padding,
)
from tokenmix_nha.ops.slot_window.backward_gates import gate_gradients
from tokenmix_nha.ops.slot_window.backward_queries import query_gradients
from tokenmix_nha.ops.slot_window.backward_tokens import token_gradients
from tokenmix_nha.ops.slot_window.chunk_gates import chunk_gates
from tokenmix_nha.ops.slot_window.forward import window_outputs
from tokenmix_nha.ops.slot_window.plan import plan
from tokenmix_nha.ops.slot_window.ring import store_rings
from tokenmix_nha.ops.slot_window.states import slot_gradients, slot_states
from tokenmix_nha.ops.slot_window.types import (
    Backward,
    Gates,
    Gradients,
    Inputs,
    Layout,
    Pool,
    PrefillInputs,
    Results,
    Saved,
    empty_gradients,
    empty_results,
    empty_softmax,
    layout,
    saved_layouts,
)


class Outputs(NamedTuple):
    """The results of the forward pass, and the fields of `Saved` in one buffer of bytes."""

    o: Tensor
    final_k: Tensor
    final_v: Tensor
    saved: Tensor


class BackwardInputs(NamedTuple):
    """Inputs of the backward pass: arguments and saved tensors of a forward call, and the gradients of its results.

    Attributes:
        inputs: the call's arguments, without the initial slots, which the backward pass does not need.
        do, dfinal_k, dfinal_v: gradients of the results; None stands for zero.
        initial: True if the call had initial slots, whose gradients are then computed.
    """

    inputs: Inputs
    o: Tensor
    saved: Tensor
    do: Tensor | None
    dfinal_k: Tensor | None
    dfinal_v: Tensor | None
    initial: bool


@retried
@of_fields
def _forward(x: Inputs) -> Outputs:
    """Return the outputs, the final slots, and the activations that the backward pass needs."""
    x = x.aligned()
    y = layout(x)
    out = _empty_outputs(x, y)
    with compiled_together() as launch:
        _run(launch, x, y, Results(*out[:3]), out.saved)
    zero_padding(x.cu_seqlens, out.o)
    return out


@retried
@of_fields
def _prefill(given: PrefillInputs) -> Tensor:
    """Return o of whole sequences, and overwrite their slots of the pool."""
    pool = given.pool._replace(**{name: aligned(getattr(given.pool, name)) for name in ("slots", "fresh")})
    window = pool.ring_k.shape[1]
    x = Inputs(
        q=given.q, k=given.k, v=given.v, f=given.f, q_slots=given.q_slots, k_slots=given.k_slots, slots_k=pool.pool_k,
        slots_v=pool.pool_v, start=None, cu_seqlens=given.cu_seqlens, before=window, window=window, scale=given.scale,
        impl=given.impl,
    )  # fmt: skip
    tokens = Inputs(*x[:6], None, None, *x[8:]).aligned()
    x = tokens._replace(slots_k=pool.pool_k, slots_v=pool.pool_v)
    y = layout(x, carried=True)
    o = x.q.new_empty(*x.q.shape[:3], y.V)
    saved = x.q.new_empty(buffer_bytes(saved_layouts(x, y)), dtype=torch.uint8)
    with compiled_together() as launch:
        _run(launch, x, y, Results(o, pool.pool_k, pool.pool_v), saved, pool)
        store_rings(launch, x, y, pool)
    zero_padding(x.cu_seqlens, o)
    return o


def _run(launch, x: Inputs, y: Layout, results: Results, buffer: Tensor, pool: Pool | None = None) -> None:
    """Compute the slots before each chunk by a scan, then the outputs of all query chunks in parallel.

    `buffer` receives the activations that a backward pass needs. With `pool`, sequences start from its slots, and
    `results` has its tensors.
    """
    saved = Saved(*buffer_views(buffer, saved_layouts(x, y)))
    gluon = plan(y.M, y.window, x.impl, x.q, x.k, x.v, x.f, x.q_slots, x.k_slots).forward == "gluon"
    if gluon:
        from tokenmix_nha.ops.slot_window.hopper.forward import hopper_window_outputs
        from tokenmix_nha.ops.slot_window.hopper.states import hopper_slot_states

        hopper_slot_states(launch, x, y, results, saved, pool)
        hopper_window_outputs(launch, x, y, results, saved, pool)
        # no gate factors: the kernel for strong chunks (a slot decays by over 80 bits) then computes them itself
        gates = Gates(None, None, None)
    else:
        gates = chunk_gates(launch, x, y, saved, pool)
        slot_states(launch, x, y, gates, results, saved, pool)
        window_outputs(launch, x, y, gates, results, saved, pool, strong=False)
    window_outputs(launch, x, y, gates, results, saved, pool, strong=True)


@retried
def _backward(given: BackwardInputs) -> Gradients:
    """Compute gradients of queries, then of slots by a reverse scan, then of keys, values and gates."""
    x = given.inputs.aligned()
    y = layout(x)
    saved = Saved(*buffer_views(given.saved, saved_layouts(x, y)))
    do, dfinal_k, dfinal_v = map(aligned, (_or_zeros(given.do, given.o), given.dfinal_k, given.dfinal_v))
    grads = empty_gradients(x, given.initial)
    b = Backward(x, y, saved, given.o, do, dfinal_k, dfinal_v, grads)
    gluon = plan(y.M, y.window, x.impl, x.q, x.k, x.v, do, x.q_slots, x.k_slots).backward == "gluon"
    # strong chunks, in which a slot decays by more than 80 bits, always run in Triton kernels
    strengths = (True,) if gluon else (False, True)
    with compiled_together() as launch:
        # the Gluon kernels for weak chunks (no slot decays by over 80 bits) compute their gates' factors themselves
        gates = chunk_gates(launch, x, y, saved, only_strong=gluon)
        softmax = empty_softmax(x, y)
        if gluon:
            from tokenmix_nha.ops.slot_window.hopper.backward_queries import hopper_query_gradients

            hopper_query_gradients(launch, b, softmax)
        for strong in strengths:
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
        for strong in strengths:
            token_gradients(launch, b, gates, softmax, slots, strong=strong)
            gate_gradients(launch, b, gates, softmax, slots, strong=strong)
    queries, keys = (grads.dq, grads.dq_slots), (grads.dk, grads.dv, grads.df, grads.dk_slots)
    # with a carried window, the keys of each sequence begin with that window's tokens, which cu_seqlens does not count
    zero_padding(x.cu_seqlens, *queries, *(() if x.before else keys))
    if x.before:
        zero_padding(x.cu_seqlens, *keys, before=x.before)
    return grads


def _or_zeros(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else gradient


def _empty_outputs(x: Inputs, y: Layout) -> Outputs:
    return Outputs(*empty_results(x, y), x.q.new_empty(buffer_bytes(saved_layouts(x, y)), dtype=torch.uint8))


@of_fields
def _present(given: BackwardInputs) -> list[Tensor]:
    """Run `_backward` and drop the gradients that are None, because a custom op must return tensors."""
    return [grad for grad in _backward(given) if grad is not None]


def _save(ctx, inputs, output) -> None:
    x, out = Inputs(*inputs), Outputs(*output)
    ctx.options = dict(before=x.before, window=x.window, scale=x.scale, impl=x.impl)
    ctx.initial = x.slots_k is not None
    # otherwise torch would allocate zeros as gradients of all unused outputs, even of the buffer of saved activations
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x.q, x.k, x.v, x.f, x.q_slots, x.k_slots, x.start, x.cu_seqlens, out.o, out.saved)


def _gradients(ctx, do, dfinal_k, dfinal_v, *_):
    q, k, v, f, q_slots, k_slots, start, cu_seqlens, o, saved = ctx.saved_tensors
    x = Inputs(
        q=q, k=k, v=v, f=f, q_slots=q_slots, k_slots=k_slots, slots_k=None, slots_v=None, start=start,
        cu_seqlens=cu_seqlens, **ctx.options,
    )  # fmt: skip
    dq, dk, dv, df, *grads = _backward_pass(*x, o, saved, do, dfinal_k, dfinal_v, ctx.initial)
    own = (None, None) if q_slots is None else (grads.pop(0), grads.pop(0))
    initial = grads if ctx.initial else (None, None)
    return dq, dk, dv, df, *own, *initial, *[None] * (len(Inputs._fields) - len(Gradients._fields))


slot_window_attention_op = cached_op(
    "tokenmix_nha::slot_window_attention", _forward, lambda x: _empty_outputs(x, layout(x))
)
slot_window_attention_backward_op = cached_op(
    "tokenmix_nha::slot_window_attention_backward",
    _present,
    lambda given: [grad for grad in empty_gradients(given.inputs, given.initial) if grad is not None],
)
_backward_pass = direct_when_eager(slot_window_attention_backward_op, _present)
slot_window_prefill_op = cached_op(
    "tokenmix_nha::slot_window_prefill",
    _prefill,
    lambda x: x.q.new_empty(*x.q.shape[:3], x.v.shape[3]),
    mutates_args=[name for name in Pool._fields if name not in ("slots", "fresh")],
)
# takes the fields of `PrefillInputs`; returns o
prefill = direct_when_eager(slot_window_prefill_op, _prefill, writes=PrefillInputs._fields.index("pool"))
# takes the fields of `Inputs`, where each sequence's keys follow those of its carried window; returns o and final slots
slot_window_attention_kernels = differentiable(slot_window_attention_op, _forward, _save, _gradients, outputs=3)
