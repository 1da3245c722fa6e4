"""Attention for chosen queries, by core's kernels: directly in eager mode, as torch custom ops where torch traces."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op, retried
from tokenmix_core.ops.softmax_attention.backends import Mask

CAUSAL = Mask(causal=True, window=None, sinks=0)


@retried
def _forward(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, cu_seqlens: Tensor | None, scale: float, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`, +∞ for queries that are not selected."""
    from tokenmix_core.ops.softmax_attention.forward import attention_forward

    return attention_forward(q, k, v, cu_seqlens, CAUSAL, scale, selected.contiguous(), impl=impl)


selected_attention_op = recorded_op("tokenmix_oryx::selected_attention", _forward, mutates_args=())


@selected_attention_op.register_fake
def _(q, k, v, selected, cu_seqlens, scale, impl=None):
    B, TQ, HQ, _ = q.shape
    return q.new_empty(B, TQ, HQ, v.shape[-1]), q.new_empty(B, HQ, TQ, dtype=torch.float32)


@retried
def _backward(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    cu_seqlens: Tensor | None, scale: float, impl: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv."""
    from tokenmix_core.ops.softmax_attention.backward import attention_backward

    selected = selected.contiguous()
    return attention_backward(q, k, v, o, lse, do, None, cu_seqlens, CAUSAL, scale, selected, impl=impl)


selected_attention_backward_op = recorded_op("tokenmix_oryx::selected_attention_backward", _backward, mutates_args=())
selected_attention_backward = direct_when_eager(selected_attention_backward_op, _backward)


@selected_attention_backward_op.register_fake
def _(q, k, v, selected, o, lse, do, cu_seqlens, scale, impl=None):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, selected, cu_seqlens, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(q, k, v, selected, *output, cu_seqlens)


def _gradients(ctx, do, dlse):
    q, k, v, selected, o, lse, cu_seqlens = ctx.saved_tensors
    grads = selected_attention_backward(q, k, v, selected, o, lse, do, cu_seqlens, ctx.scale, ctx.impl)
    return *grads, None, None, None, None


selected_attention = differentiable(selected_attention_op, _forward, _save, _gradients)
