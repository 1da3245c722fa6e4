"""Run FlashAttention-2 from the package flash-attn."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix_core.ops.softmax_attention.types import Mask


def forward(q, k, v, cu_seqlens, mask: Mask, scale):
    """Return o `[B, TQ, HQ, V]` and the log-sum-exp `[B, HQ, TQ]`."""
    from flash_attn import flash_attn_interface as fa  # pyright: ignore[reportMissingImports]

    q, k, v = (readable(x) for x in (q, k, v))
    left, right = (-1 if side is None else side for side in window_sides(mask))
    cu, max_q, max_k = boundaries(q, k, cu_seqlens)
    if cu is None:
        o, lse, *_ = fa._flash_attn_forward(q, k, v, 0.0, scale, mask.causal, left, right, 0.0, None, False)
        return o, lse
    q, k, v = (x.squeeze(0) for x in (q, k, v))
    o, lse, *_ = fa._flash_attn_varlen_forward(
        q, k, v, cu, cu, max_q, max_k, 0.0, scale, mask.causal, left, right, 0.0, None, False
    )
    return o.unsqueeze(0), lse.unsqueeze(0)


def backward(q, k, v, o, lse, do, dlse, cu_seqlens, mask: Mask, scale):
    """Return dq, dk and dv; these kernels take no gradient of the log-sum-exp."""
    from flash_attn import flash_attn_interface as fa  # pyright: ignore[reportMissingImports]

    assert dlse is None
    q, k, v, do = (readable(x) for x in (q, k, v, do))
    left, right = (-1 if side is None else side for side in window_sides(mask))
    cu, max_q, max_k = boundaries(q, k, cu_seqlens)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if cu is None:
        fa._flash_attn_backward(
            do, q, k, v, o, lse, *grads, 0.0, scale, mask.causal, left, right, 0.0, None, False
        )  # fmt: skip
        return grads
    q, k, v, o, lse, do = (x.squeeze(0) for x in (q, k, v, o, lse, do))
    fa._flash_attn_varlen_backward(
        do, q, k, v, o, lse, *(x.squeeze(0) for x in grads), cu, cu, max_q, max_k,
        0.0, scale, mask.causal, left, right, 0.0, None, False,
    )  # fmt: skip
    return grads


def readable(x: Tensor) -> Tensor:
    """Return x if its rows are aligned to 16 bytes and not broadcast, as flash-attn and torch require; else a copy."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        # all rows of a contiguous tensor are aligned, since a head has a multiple of 8 elements
        return x
    rows = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    runs = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in rows)
    return x if runs else x.clone(memory_format=torch.contiguous_format)


def window_sides(mask: Mask) -> tuple[int | None, int | None]:
    """Return how many keys a query sees to its left and to its right, its own key not counted; None: no bound."""
    if mask.window is None:
        return None, 0 if mask.causal else None
    return mask.window - 1, 0


def boundaries(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Return int32 sequence boundaries (None if unpacked), and upper bounds of the lengths of queries and keys.

    The bounds are the totals of tokens: reading the exact maximum from the device would synchronise.
    """
    return None if cu_seqlens is None else cu_seqlens.int(), q.shape[1], k.shape[1]
