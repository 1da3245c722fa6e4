"""The scorer in eager PyTorch, for any device and up to float64; it specifies the operation and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import sequence_ids
from tokenmix_core.nn import at_least_float32
from tokenmix_core.ops import drops_padding

# dropout probabilities are multiples of 1 / LEVELS, which 15 bits of a hash resolve
LEVELS = 1 << 15
_WORD = (1 << 32) - 1


@drops_padding("k", "v")
def retention_logits_reference(
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    convs: Sequence[tuple[Float[Tensor, "H _out _in taps"], Float[Tensor, "H _out"]]],
    weight: Float[Tensor, "H C"],
    bias: Float[Tensor, "H"],
    *,
    offsets: Sequence[int],
    begin: Int[Tensor, "B"] | None = None,
    cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
    seed: Int[Tensor, "1"] | None = None,
    threshold: int = 0,
) -> Float[Tensor, "B T H"]:
    """Compute `retention_logits`, differentiable by autograd, in float32 (float64 for float64 inputs).

    With a seed, `dropout_mask` determines which elements of each convolution's input are dropped.
    """
    # heads become the first dimension, because each head has its own weights
    x = torch.cat((at_least_float32(k), at_least_float32(v)), -1).permute(2, 0, 1, 3)
    exists = [_exists(x, offset, begin, cu_seqlens) for offset in offsets]
    for layer, (kernel, shift) in enumerate(convs):
        if seed is not None:
            mask = dropout_mask(seed, threshold, layer, x, k.shape[-1] if layer == 0 else 0)
            x = x * mask * (LEVELS / (LEVELS - threshold))
        total = shift.to(x.dtype)[:, None, None]
        for tap, offset, mask in zip(kernel.unbind(-1), offsets, exists, strict=True):
            neighbour = shifted(x, offset)
            neighbour = neighbour if mask is None else neighbour * mask.unsqueeze(-1)
            total = total + neighbour @ tap.to(x.dtype).mT.unsqueeze(1)
        x = F.silu(total)
    logits = (x @ weight.to(x.dtype)[:, None, :, None]).squeeze(-1) + bias.to(x.dtype)[:, None, None]
    return logits.permute(1, 2, 0)


def dropout_mask(
    seed: Int[Tensor, "1"], threshold: int, layer: int, x: Float[Tensor, "H B T C"], keys: int = 0
) -> Bool[Tensor, "H B T C"]:
    """Return a mask of the elements of a layer's input that are not dropped.

    The mask is a hash of seed, layer, token, head and channel, so that every implementation and every recomputation
    drops the same elements. Two neighbouring channels have one hash of 32 bits, of which each reads 15; if `keys`, the
    number of channels of keys, is odd, the last of them has a hash of its own. An element is dropped with probability
    `threshold` / 2¹⁵.
    """
    H, B, T, C = x.shape
    rows = torch.arange(B * T * H, device=x.device).view(B, T, H).permute(2, 0, 1)
    channels = torch.arange(C, device=x.device)
    channels += (channels >= keys) * (keys % 2)
    base = _hash((seed.long() + (layer + 1) * 0x2545F491) & _WORD)
    pair_hash = _signed(_hash((base + (channels >> 1)) & _WORD) | 1)
    row_hash = _fold(_signed(base ^ rows) * (0x9E3779B1 - (1 << 32)))
    mixed = _fold(row_hash.unsqueeze(-1) * pair_hash)
    return (mixed >> 16 * (channels & 1)) % LEVELS >= threshold


def _hash(x: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """Return a 32-bit hash of x."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _fold(x: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """Return the lower half of 64 bits xor the upper half, as a signed word of 32 bits."""
    return _signed((x ^ (x >> 32)) & _WORD)


def _signed(x: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
    """Return words of 32 bits as signed integers."""
    return x - ((x >> 31) << 32)


def shifted(x: Float[Tensor, "H B T C"], offset: int) -> Float[Tensor, "H B T C"]:
    """Return x[t + offset] at each t of the dimension T; zero where t + offset does not exist."""
    T = x.shape[2]
    if not offset:
        return x
    if offset < 0:
        return F.pad(x, (0, 0, -offset, 0))[:, :, :T]
    return F.pad(x, (0, 0, 0, offset))[:, :, offset:]


def _exists(x: Tensor, offset: int, begin: Tensor | None, cu_seqlens: Tensor | None) -> Bool[Tensor, "B_or_1 T"] | None:
    """Return a mask, False for tokens t if t + offset is in another sequence or in a row's padding at the beginning.

    Return None if every row is one whole sequence. Tokens outside of a row need no mask, because they are zeros.
    """
    T = x.shape[2]
    at = torch.arange(T, device=x.device) + offset
    if cu_seqlens is not None:
        ids = sequence_ids(cu_seqlens, T)
        return (ids[at.clamp(0, T - 1)] == ids).unsqueeze(0)
    return None if begin is None else at >= begin.unsqueeze(1)
