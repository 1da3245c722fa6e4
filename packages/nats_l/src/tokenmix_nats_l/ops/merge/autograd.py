"""The merge's kernels as a differentiable function: direct in eager mode, custom ops where torch traces."""

from __future__ import annotations

from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op


def _contiguous(*tensors: Tensor | None) -> list:
    return [x if x is None else x.contiguous() for x in tensors]


def run_forward(linear, softmax, gate, linear_norm, softmax_norm, logits, eps) -> Tensor:
    """y."""
    from tokenmix_nats_l.ops.merge.forward import merge_forward

    return merge_forward(*_contiguous(linear, softmax, gate, linear_norm, softmax_norm, logits), eps)


def run_backward(
    linear, softmax, gate, linear_norm, softmax_norm, logits, dy, eps
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the tensors, in their order."""
    from tokenmix_nats_l.ops.merge.backward import merge_backward

    return merge_backward(*_contiguous(linear, softmax, gate, linear_norm, softmax_norm, logits, dy), eps)


@recorded_op("tokenmix_nats_l::merge_forward", mutates_args=())
def merge_forward_op(
    linear: Tensor, softmax: Tensor, gate: Tensor, linear_norm: Tensor, softmax_norm: Tensor | None,
    logits: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """`run_forward` for torch to trace."""
    return run_forward(linear, softmax, gate, linear_norm, softmax_norm, logits, eps)


@merge_forward_op.register_fake
def _(linear, softmax, gate, linear_norm, softmax_norm, logits, eps):
    return gate.new_empty(gate.shape)


@recorded_op("tokenmix_nats_l::merge_backward", mutates_args=())
def merge_backward_op(
    linear: Tensor, softmax: Tensor, gate: Tensor, linear_norm: Tensor, softmax_norm: Tensor | None,
    logits: Tensor | None, dy: Tensor, eps: float,
) -> list[Tensor]:  # fmt: skip
    """`run_backward` for torch to trace, without what does not exist."""
    grads = run_backward(linear, softmax, gate, linear_norm, softmax_norm, logits, dy, eps)
    return [x for x in grads if x is not None]


@merge_backward_op.register_fake
def _(*inputs):
    return [x.new_empty(x.shape) for x in inputs[:6] if x is not None]


backward = direct_when_eager(merge_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dy):
    saved = ctx.saved_tensors
    if dy is None:
        return (None,) * 7
    grads = (x for x in backward(*saved, dy, ctx.eps) if x is not None)
    return *(None if x is None else next(grads) for x in saved), None


merge_triton = differentiable(merge_forward_op, run_forward, _save, _gradients)
