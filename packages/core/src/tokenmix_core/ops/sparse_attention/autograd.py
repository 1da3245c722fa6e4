"""Attention over retained keys, forward and backward: directly in eager mode, as torch custom ops if torch traces."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenmix_core.ops.autograd import cached_op, differentiable, direct_when_eager, of_fields, retried
from tokenmix_core.ops.padding import zero_padding
from tokenmix_core.ops.softmax_attention.types import KeyLists


class Inputs(NamedTuple):
    """Inputs of `kept_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor
    until: Tensor | None
    cu_seqlens: Tensor | None
    unit: int
    window: int | None
    scale: float
    keep_gradient: str
    impl: str | None


class Outputs(NamedTuple):
    """o `[B, TQ, HQ, V]`, the log-sum-exp `[B, HQ, TQ]`, and the ranks and lists that `list_units` makes of `keep`."""

    o: Tensor
    lse: Tensor
    ranks: Tensor
    lists: Tensor


class BackwardInputs(NamedTuple):
    """Inputs, outputs, gradients of o and of the log-sum-exp (None for zero), and whether `keep` needs a gradient."""

    inputs: Inputs
    outputs: Outputs
    do: Tensor | None
    dlse: Tensor | None
    through_keep: bool


class Gradients(NamedTuple):
    """Gradients of q, k, v and `keep`; the gradient of `keep` is an empty tensor unless it is needed."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_keep: Tensor


@retried
@of_fields
def _forward(x: Inputs) -> Outputs:
    """List the retained units, then compute attention over their keys and the local keys."""
    out = _outputs(x)
    if x.q.numel() == 0 or x.k.numel() == 0:
        return out._replace(o=out.o.zero_(), lse=out.lse.fill_(float("-inf")))
    if x.impl == "reference":
        from tokenmix_core.ops.sparse_attention.reference import kept_attention_reference

        o, lse = kept_attention_reference(
            x.q, x.k, x.v, x.keep, unit=x.unit, window=x.window, until=x.until, scale=x.scale, cu_seqlens=x.cu_seqlens,
            keep_gradient=x.keep_gradient,
        )  # fmt: skip
        return out._replace(o=o.contiguous(), lse=lse.transpose(1, 2).contiguous())
    from tokenmix_core.ops.sparse_attention.forward import kept_attention_forward
    from tokenmix_core.ops.sparse_attention.mask import list_units

    list_units(x.keep, out.ranks, out.lists)
    kept_attention_forward(x.q, x.k, x.v, out.o, out.lse, _key_lists(x, out), x.scale, x.impl)
    zero_padding(x.cu_seqlens, out.o, out.lse.transpose(1, 2))
    return out


@retried
@of_fields
def _backward(given: BackwardInputs) -> Gradients:
    """Compute dq and delta by query tiles, then dk, dv and the gradient of `keep` by tiles of keys."""
    x, out, do, dlse, through_keep = given
    if x.q.numel() == 0 or x.k.numel() == 0:
        return Gradients(*(grad.zero_() for grad in _empty_gradients(x, through_keep)))
    do = torch.zeros_like(out.o) if do is None else do
    if x.impl == "reference":
        from tokenmix_core.ops.sparse_attention.reference import kept_attention_reference_backward

        dlse = None if dlse is None else dlse.transpose(1, 2)
        *grads, d_keep = kept_attention_reference_backward(
            q=x.q, k=x.k, v=x.v, keep=x.keep, o=out.o, do=do, dlse=dlse, until=x.until, cu_seqlens=x.cu_seqlens,
            unit=x.unit, window=x.window, scale=x.scale, keep_gradient=x.keep_gradient,
        )  # fmt: skip
        d_keep = d_keep.to(x.keep.dtype) if through_keep else x.keep.new_empty(0)
        return Gradients(*(grad.contiguous() for grad in (*grads, d_keep)))
    from tokenmix_core.ops.sparse_attention.backward_keys import kept_attention_backward_keys
    from tokenmix_core.ops.sparse_attention.backward_queries import kept_attention_backward_queries

    keys, keep = _key_lists(x, out), x.keep if through_keep else None
    dq, delta, bias = kept_attention_backward_queries(x.q, x.k, x.v, out.o, do, out.lse, dlse, keys, x.scale, x.impl)
    dk, dv, d_keep = kept_attention_backward_keys(
        x.q, x.k, x.v, do, out.lse, delta, bias, keys, x.scale, keep=keep, keep_gradient=x.keep_gradient
    )  # fmt: skip
    zero_padding(x.cu_seqlens, dq, dk, dv, d_keep if x.unit == 1 else None)
    return Gradients(dq, dk, dv, x.keep.new_empty(0) if d_keep is None else d_keep)


def _save(ctx, inputs, output):
    x, out = Inputs(*inputs), Outputs(*output)
    ctx.save_for_backward(x.q, x.k, x.v, x.keep, *out, x.until, x.cu_seqlens)
    ctx.through_keep = bool(ctx.needs_input_grad[3]) and x.keep.is_floating_point()
    ctx.options = dict(unit=x.unit, window=x.window, scale=x.scale, keep_gradient=x.keep_gradient, impl=x.impl)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse, *_unused):
    q, k, v, keep, *outputs, until, cu_seqlens = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * len(Inputs._fields)
    x = Inputs(q=q, k=k, v=v, keep=keep, until=until, cu_seqlens=cu_seqlens, **ctx.options)
    dq, dk, dv, d_keep = kept_attention_backward(*x, *outputs, do, dlse, ctx.through_keep)
    return dq, dk, dv, d_keep if ctx.through_keep else None, *[None] * (len(Inputs._fields) - 4)


def _key_lists(x: Inputs, out: Outputs) -> KeyLists:
    return KeyLists(out.ranks, out.lists, x.until, x.cu_seqlens, x.unit, x.window)


def _outputs(x: Inputs) -> Outputs:
    """Allocate `Outputs`; ranks `[B, HM, U + 1]` and lists `[B, HM, U]` are empty for the reference."""
    (B, TQ, HQ, _), (_, U, HM) = x.q.shape, x.keep.shape
    o = x.q.new_empty(B, TQ, HQ, x.v.shape[3])
    lse = x.q.new_empty(B, HQ, TQ, dtype=torch.float64 if x.q.dtype == torch.float64 else torch.float32)
    B = 0 if x.impl == "reference" else B
    ranks, lists = (x.q.new_empty(shape, dtype=torch.int32) for shape in ((B, HM, U + 1), (B, HM, U)))
    return Outputs(o, lse, ranks, lists)


def _empty_gradients(x: Inputs, through_keep: bool) -> Gradients:
    d_keep = x.keep.new_empty(x.keep.shape if through_keep else 0)
    return Gradients(*(t.new_empty(t.shape) for t in (x.q, x.k, x.v)), d_keep)


kept_attention_op = cached_op("tokenmix_core::kept_attention", _forward, _outputs)
kept_attention_backward_op = cached_op(
    "tokenmix_core::kept_attention_backward", _backward,
    lambda given: _empty_gradients(given.inputs, given.through_keep),
)  # fmt: skip
kept_attention_backward = direct_when_eager(kept_attention_backward_op, _backward)
kept_attention = differentiable(kept_attention_op, _forward, _save, _gradients, outputs=2)
