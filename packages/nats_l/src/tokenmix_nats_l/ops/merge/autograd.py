"""The merge's kernels as a differentiable function: called directly in eager mode, as custom ops when compiled."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmix_core.ops import cached_op, differentiable, direct_when_eager, of_fields


class Inputs(NamedTuple):
    """The arguments of the merge, tensors first."""

    linear: Tensor
    softmax: Tensor
    gate: Tensor
    linear_norm: Tensor
    softmax_norm: Tensor | None
    logits: Tensor | None
    eps: float


class BackwardInputs(NamedTuple):
    """The arguments of the backward: those of the merge, and the gradient of its result."""

    inputs: Inputs
    dy: Tensor


def _contiguous(x: Inputs) -> dict:
    return {name: t.contiguous() if isinstance(t, Tensor) else t for name, t in x._asdict().items()}


@of_fields
def _forward(x: Inputs) -> Tensor:
    """Return y of `merge_operations`."""
    from tokenmix_nats_l.ops.merge.forward import merge_forward

    return merge_forward(**_contiguous(x))


@of_fields
def _all_gradients(given: BackwardInputs) -> tuple:
    """Return the gradients of all tensors in `Inputs`; None for a tensor that is None."""
    from tokenmix_nats_l.ops.merge.backward import merge_backward

    return merge_backward(**_contiguous(given.inputs), dy=given.dy.contiguous())


@of_fields
def _backward(given: BackwardInputs) -> list[Tensor]:
    """Return the gradients of those tensors in `Inputs` that are not None."""
    return [grad for grad in _all_gradients(*given.inputs, given.dy) if grad is not None]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy):
    tensors = ctx.saved_tensors
    if dy is None:
        return (None,) * len(Inputs._fields)
    grads = (x for x in backward(*tensors, ctx.eps, dy) if x is not None)
    return *(None if x is None else next(grads) for x in tensors), None


merge_forward_op = cached_op("tokenmix_nats_l::merge_forward", _forward, lambda x: x.gate.new_empty(x.gate.shape))
merge_backward_op = cached_op(
    "tokenmix_nats_l::merge_backward",
    _backward,
    lambda given: [t.new_empty(t.shape) for t in given.inputs[:6] if t is not None],
)
backward = direct_when_eager(merge_backward_op, _all_gradients)
merge_triton = differentiable(merge_forward_op, _forward, _save, _gradients)
