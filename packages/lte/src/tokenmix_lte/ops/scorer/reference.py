"""The scorer, eager: the specification of the operation and of its gradient, on any device, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.nn.precision import at_least_float32


def retention_logits_reference(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    convs: Sequence[tuple[Float[Tensor, "H out in taps"], Float[Tensor, "H out"]]],
    weight: Float[Tensor, "H C"],
    bias: Float[Tensor, "H"],
    *,
    offsets: Sequence[int],
    begin: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B T H"]:
    """Logits as `retention_logits` defines them, differentiable by autograd, computed in float32 (float64)."""
    # heads in front: each has weights of its own
    x = torch.cat((at_least_float32(k), at_least_float32(v)), -1).permute(2, 0, 1, 3)
    there = [_there(x, offset, begin, cu_seqlens) for offset in offsets]
    for kernel, shift in convs:
        x = F.dropout(x, dropout) if dropout else x
        total = shift.to(x.dtype)[:, None, None]
        for tap, offset, mask in zip(kernel.unbind(-1), offsets, there, strict=True):
            near = shifted(x, offset)
            near = near if mask is None else near * mask.unsqueeze(-1)
            total = total + near @ tap.to(x.dtype).mT.unsqueeze(1)
        x = F.silu(total)
    logits = (x @ weight.to(x.dtype)[:, None, :, None]).squeeze(-1) + bias.to(x.dtype)[:, None, None]
    return logits.permute(1, 2, 0)


def shifted(x: Float[Tensor, "H B T C"], offset: int) -> Float[Tensor, "H B T C"]:
    """x at t + offset in place of x at t, zeros beyond both ends."""
    T = x.shape[2]
    if not offset:
        return x
    if offset < 0:
        return F.pad(x, (0, 0, -offset, 0))[:, :, :T]
    return F.pad(x, (0, 0, 0, offset))[:, :, offset:]


def _there(x: Tensor, offset: int, begin: Tensor | None, cu_seqlens: Tensor | None) -> Bool[Tensor, "B_or_1 T"] | None:
    """Whether the token at t + offset is one of the same sequence, where that is more than a matter of both ends."""
    T = x.shape[2]
    at = torch.arange(T, device=x.device) + offset
    if cu_seqlens is not None:
        ids = sequence_ids(cu_seqlens, T)
        return (ids[at.clamp(0, T - 1)] == ids).unsqueeze(0)
    return None if begin is None else at >= begin.unsqueeze(1)
