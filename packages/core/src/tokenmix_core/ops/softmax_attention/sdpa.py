"""Run torch's own attention kernels, through the operators that return the log-sum-exp.

A CPU runs torch's flash kernel, sequence by sequence if packed. CUDA runs cuDNN for calls that `backends.takes_cudnn`
accepts, on Hopper and newer devices; else FlashAttention-2: for packed batches, windows, single queries, causal
attention with fewer queries than keys, head sizes that cuDNN does not support, and older devices.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tokenmix_core.ops.softmax_attention.backends import takes_cudnn
from tokenmix_core.ops.softmax_attention.flash import boundaries, readable, window_sides
from tokenmix_core.ops.softmax_attention.reference import visible, wide
from tokenmix_core.ops.softmax_attention.types import Mask

_aten = torch.ops.aten


def forward(q, k, v, cu_seqlens, mask: Mask, scale):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`."""
    if not q.is_cuda:
        return _cpu_forward(q, k, v, cu_seqlens, mask, scale)
    q, k, v = (readable(x) for x in (q, k, v))
    if takes_cudnn(q.shape[1], k.shape[1], q.shape[3], v.shape[3], mask, cu_seqlens is not None):
        return cudnn_forward(q, k, v, mask.causal, scale)
    left, right = window_sides(mask)
    cu, max_q, max_k = boundaries(q, k, cu_seqlens)
    packed = cu is not None
    q, k, v = (x.squeeze(0) if packed else x for x in (q, k, v))
    o, lse, *_ = _aten._flash_attention_forward(
        q, k, v, cu, cu, max_q, max_k, 0.0, mask.causal, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return (o.unsqueeze(0), lse.unsqueeze(0)) if packed else (o, lse)


def backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask: Mask, scale):
    """Return dq, dk and dv; these kernels take no gradient of the log-sum-exp."""
    assert dlse is None
    if not q.is_cuda:
        return _cpu_backward(q, k, v, o, lse, do, cu_seqlens, mask, scale)
    q, k, v, do = (readable(x) for x in (q, k, v, do))
    if takes_cudnn(q.shape[1], k.shape[1], q.shape[3], v.shape[3], mask, cu_seqlens is not None):
        return cudnn_backward(q, k, v, o, lse, do, mask.causal, scale)
    seed = offset = _no_dropout(q)
    left, right = window_sides(mask)
    cu, max_q, max_k = boundaries(q, k, cu_seqlens)
    packed = cu is not None
    q, k, v, o, lse, do = (x.squeeze(0) if packed else x for x in (q, k, v, o, lse, do))
    grads = _aten._flash_attention_backward(
        do, q, k, v, o, lse, cu, cu, max_q, max_k, 0.0, mask.causal, seed, offset,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return tuple(x.unsqueeze(0) for x in grads) if packed else grads


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute o and the log-sum-exp of causal or full attention by cuDNN."""
    q, k, v = (x.transpose(1, 2) for x in (_tokens_before_heads(q), k, v))
    o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o.transpose(1, 2), lse.view(o.shape[:3])


def cudnn_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Compute dq, dk and dv by cuDNN.

    torch caches cuDNN's graphs by the strides of q, k and v alone. A cached graph reads o and do with the strides of
    its first call, and a graph of contiguous tensors always reads do with the strides of o. So o and do must have equal
    strides in all calls with equal strides of q, k and v: o is contiguous, and do is copied to the layout of o.
    """
    q, do = _tokens_before_heads(q), _with_strides_of(o, do)
    q, k, v, o, do = (x.transpose(1, 2) for x in (q, k, v, o, do))
    seed = offset = _no_dropout(q)
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.unsqueeze(-1), seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in grads)


def _tokens_before_heads(q: Tensor) -> Tensor:
    """Return q in the memory order of `[B, T, HQ, K]`, copied only if its strides have another order.

    torch gives cuDNN's o the memory order of q; if that were another order, o would have to be copied later.
    """
    strides = [stride for size, stride in zip(q.shape, q.stride(), strict=True) if size > 1]
    return q if strides == sorted(strides, reverse=True) else q.clone(memory_format=torch.contiguous_format)


def _with_strides_of(o: Tensor, do: Tensor) -> Tensor:
    """Return do with the strides of o, copied unless the strides are equal or both tensors are contiguous."""
    if do.stride() == o.stride():
        return do
    if do.is_contiguous() and o.is_contiguous():
        # the two layouts differ only in strides of dimensions of size 1, so no element moves
        return do.as_strided(o.shape, o.stride())
    return torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device).copy_(do)


def _no_dropout(q: Tensor) -> Tensor:
    """Return a placeholder for the random generator's state, which only dropout would read."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _cpu_forward(q, k, v, cu_seqlens, mask: Mask, scale):
    if cu_seqlens is not None:
        batch, tokens, heads, _ = q.shape
        o, lse = q.new_zeros(batch, tokens, heads, v.shape[3]), wide(q).new_zeros(batch, heads, tokens)
        for s in _slices(cu_seqlens):
            o[:, s], lse[:, :, s] = _cpu_forward(q[:, s], k[:, s], v[:, s], None, mask, scale)
        return o, lse
    causal, bias = _cpu_mask(q, k, mask)
    q, k, v = (_with_adjacent_elements(x).transpose(1, 2) for x in (q, k, v))
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return o.transpose(1, 2), lse


def _cpu_backward(q, k, v, o, lse, do, cu_seqlens, mask: Mask, scale):
    if cu_seqlens is not None:
        dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
        for s in _slices(cu_seqlens):
            dq[:, s], dk[:, s], dv[:, s] = _cpu_backward(
                q[:, s], k[:, s], v[:, s], o[:, s], lse[:, :, s], do[:, s], None, mask, scale
            )
        return dq, dk, dv
    causal, bias = _cpu_mask(q, k, mask)
    q, k, v, o, do = (_with_adjacent_elements(x).transpose(1, 2) for x in (q, k, v, o, do))
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return tuple(x.transpose(1, 2) for x in grads)


def _with_adjacent_elements(x: Tensor) -> Tensor:
    """Return x if the elements of a head are contiguous, else a copy: torch's kernel ignores the last stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _cpu_mask(q: Tensor, k: Tensor, mask: Mask) -> tuple[bool, Tensor | None]:
    """Return whether to use the kernel's causal mask, and a bias `[TQ, TK]` of 0 or −∞ on scores (None: not needed)."""
    tq, tk = q.shape[1], k.shape[1]
    if mask.window is None and (tq == tk or tq == 1 or not mask.causal):
        return mask.causal and tq > 1, None
    seen = visible(torch.arange(tk - tq, tk), torch.arange(tk), *mask)
    return False, torch.zeros(tq, tk, dtype=q.dtype).masked_fill_(~seen, float("-inf"))


def _slices(cu_seqlens: Tensor) -> list[slice]:
    """Return the slices of tokens of the sequences that are not empty."""
    cu = cu_seqlens.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(cu) if a < b]
