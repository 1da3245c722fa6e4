"""The scorer's kernels as a differentiable function: direct in eager mode, custom ops where torch traces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op
from tokenmix_lte.ops.scorer.sizes import sizes

# k, v, weights and biases of three convolutions, weight and bias of the linear map
_DIFFERENTIABLE = 10


def _prepared(k, v, tensors, offsets):
    """k, v, all weights as kernels read them, and the sizes of the call."""
    from tokenmix_lte.ops.scorer.forward import taps_first

    *convs, weight, bias = tensors
    chosen = sizes(k, [kernel.shape[1] for kernel in convs[::2]], offsets)
    weights = [taps_first(x, k.dtype) if i % 2 == 0 else x.contiguous() for i, x in enumerate(convs)]
    return k.contiguous(), v.contiguous(), [*weights, weight.contiguous(), bias.contiguous()], chosen


def run_forward(
    k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, threshold, first, middle, last
) -> Tensor:
    """The logits."""
    from tokenmix_lte.ops.scorer.forward import scorer_forward

    tensors = w1, bias1, w2, bias2, w3, bias3, weight, bias
    k, v, weights, chosen = _prepared(k, v, tensors, (first, middle, last))
    return scorer_forward(k, v, weights, begin, cu_seqlens, seed, threshold, chosen)


def run_backward(
    k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, dlogits, threshold, first, middle,
    last,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the first ten tensors."""
    from tokenmix_lte.ops.scorer.backward import scorer_layer_backward
    from tokenmix_lte.ops.scorer.forward import scorer_beginnings

    tensors = w1, bias1, w2, bias2, w3, bias3, weight, bias
    k, v, weights, chosen = _prepared(k, v, tensors, (first, middle, last))
    rest = begin, cu_seqlens, seed, threshold
    z1, z2, dz3, dweight, dbias = scorer_beginnings(k, v, weights, *rest, dlogits.contiguous(), chosen)
    (dz2,), dw3, dbias3 = scorer_layer_backward(2, (z2,), dz3, weights[4], *rest, chosen)
    (dz1,), dw2, dbias2 = scorer_layer_backward(1, (z1,), dz2, weights[2], *rest, chosen)
    (dk, dv), dw1, dbias1 = scorer_layer_backward(0, (k, v), dz1, weights[0], *rest, chosen)
    grads = dw1, dbias1, dw2, dbias2, dw3, dbias3, dweight.contiguous(), dbias.contiguous()
    return [dk, dv, *(grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=True))]


@recorded_op("tokenmix_lte::scorer_forward", mutates_args=())
def scorer_forward_op(
    k: Tensor, v: Tensor, w1: Tensor, bias1: Tensor, w2: Tensor, bias2: Tensor, w3: Tensor, bias3: Tensor,
    weight: Tensor, bias: Tensor, begin: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None,
    threshold: int, first: int, middle: int, last: int,
) -> Tensor:  # fmt: skip
    """`run_forward` for torch to trace."""
    return run_forward(
        k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, threshold, first, middle, last
    )


@scorer_forward_op.register_fake
def _(k, *_):
    return k.new_empty(k.shape[:3], dtype=torch.float32)


@recorded_op("tokenmix_lte::scorer_backward", mutates_args=())
def scorer_backward_op(
    k: Tensor, v: Tensor, w1: Tensor, bias1: Tensor, w2: Tensor, bias2: Tensor, w3: Tensor, bias3: Tensor,
    weight: Tensor, bias: Tensor, begin: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None,
    dlogits: Tensor, threshold: int, first: int, middle: int, last: int,
) -> list[Tensor]:  # fmt: skip
    """`run_backward` for torch to trace."""
    return run_backward(
        k, v, w1, bias1, w2, bias2, w3, bias3, weight, bias, begin, cu_seqlens, seed, dlogits, threshold, first,
        middle, last,
    )  # fmt: skip


@scorer_backward_op.register_fake
def _(*inputs):
    return [x.new_empty(x.shape) for x in inputs[:_DIFFERENTIABLE]]


backward = direct_when_eager(scorer_backward_op, run_backward)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:-4])
    ctx.options = inputs[-4:]
    ctx.set_materialize_grads(False)


def _gradients(ctx, dlogits):
    rest = (None,) * 7
    if dlogits is None:
        return (None,) * _DIFFERENTIABLE + rest
    return *backward(*ctx.saved_tensors, dlogits, *ctx.options), *rest


scorer = differentiable(scorer_forward_op, run_forward, _save, _gradients)


def retention_logits_triton(k, v, convs, weight, bias, offsets: Sequence[int], begin, cu_seqlens, seed, threshold):
    """`retention_logits` by Triton."""
    flat = [x for conv in convs for x in conv]
    return scorer(k, v, *flat, weight, bias, begin, cu_seqlens, seed, threshold, *offsets)
