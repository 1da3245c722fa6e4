"""Attention forward and backward: directly in eager mode, as torch custom ops if torch traces.

Any backward pass can follow any forward pass, since all need only q, k, v, o and the log-sum-exp. The backward passes
of cuDNN and FlashAttention-2 take no gradient of the log-sum-exp; if there is such a gradient, our kernels run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.kernels.launch.cache.replay import Replayed
from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields, retried
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.softmax_attention import implementations
from tokenmix_core.ops.softmax_attention.backends import backward_impl
from tokenmix_core.ops.softmax_attention.types import Mask, call_of

# implementations that read the boundaries on a CPU anyway, and so zero the padding of packed batches themselves there
_EAGER = ("sdpa", "reference")


class Inputs(NamedTuple):
    """Inputs of attention; `impl=None` stands for our kernels in the forward pass (backward: see `backward_impl`)."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    causal: bool
    window: int | None
    sinks: int
    scale: float
    impl: str | None


class BackwardInputs(NamedTuple):
    """The inputs, the results o and lse `[B, HQ, TQ]`, and the gradients of both; a gradient of None is zero."""

    inputs: Inputs
    o: Tensor
    lse: Tensor
    do: Tensor | None
    dlse: Tensor | None


class DecodeInputs(NamedTuple):
    """Inputs of `attention_decode`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    window: int | None
    sinks: int
    scale: float
    impl: str


class PagedDecodeInputs(NamedTuple):
    """Inputs of `paged_attention_decode`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths: Tensor
    scale: float
    impl: str
    slots: Tensor | None = None


@retried
@of_fields
def _forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`, which has heads before tokens in every backend."""
    if x.q.numel() == 0 or x.k.numel() == 0:
        o, lse = _empty_outputs(x.q, x.v)
        return o.zero_(), lse.fill_(float("-inf"))
    mask = Mask(x.causal, x.window, x.sinks)
    o, lse = implementations.load(x.impl).forward(
        q=x.q, k=x.k, v=x.v, cu_seqlens=x.cu_seqlens, mask=mask, scale=x.scale
    )  # fmt: skip
    o, lse = o.contiguous(), lse.contiguous()
    if x.q.is_cuda or x.impl not in _EAGER:
        zero_padding(x.cu_seqlens, o, lse.transpose(1, 2))
    return o, lse


@retried
@of_fields
def _backward(given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, contiguous."""
    x, o, lse, do, dlse = given
    if x.q.numel() == 0 or x.k.numel() == 0:
        return _zeros(x.q), _zeros(x.k), _zeros(x.v)
    mask = Mask(x.causal, x.window, x.sinks)
    call = call_of(x.q, x.k, x.v, mask, x.cu_seqlens is not None)
    backend = implementations.load(backward_impl(x.impl, call, dlse is not None))
    dq, dk, dv = backend.backward(
        q=x.q, k=x.k, v=x.v, o=o, lse=lse, do=torch.zeros_like(o) if do is None else do, dlse=dlse,
        cu_seqlens=x.cu_seqlens, mask=mask, scale=x.scale,
    )  # fmt: skip
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    if x.q.is_cuda or x.impl not in _EAGER:
        zero_padding(x.cu_seqlens, dq, dk, dv)
    return dq, dk, dv


def _save(ctx, inputs, output):
    x, (o, lse) = Inputs(*inputs), output
    ctx.save_for_backward(x.q, x.k, x.v, o, lse, x.cu_seqlens)
    ctx.options = dict(causal=x.causal, window=x.window, sinks=x.sinks, scale=x.scale, impl=x.impl)
    # do not replace gradients of unused outputs by zeros: if lse's gradient is None, another library's backward pass
    # can run
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse):
    q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
    rest = [None] * (len(Inputs._fields) - 3)
    if do is None and dlse is None:
        return None, None, None, *rest
    x = Inputs(q=q, k=k, v=v, cu_seqlens=cu_seqlens, **ctx.options)
    return *attention_backward(*x, o, lse, do, dlse), *rest


@of_fields
def _decode(x: DecodeInputs) -> tuple[Tensor, Tensor]:
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, TQ, HQ]`."""
    if x.q.numel() == 0 or x.k_cache.numel() == 0:
        o, lse = _empty_decode_outputs(x.q, x.v_cache)
        return o.zero_(), lse.fill_(float("-inf"))
    decode, _ = implementations.load_decode(x.impl)
    lengths = x.cache_seqlens.contiguous()
    return decode(x.q, x.k_cache, x.v_cache, lengths, window=x.window, sinks=x.sinks, scale=x.scale)


@of_fields
def _decode_paged(x: PagedDecodeInputs) -> tuple[Tensor, Tensor]:
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, TQ, HQ]`."""
    if x.q.numel() == 0 or x.page_table.numel() == 0 or x.k_pages.numel() == 0:
        o, lse = _empty_decode_outputs(x.q, x.v_pages)
        return o.zero_(), lse.fill_(float("-inf"))
    _, decode = implementations.load_decode(x.impl)
    lengths = x.lengths.contiguous()
    return decode(x.q, x.k_pages, x.v_pages, x.page_table, lengths, scale=x.scale, slots=x.slots)


def _merge_two(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    from tokenmix_core.ops.softmax_attention.decode import merge_two

    return merge_two(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)


def _empty_decode_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = _empty_outputs(q, v)
    return o, lse.new_empty(q.shape[:3])


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, time, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, time, heads, v.shape[-1]), q.new_empty(batch, heads, time, dtype=dtype)


def _zeros(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape)


attention_op = cached_op("tokenmix_core::attention", _forward, lambda x: _empty_outputs(x.q, x.v))
attention_forward = direct_when_eager(attention_op, _forward)
attention_backward_op = cached_op(
    "tokenmix_core::attention_backward", _backward, lambda given: tuple(x.new_empty(x.shape) for x in given.inputs[:3])
)
attention_backward = direct_when_eager(attention_backward_op, _backward)
attention = differentiable(attention_op, _forward, _save, _gradients)
merge_two = Replayed(_merge_two)
attention_decode_op = cached_op(
    "tokenmix_core::attention_decode", _decode, lambda x: _empty_decode_outputs(x.q, x.v_cache)
)
attention_decode = direct_when_eager(attention_decode_op, _decode)
paged_attention_decode_op = cached_op(
    "tokenmix_core::paged_attention_decode", _decode_paged, lambda x: _empty_decode_outputs(x.q, x.v_pages)
)
paged_attention_decode = direct_when_eager(paged_attention_decode_op, _decode_paged)
