"""Attention forward and backward: directly in eager mode, as torch custom ops where torch traces.

Also which backend runs forward and which one answers for the gradient.

Any backward can be paired with any forward, since all it needs are q, k, v, o and the log-sum-exp. The fast libraries'
own backwards know no gradient of the log-sum-exp; where one arrives, the kernels of this package take over.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op, retried
from tokenmix_core.ops.softmax_attention import backends


@retried
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None,
    causal: bool, window: int | None, sinks: int, scale: float, impl: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`: heads before time, as every backend keeps it."""
    if q.numel() == 0 or k.numel() == 0:
        o, lse = _empty_outputs(q, v)
        return o.zero_(), lse.fill_(float("-inf"))
    o, lse = backends.load(impl).forward(q, k, v, cu_seqlens, backends.Mask(causal, window, sinks), scale)
    return o.contiguous(), lse.contiguous()


attention_op = recorded_op("tokenmix_core::attention", _forward, mutates_args=())
attention_forward = direct_when_eager(attention_op, _forward)


@attention_op.register_fake
def _(q, k, v, cu_seqlens, causal, window, sinks, scale, impl):
    return _empty_outputs(q, v)


@retried
def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None,
    cu_seqlens: Tensor | None, causal: bool, window: int | None, sinks: int, scale: float, impl: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv, contiguous, from the gradients of o and of the log-sum-exp (None: zero)."""
    if q.numel() == 0 or k.numel() == 0:
        return _zeros(q), _zeros(k), _zeros(v)
    do = torch.zeros_like(o) if do is None else do
    backend = backends.load(backends.backward_impl(impl, q, dlse is not None))
    dq, dk, dv = backend.backward(q, k, v, o, lse, do, dlse, cu_seqlens, backends.Mask(causal, window, sinks), scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


attention_backward_op = recorded_op("tokenmix_core::attention_backward", _backward, mutates_args=())
attention_backward = direct_when_eager(attention_backward_op, _backward)


@attention_backward_op.register_fake
def _(q, k, v, o, lse, do, dlse, cu_seqlens, causal, window, sinks, scale, impl):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    # an output that nobody used then shows as None, and a library's own backward serves
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse):
    q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 9
    grads = attention_backward(q, k, v, o, lse, do, dlse, cu_seqlens, *ctx.options)
    return *grads, None, None, None, None, None, None


attention = differentiable(attention_op, _forward, _save, _gradients)


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor,
    window: int | None, sinks: int, scale: float, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o `[B, TQ, HQ, V]` and the log-sum-exp `[B, TQ, HQ]`."""
    if q.numel() == 0 or k_cache.numel() == 0:
        o, lse = _empty_decode_outputs(q, v_cache)
        return o.zero_(), lse.fill_(float("-inf"))
    decode = backends.load_decode(impl)
    return decode(q, k_cache, v_cache, cache_seqlens.contiguous(), window=window, sinks=sinks, scale=scale)


attention_decode_op = recorded_op("tokenmix_core::attention_decode", _decode, mutates_args=())
attention_decode = direct_when_eager(attention_decode_op, _decode)


@attention_decode_op.register_fake
def _(q, k_cache, v_cache, cache_seqlens, window, sinks, scale, impl):
    return _empty_decode_outputs(q, v_cache)


def _empty_decode_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = _empty_outputs(q, v)
    return o, lse.new_empty(q.shape[:3])


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, time, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, time, heads, v.shape[-1]), q.new_empty(batch, heads, time, dtype=dtype)


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)
