"""Attention for selected queries by core's kernels: direct in eager mode, custom ops under torch.compile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import Mask, cached_op, differentiable, direct_when_eager, of_fields, retried, zero_padding

CAUSAL = Mask(causal=True, window=None, sinks=0)


class Inputs(NamedTuple):
    """The arguments of attention for selected queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    selected: Tensor
    cu_seqlens: Tensor | None
    scale: float
    impl: str | None

    def readable(self) -> dict[str, Any]:
        """Return the arguments by name, as the kernels read them."""
        return self._replace(selected=self.selected.contiguous())._asdict()


class BackwardInputs(NamedTuple):
    """The arguments of the backward: the forward's, its o and log-sum-exp `[B, HQ, TQ]`, and the gradient of o."""

    inputs: Inputs
    o: Tensor
    lse: Tensor
    do: Tensor


@retried
@of_fields
def _forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`, which is +∞ for queries that are not selected.

    At padding both are 0.
    """
    from tokenmix_core.ops import attention_forward

    o, lse = attention_forward(**x.readable(), mask=CAUSAL)
    zero_padding(x.cu_seqlens, o, lse.transpose(1, 2))
    return o, lse


def _empty_outputs(x: Inputs) -> tuple[Tensor, Tensor]:
    B, TQ, HQ, _ = x.q.shape
    return x.q.new_empty(B, TQ, HQ, x.v.shape[-1]), x.q.new_empty(B, HQ, TQ, dtype=torch.float32)


@retried
@of_fields
def _backward(given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    from tokenmix_core.ops import attention_backward

    x, o, lse, do = given
    grads = attention_backward(**x.readable(), o=o, lse=lse, do=do, dlse=None, mask=CAUSAL)
    zero_padding(x.cu_seqlens, *grads)
    return grads


def _save(ctx, inputs, output):
    x, (o, lse) = Inputs(*inputs), output
    ctx.save_for_backward(x.q, x.k, x.v, x.selected, o, lse, x.cu_seqlens)
    ctx.scale, ctx.impl = x.scale, x.impl


def _gradients(ctx, do, dlse):
    q, k, v, selected, o, lse, cu_seqlens = ctx.saved_tensors
    x = Inputs(q=q, k=k, v=v, selected=selected, cu_seqlens=cu_seqlens, scale=ctx.scale, impl=ctx.impl)
    return *selected_attention_backward(*x, o, lse, do), *[None] * (len(Inputs._fields) - 3)


selected_attention_op = cached_op("tokenmix_oryx::selected_attention", _forward, _empty_outputs)
selected_attention_backward_op = cached_op(
    "tokenmix_oryx::selected_attention_backward",
    _backward,
    lambda given: tuple(x.new_empty(x.shape) for x in given.inputs[:3]),
)
selected_attention_backward = direct_when_eager(selected_attention_backward_op, _backward)
selected_attention = differentiable(selected_attention_op, _forward, _save, _gradients)
