"""The scorer's kernels as a differentiable function: called directly in eager mode, as custom ops under tracing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmix_core.ops import cached_op, differentiable, direct_when_eager, of_fields, retried, zero_padding
from tokenmix_lte.ops.scorer.types import BackwardInputs, Inputs

# number of differentiable fields of `Inputs` (k, v, three convolutions, linear map), and number of all tensor fields
_DIFFERENTIABLE, _TENSORS = 10, 13


@retried
@of_fields
def _forward(x: Inputs) -> Tensor:
    """Compute the logits."""
    if x.takes_gluon():
        from tokenmix_lte.ops.scorer.hopper.forward import hopper_scorer_forward as scorer_forward
    else:
        from tokenmix_lte.ops.scorer.forward import scorer_forward

    logits = scorer_forward(x.readable(), x.sizes())
    zero_padding(x.cu_seqlens, logits)
    return logits


@retried
@of_fields
def _backward(given: BackwardInputs) -> list[Tensor]:
    """Compute the gradients of the differentiable inputs, layer by layer from the last to the first."""
    if given.inputs.takes_gluon():
        from tokenmix_lte.ops.scorer.hopper.backward import hopper_layer_backward as layer_backward
        from tokenmix_lte.ops.scorer.hopper.forward import hopper_scorer_recompute as scorer_recompute
    else:
        from tokenmix_lte.ops.scorer.backward import scorer_layer_backward as layer_backward
        from tokenmix_lte.ops.scorer.forward import scorer_recompute

    sizes, x = given.inputs.sizes(), given.inputs.readable()
    z1, z2, dz3, dweight, dbias = scorer_recompute(x, given.dlogits.contiguous(), sizes)
    (dz2,), dw3, dbias3 = layer_backward(x, sizes, layer=2, inputs=(z2,), dz=dz3, w=x.w3)
    (dz1,), dw2, dbias2 = layer_backward(x, sizes, layer=1, inputs=(z1,), dz=dz2, w=x.w2)
    (dk, dv), dw1, dbias1 = layer_backward(x, sizes, layer=0, inputs=(x.k, x.v), dz=dz1, w=x.w1)
    # copy both, because they are views of one tensor, and outputs of an operator must not share memory
    linear_grads = (t.clone(memory_format=torch.contiguous_format) for t in (dweight, dbias))
    grads = dk, dv, dw1, dbias1, dw2, dbias2, dw3, dbias3, *linear_grads
    grads = [grad.to(t.dtype) for grad, t in zip(grads, given.inputs[:_DIFFERENTIABLE], strict=True)]
    zero_padding(x.cu_seqlens, *grads[:2])
    return grads


scorer_forward_op = cached_op("tokenmix_lte::scorer_forward", _forward, mutates_args=())


@scorer_forward_op.register_fake
@of_fields
def _(x: Inputs):
    return x.k.new_empty(x.k.shape[:3], dtype=torch.float32)


scorer_backward_op = cached_op("tokenmix_lte::scorer_backward", _backward, mutates_args=())


@scorer_backward_op.register_fake
@of_fields
def _(given: BackwardInputs):
    return [x.new_empty(x.shape) for x in given.inputs[:_DIFFERENTIABLE]]


backward = direct_when_eager(scorer_backward_op, _backward)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx, dlogits):
    rest = [None] * (len(Inputs._fields) - _DIFFERENTIABLE)
    if dlogits is None:
        return *[None] * _DIFFERENTIABLE, *rest
    return *backward(*ctx.saved_tensors, *ctx.options, dlogits), *rest


scorer = differentiable(scorer_forward_op, _forward, _save, _gradients)


def retention_logits_kernels(
    k, v, convs, weight, bias, *, offsets: Sequence[int], begin, cu_seqlens, seed, threshold, impl
):
    """Compute `retention_logits` by the Triton or the Gluon kernels, as `impl` says."""
    (w1, bias1), (w2, bias2), (w3, bias3) = convs
    first, middle, last = offsets
    x = Inputs(
        k=k, v=v, w1=w1, bias1=bias1, w2=w2, bias2=bias2, w3=w3, bias3=bias3, weight=weight, bias=bias, begin=begin,
        cu_seqlens=cu_seqlens, seed=seed, threshold=threshold, first=first, middle=middle, last=last,
        impl=impl,
    )  # fmt: skip
    return scorer(*x)
