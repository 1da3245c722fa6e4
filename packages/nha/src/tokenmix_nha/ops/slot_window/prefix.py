"""Full attention with M zero slots before the keys, in about the time of causal attention.

A zero key has logit 0 and value 0, so that M zero keys only increase the denominator of the softmax. From o and lse of
plain causal attention, one pass computes `lse' = log(exp(lse) + M)` and `o' = exp(lse − lse') o`. The backward of
attention computes probabilities from lse and takes the row sums of `o · do`. Given o' and lse' instead, it returns the
gradients of the softmax with zero keys. The zero keys themselves have no gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops import (
    AttentionOutput,
    Call,
    Mask,
    attention,
    by_cudnn,
    cached_op,
    choose_impl,
    differentiable,
    kernels_before_plan,
    of_fields,
)
from tokenmix_core.ops import attention_autograd as autograd

_CAUSAL = Mask(causal=True, window=None, sinks=0)


def share_of_zeros(lse: Tensor, slots: int) -> Tensor:
    """Return the total probability of `slots` ≥ 1 logits of 0 that are added to a softmax with log-sum-exp `lse`."""
    return (math.log(slots) - lse).sigmoid()


def with_zeros(out: AttentionOutput, slots: int) -> Tensor:
    """Return the outputs after `slots` ≥ 0 logits of 0, with value 0, are added to the softmax of `out`."""
    if not slots:
        return out.o
    return (out.o * (out.lse - math.log(slots)).sigmoid().unsqueeze(-1)).to(out.o.dtype)


def zero_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, slots: int, scale: float, impl: str | None
) -> Tensor:
    """Return the outputs `[B, T, HQ, V]` of causal attention, with `slots` more logits of 0 in the softmax."""
    if impl == "reference":
        return with_zeros(attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens, impl="reference"), slots)
    if q.is_cuda:
        packed = cu_seqlens is not None
        heads = q.shape[0] * q.shape[2] if q.shape[2] == k.shape[2] else None
        sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        chosen = choose_impl(Call(q.device.type, q.dtype, *sizes, _CAUSAL, packed, heads))
        # core's own kernels are the fastest for this call, so the caller's `impl` selects among them
        requested, impl = impl, (None if impl == "gluon" else impl) if chosen == "triton" else chosen
        if requested is None and by_cudnn(impl, q, k, v, _CAUSAL, packed):
            impl = kernels_before_plan(q, k, v, _CAUSAL) or impl
    return _attention(*Inputs(q=q, k=k, v=v, cu_seqlens=cu_seqlens, slots=slots, scale=scale, impl=impl))[0]


class Inputs(NamedTuple):
    """The arguments of causal attention whose softmax has additional zero slots."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    slots: int
    scale: float
    impl: str | None


@of_fields
def _forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return o `[B, T, HQ, V]` and the log-sum-exp `[B, HQ, T]`, both including the zero slots."""
    from tokenmix_nha.ops.slot_window.prefix_kernel import add_zeros

    causal = autograd.Inputs(
        q=x.q, k=x.k, v=x.v, cu_seqlens=x.cu_seqlens, **_CAUSAL._asdict(), scale=x.scale, impl=x.impl
    )
    o, lse = autograd.attention_forward(*causal)
    return o, add_zeros(o, lse, x.slots)


def _empty_outputs(x: Inputs) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    batch, tokens, heads, _ = x.q.shape
    return x.q.new_empty(batch, tokens, heads, x.v.shape[-1]), x.q.new_empty(batch, heads, tokens, dtype=wide)


def _save(ctx, inputs, output):
    x = Inputs(*inputs)
    ctx.save_for_backward(x.q, x.k, x.v, *output, x.cu_seqlens)
    ctx.scale, ctx.impl = x.scale, x.impl
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, *_):
    rest = [None] * (len(Inputs._fields) - 3)
    if do is None:
        return None, None, None, *rest
    q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
    causal = autograd.Inputs(
        q=q, k=k, v=v, cu_seqlens=cu_seqlens, **_CAUSAL._asdict(), scale=ctx.scale, impl=ctx.impl
    )  # fmt: skip
    return *autograd.attention_backward(*causal, o, lse, do, None), *rest


_prefix_op = cached_op("tokenmix_nha::zero_prefix_attention", _forward, _empty_outputs)
_attention = differentiable(_prefix_op, _forward, _save, _gradients, outputs=1)
