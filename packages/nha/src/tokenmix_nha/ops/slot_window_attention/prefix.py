"""Full attention with M zero slots before the keys, for what attention costs.

A zero key has logit 0 and its value adds nothing, so M of them only enlarge the normaliser: with o and lse of plain
causal attention, `lse' = log(exp(lse) + M)` and `o' = exp(lse − lse') o`. Every attention backward recomputes the
probabilities from the log-sum-exp it is given and takes the row sums of `o · do`, so with o' and lse' in their place
it returns the
gradients of the prefixed softmax: the prefix itself has none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmix_core.ops.attention.api import attention
from tokenmix_core.ops.attention.autograd import attention_backward_op, attention_op
from tokenmix_core.ops.attention.backends import Call, Mask, choose_impl


def zero_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, slots: int, scale: float, impl: str
) -> Tensor:
    """Causal attention `[B, T, HQ, V]` whose softmax also holds `slots` logits 0 with value 0."""
    if impl == "reference":
        o, lse = attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens, impl="reference")
        total = torch.logaddexp(lse, torch.full_like(lse, math.log(slots)))
        return (o * (lse - total).exp().unsqueeze(-1)).to(o.dtype)
    packed = cu_seqlens is not None
    call = Call(q.device.type, q.dtype, q.shape[1], k.shape[1], q.shape[3], v.shape[3], Mask(True, None, 0), packed)
    return _prefix_op(q, k, v, cu_seqlens, slots, scale, choose_impl(call) if q.is_cuda else impl)[0]


@torch.library.custom_op("tokenmix_nha::zero_prefix_attention", mutates_args=())
def _prefix_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, slots: int, scale: float, impl: str
) -> tuple[Tensor, Tensor]:
    o, lse = attention_op(q, k, v, cu_seqlens, True, None, 0, scale, impl)
    total = torch.logaddexp(lse, torch.full_like(lse, math.log(slots)))
    return o.mul_((lse - total).exp().transpose(1, 2).unsqueeze(-1)), total


@_prefix_op.register_fake
def _(q, k, v, cu_seqlens, slots, scale, impl):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = q.shape
    return q.new_empty(batch, tokens, heads, v.shape[-1]), q.new_empty(batch, heads, tokens, dtype=wide)


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens, _, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx, do, _):
    q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
    grads = attention_backward_op(q, k, v, o, lse, do, None, cu_seqlens, True, None, 0, ctx.scale, ctx.impl)
    return *grads, None, None, None, None


_prefix_op.register_autograd(_backward, setup_context=_setup_context)
