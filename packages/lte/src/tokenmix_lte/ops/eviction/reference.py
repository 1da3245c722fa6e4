"""The eviction step in eager PyTorch: the specification, on any device and in any float dtype."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def evict_step_reference(k, v, raw, keys, values, lengths, scores, ages, raws, before, window, sinks, uniform) -> None:
    """Compute `evict_step`: overwrite the memory, without waiting for the device."""
    (N, H, S), W = scores.shape, window
    cap, K = S - W, k.shape[-1]
    # the token that leaves the ring buffer
    slot = (before % W).view(N, 1).expand(N, H)
    index = slot[..., None, None].expand(N, H, 1, K)
    key, value = (x.gather(2, index).squeeze(2) for x in (keys, values))
    age = (before - W).view(N, 1).expand(N, H)
    score = uniform_ranks(age.clamp(min=0)).to(scores.dtype) if uniform else _gather(scores, slot)
    score = score.masked_fill((age >= 0) & (age < sinks), torch.inf)
    # the index among the retained tokens that this token takes if it is retained
    n_retained = lengths - before.clamp(max=W).unsqueeze(1)
    filled = torch.arange(cap, device=k.device) < n_retained.unsqueeze(-1)
    lowest = scores[:, :, W:].masked_fill(~filled, torch.inf).amin(-1)
    youngest = torch.where(filled & (scores[:, :, W:] == lowest.unsqueeze(-1)), ages, -1).argmax(-1)
    free = n_retained < cap
    enters = (age >= 0) & (score > 0) & (free | (score > lowest))
    target = torch.where(free, n_retained, youngest).long()
    everywhere = torch.ones_like(enters)
    for held, old, new in ((keys, key, k), (values, value, v)):
        _put(held, W + target, old, enters)
        _put(held, slot, new, everywhere)
    _put(scores, W + target, score, enters)
    _put(ages, target, age.to(ages.dtype), enters)
    if raws.shape[1]:
        at = (before % raws.shape[1]).view(N, 1, 1, 1)
        raws.scatter_(1, at.expand(N, 1, H, K), raw.unsqueeze(1))
    lengths.add_((enters & free).int() + (age < 0).int())


def uniform_ranks(position: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 1 + the exponent of the largest power of two that divides a position; +∞ for position 0.

    If a full head retains the tokens of the highest ranks, and of equal ranks the oldest, it holds every 2ⁿ-th token,
    and n grows with the sequence: each new token at a multiple of 2ⁿ⁺¹ replaces the newest held token that is at none,
    until only multiples of 2ⁿ⁺¹ are left.
    """
    lowest = (position & -position).double()
    return torch.where(position == 0, torch.inf, 1 + lowest.log2()).float()


def _gather(x: Float[Tensor, "N H slots"], at: Int[Tensor, "N H"]) -> Float[Tensor, "N H"]:
    return x.gather(2, at.unsqueeze(-1)).squeeze(-1)


def _put(
    x: Shaped[Tensor, "N H slots *K"],
    at: Int[Tensor, "N H"],
    new: Shaped[Tensor, "N H *K"],
    where: Bool[Tensor, "N H"],
) -> None:
    """Write `new` to entry `at` of each head of x where `where` is True."""
    one = (slice(None), slice(None), None, *[None] * (x.dim() - 3))
    index = at[one].expand(*at.shape, 1, *x.shape[3:])
    x.scatter_(2, index, torch.where(where[one], new.unsqueeze(2).to(x.dtype), x.gather(2, index)))
