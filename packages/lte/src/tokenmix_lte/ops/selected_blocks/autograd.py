"""Torch custom ops for attention to listed blocks, forward and backward, and for the selection of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix_core.kernels import Replayed, is_plain
from tokenmix_core.ops import cached_op, differentiable, direct_when_eager, of_fields, zero_padding


class Inputs(NamedTuple):
    """The inputs of attention to listed blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    cu_seqlens: Tensor | None
    block_size: int
    scale: float


class BackwardInputs(NamedTuple):
    """The forward's inputs and outputs, with lse `[B, HQ, TQ]`, and the outputs' gradients (None stands for zero)."""

    inputs: Inputs
    o: Tensor
    lse: Tensor
    do: Tensor | None
    dlse: Tensor | None


class SelectInputs(NamedTuple):
    """The inputs of the selection of blocks."""

    q: Tensor
    pooled: Tensor
    lse: Tensor
    cu_seqlens: Tensor | None
    count: int
    block_size: int
    shift: int
    scale: float


def padded(x: Tensor) -> Tensor:
    """Pad the channels of each head with zeros to 64 or 128.

    With 40 and 24 channels, which kernels load without vectorisation, dq was wrong on an H200 with Triton 3.6.0.
    """
    width = 64 if x.shape[3] <= 64 else 128
    return x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))


@of_fields
def _forward(x: Inputs) -> tuple[Tensor, Tensor]:
    """Compute o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`."""
    o, lse, *_ = _keep(*x)
    return o, lse


def _keep(*inputs) -> tuple[Tensor, ...]:
    """Compute o, the log-sum-exp, and the tensors of all lists, which eager mode saves for the backward pass.

    Under torch.compile the backward pass makes the lists again, because their shapes would break the graph.
    """
    x = Inputs(*inputs)
    o, lse = _outputs(x.q, x.v)
    if x.q.numel() == 0 or x.k.numel() == 0 or x.blocks.numel() == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    from tokenmix_lte.ops.selected_blocks.forward import block_attention_forward

    q, k, v = (padded(t) for t in (x.q, x.k, x.v))
    padded_o = o if v is x.v else o.new_empty(*o.shape[:3], v.shape[3])
    lists = block_attention_forward(**x._replace(q=q, k=k, v=v)._asdict(), o=padded_o, lse=lse)
    o = o if padded_o is o else o.copy_(padded_o[..., : o.shape[3]])
    zero_padding(x.cu_seqlens, o, lse.transpose(1, 2))
    return o, lse, *itertools.chain(*lists)


@of_fields
def _backward(given: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv."""
    return _backward_of_lists(given, ())


def _backward_saved(*fields) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv from the fields of `BackwardInputs` and the list tensors that `_keep` has returned."""
    inputs, end = len(Inputs._fields), len(Inputs._fields) + len(BackwardInputs._fields) - 1
    return _backward_of_lists(BackwardInputs(Inputs(*fields[:inputs]), *fields[inputs:end]), fields[end:])


def _backward_of_lists(given: BackwardInputs, saved: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, o, lse, do, dlse = given
    if x.q.numel() == 0 or x.k.numel() == 0 or x.blocks.numel() == 0:
        return x.q.new_zeros(x.q.shape), x.k.new_zeros(x.k.shape), x.v.new_zeros(x.v.shape)
    from tokenmix_lte.ops.selected_blocks.backward import block_attention_backward
    from tokenmix_lte.ops.selected_blocks.lists import Lists

    size = len(Lists._fields)
    lists = [Lists(*saved[i : i + size]) for i in range(0, len(saved), size)]
    q, k, v, o, do = (padded(t) for t in (x.q, x.k, x.v, o, torch.zeros_like(o) if do is None else do))
    dq, dk, dv = block_attention_backward(
        **x._replace(q=q, k=k, v=v)._asdict(), o=o, lse=lse, do=do, dlse=dlse, saved_lists=lists
    )  # fmt: skip
    K, V = x.q.shape[3], x.v.shape[3]
    dq, dk, dv = dq[..., :K].contiguous(), dk[..., :K].contiguous(), dv[..., :V].contiguous()
    zero_padding(x.cu_seqlens, dq, dk, dv)
    return dq, dk, dv


def _save(ctx, inputs, output):
    x = Inputs(*inputs)
    ctx.save_for_backward(x.q, x.k, x.v, x.blocks, x.cu_seqlens, *output)
    ctx.options = dict(block_size=x.block_size, scale=x.scale)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse):
    q, k, v, blocks, cu_seqlens, o, lse, *lists = ctx.saved_tensors
    rest = [None] * (len(Inputs._fields) - 3)
    if do is None and dlse is None:
        return None, None, None, *rest
    x = Inputs(q=q, k=k, v=v, blocks=blocks, cu_seqlens=cu_seqlens, **ctx.options)
    given = *x, o, lse, do, dlse
    return *(_replayed_backward(*given, *lists) if is_plain(q) else block_attention_backward_op(*given)), *rest


@of_fields
def _select(x: SelectInputs) -> Tensor:
    """Return the selected blocks `[B, TQ, H, count]`, int32."""
    blocks = _blocks(x.q, x.pooled, x.count)
    if blocks.numel() == 0:
        return blocks
    from tokenmix_lte.ops.selected_blocks.select import select_blocks_kernel

    select_blocks_kernel(
        q=x.q, pooled=x.pooled, lse=x.lse, blocks=blocks, cu_seqlens=x.cu_seqlens, block_size=x.block_size,
        shift=x.shift, scale=x.scale,
    )  # fmt: skip
    zero_padding(x.cu_seqlens, blocks)
    return blocks


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, HQ, _ = q.shape
    return q.new_empty(B, T, HQ, v.shape[3]), q.new_empty(B, HQ, T, dtype=torch.float32)


def _blocks(q: Tensor, pooled: Tensor, count: int) -> Tensor:
    return q.new_empty(*q.shape[:2], pooled.shape[2], count, dtype=torch.int32)


block_attention_op = cached_op("tokenmix_lte::block_attention", _forward, lambda x: _outputs(x.q, x.v))
block_attention_backward_op = cached_op(
    "tokenmix_lte::block_attention_backward",
    _backward,
    lambda given: tuple(x.new_empty(x.shape) for x in given.inputs[:3]),
)
_replayed_backward = Replayed(_backward_saved)
block_attention = differentiable(block_attention_op, _forward, _save, _gradients, outputs=2, keep=_keep)
select_blocks_op = cached_op("tokenmix_lte::select_blocks", _select, lambda x: _blocks(x.q, x.pooled, x.count))
select_blocks = direct_when_eager(select_blocks_op, _select)
