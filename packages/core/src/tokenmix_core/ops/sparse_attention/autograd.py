"""Attention over kept keys, forward and backward: directly in eager mode, as torch custom ops where torch traces."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op


def _forward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, until: Tensor | None, cu_seqlens: Tensor | None,
    unit: int, window: int | None, scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o `[B, TQ, HQ, V]`, the log-sum-exp `[B, HQ, TQ]`, and what the kernels know of `keep`: its ranks and lists."""
    o, lse, ranks, lists = _outputs(q, v, keep, impl)
    if q.numel() == 0 or k.numel() == 0:
        return o.zero_(), lse.fill_(float("-inf")), ranks, lists
    if impl == "reference":
        from tokenmix_core.ops.sparse_attention.reference import kept_attention_reference

        out = kept_attention_reference(
            q, k, v, keep, unit=unit, window=window, until=until, scale=scale, cu_seqlens=cu_seqlens
        )
        return out.o.contiguous(), out.lse.transpose(1, 2).contiguous(), ranks, lists
    from tokenmix_core.ops.sparse_attention.forward import kept_attention_forward
    from tokenmix_core.ops.sparse_attention.mask import list_units

    list_units(keep, ranks, lists)
    kept_attention_forward(
        q, k, v, o, lse, ranks, lists, until, cu_seqlens, unit=unit, window=window, scale=scale, impl=impl
    )  # fmt: skip
    return o, lse, ranks, lists


kept_attention_op = recorded_op("tokenmix_core::kept_attention", _forward, mutates_args=())


@kept_attention_op.register_fake
def _(q, k, v, keep, until, cu_seqlens, unit, window, scale, impl):
    return _outputs(q, v, keep, impl)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, o: Tensor, lse: Tensor, ranks: Tensor, lists: Tensor,
    do: Tensor | None, dlse: Tensor | None, until: Tensor | None, cu_seqlens: Tensor | None,
    through_keep: bool, unit: int, window: int | None, scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and, empty unless `through_keep`, that of `keep`; from those of o and of the log-sum-exp (None: 0)."""
    if q.numel() == 0 or k.numel() == 0:
        d_keep = keep.new_zeros(keep.shape if through_keep else 0)
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), d_keep
    do = torch.zeros_like(o) if do is None else do
    options = {"unit": unit, "window": window, "scale": scale}
    if impl == "reference":
        from tokenmix_core.ops.sparse_attention.reference import kept_attention_reference_backward

        dlse = None if dlse is None else dlse.transpose(1, 2)
        dq, dk, dv, d_keep = kept_attention_reference_backward(
            q, k, v, keep, o, do, dlse, until=until, cu_seqlens=cu_seqlens, **options
        )
        d_keep = d_keep.to(keep.dtype) if through_keep else keep.new_empty(0)
        return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_keep.contiguous()
    from tokenmix_core.ops.sparse_attention.backward_keys import kept_attention_backward_keys
    from tokenmix_core.ops.sparse_attention.backward_queries import kept_attention_backward_queries

    options["impl"] = impl
    dq, delta = kept_attention_backward_queries(
        q, k, v, o, do, lse, dlse, ranks, lists, until, cu_seqlens, **options
    )  # fmt: skip
    dk, dv, d_keep = kept_attention_backward_keys(
        q, k, v, do, lse, delta, ranks, lists, until, cu_seqlens, keep=keep if through_keep else None, **options
    )
    return dq, dk, dv, keep.new_empty(0) if d_keep is None else d_keep


kept_attention_backward_op = recorded_op("tokenmix_core::kept_attention_backward", _backward, mutates_args=())
kept_attention_backward = direct_when_eager(kept_attention_backward_op, _backward)


@kept_attention_backward_op.register_fake
def _(
    q, k, v, keep, o, lse, ranks, lists, do, dlse, until, cu_seqlens, through_keep, unit, window, scale, impl
):  # fmt: skip
    d_keep = keep.new_empty(keep.shape if through_keep else 0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_keep


def _save(ctx, inputs, output):
    q, k, v, keep, until, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, keep, *output, until, cu_seqlens)
    ctx.through_keep = bool(ctx.needs_input_grad[3]) and keep.is_floating_point()
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse, *_unused):
    q, k, v, keep, o, lse, ranks, lists, until, cu_seqlens = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 10
    dq, dk, dv, d_keep = kept_attention_backward(
        q, k, v, keep, o, lse, ranks, lists, do, dlse, until, cu_seqlens, ctx.through_keep, *ctx.options
    )
    return dq, dk, dv, d_keep if ctx.through_keep else None, *(None,) * 6


kept_attention = differentiable(kept_attention_op, _forward, _save, _gradients, outputs=2)


def _outputs(q: Tensor, v: Tensor, keep: Tensor, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for o, lse, the ranks of units `[B, HM, U + 1]` and their lists `[B, HM, U]` (none for the reference)."""
    (B, TQ, HQ, _), (_, U, HM) = q.shape, keep.shape
    o = q.new_empty(B, TQ, HQ, v.shape[3])
    lse = q.new_empty(B, HQ, TQ, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    B = 0 if impl == "reference" else B
    ranks, lists = (q.new_empty(shape, dtype=torch.int32) for shape in ((B, HM, U + 1), (B, HM, U)))
    return o, lse, ranks, lists
