"""Attention to listed blocks by kernels, forward and backward, and the choice of blocks: as torch custom ops."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.ops.common import differentiable, direct_when_eager, recorded_op


def _forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, cu_seqlens: Tensor | None, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`."""
    o, lse = _outputs(q, v)
    if q.numel() == 0 or k.numel() == 0 or blocks.numel() == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    from tokenmix_lte.ops.selected_blocks.forward import block_attention_forward

    block_attention_forward(q, k, v, blocks, o, lse, cu_seqlens, block_size=block_size, scale=scale)
    return o, lse


block_attention_op = recorded_op("tokenmix_lte::block_attention", _forward, mutates_args=())


@block_attention_op.register_fake
def _(q, k, v, blocks, cu_seqlens, block_size, scale):
    return _outputs(q, v)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, o: Tensor, lse: Tensor, do: Tensor | None, dlse: Tensor | None,
    cu_seqlens: Tensor | None, block_size: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv from the gradients of o and of the log-sum-exp (None: 0)."""
    if q.numel() == 0 or k.numel() == 0 or blocks.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    from tokenmix_lte.ops.selected_blocks.backward import block_attention_backward

    do = torch.zeros_like(o) if do is None else do
    return block_attention_backward(q, k, v, blocks, o, lse, do, dlse, cu_seqlens, block_size=block_size, scale=scale)


block_attention_backward_op = recorded_op("tokenmix_lte::block_attention_backward", _backward, mutates_args=())
block_attention_backward = direct_when_eager(block_attention_backward_op, _backward)


@block_attention_backward_op.register_fake
def _(q, k, v, blocks, o, lse, do, dlse, cu_seqlens, block_size, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, blocks, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, blocks, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse):
    q, k, v, blocks, o, lse, cu_seqlens = ctx.saved_tensors
    if do is None and dlse is None:
        return (None,) * 7
    return *block_attention_backward(q, k, v, blocks, o, lse, do, dlse, cu_seqlens, *ctx.options), *(None,) * 4


block_attention = differentiable(block_attention_op, _forward, _save, _gradients)


def _select(
    q: Tensor, pooled: Tensor, lse: Tensor, cu_seqlens: Tensor | None, count: int, block_size: int, shift: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Blocks `[B, TQ, H, count]`, int32."""
    blocks = _blocks(q, pooled, count)
    if blocks.numel() == 0:
        return blocks
    from tokenmix_lte.ops.selected_blocks.select import select_blocks_kernel

    select_blocks_kernel(q, pooled, lse, blocks, cu_seqlens, block_size=block_size, shift=shift, scale=scale)
    return blocks


select_blocks_op = recorded_op("tokenmix_lte::select_blocks", _select, mutates_args=())
select_blocks = direct_when_eager(select_blocks_op, _select)


@select_blocks_op.register_fake
def _(q, pooled, lse, cu_seqlens, count, block_size, shift, scale):
    return _blocks(q, pooled, count)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    return q.new_empty(B, T, HQ, v.shape[3]), q.new_empty(B, HQ, T, dtype=torch.float32)


def _blocks(q: Tensor, pooled: Tensor, count: int) -> Tensor:
    return q.new_empty(*q.shape[:2], pooled.shape[2], count, dtype=torch.int32)
