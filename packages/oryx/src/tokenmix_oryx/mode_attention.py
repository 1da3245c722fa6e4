"""Attention for those tokens that are in attention mode, with or without a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tokenmix_core.nn import KVState, Span, at_least_float32, cached_attention
from tokenmix_core.ops import Impl, attention_decode, unless_gluon
from tokenmix_core.parallel import HeadExchange, attention, current_shard
from tokenmix_oryx.modes import Modes
from tokenmix_oryx.ops import selected_attention


def attend(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H K"],
    mode: Modes,
    *,
    cu_seqlens: Tensor | None,
    impl: Impl | None,
) -> Float[Tensor, "B T H K"] | None:
    """Return attention's outputs, which are 0 for tokens in linear mode; None if no token is in attention mode."""
    if not mode.may_attend:
        return None
    if mode.attention is None:
        return attention(q, k, v, cu_seqlens=cu_seqlens, impl=impl).o
    shard = current_shard()
    if shard is None or mode.rows is None:
        return selected_attention(q, k, v, mode.attention, cu_seqlens=cu_seqlens, impl=impl)
    # exchange tensors so that each rank gets whole rows of some heads: tokens in attention mode are unevenly spread
    # over ranks
    heads = HeadExchange(shard, q.shape[2], "selected_attention")
    q, k, v = heads.to_heads(q, k, v)
    boundaries = shard.row_cu_seqlens(q.device)
    return heads.to_tokens(selected_attention(q, k, v, mode.rows, cu_seqlens=boundaries, impl=impl))


def attend_cached(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H K"],
    mode: Modes,
    kv: KVState,
    span: Span,
    *,
    step: bool,
    impl: Impl | None,
) -> Float[Tensor, "B T H K"] | None:
    """Attend to the cached keys and the call's own, with results as in `attend`; store keys and values of all tokens.

    `step` selects the decoding kernel, which requires one token of each sequence.
    """
    if not mode.may_attend:
        kv.write(k, v, span)
        return None
    if mode.attention is None:
        return cached_attention(q, k, v, kv, span, step=step, impl=impl)
    if not (step or span.past == 0 or span.uniform):
        o = cached_attention(q, k, v, kv, span, step=False, impl=impl)
        return o.masked_fill(~mode.attention[..., None, None], 0.0)
    if span.past and k.requires_grad:
        keys, values = (torch.cat(pair, 1) for pair in zip(kv.read(span), (k, v), strict=True))
        kv.write(k, v, span)
        return selected_attention(q, keys, values, mode.attention, impl=impl)
    kv.write(k, v, span)
    if step:
        slots = min(span.past + 1, kv.num_slots)
        # a sequence in linear mode gets length 0, so that it reads no keys
        lengths = kv.filled(span) * mode.attention.squeeze(1)
        return attention_decode(q, kv.keys[:, :slots], kv.values[:, :slots], lengths, impl=unless_gluon(impl)).o
    if span.past:
        length = span.past + span.tokens
        k, v = kv.keys[:, :length], kv.values[:, :length]
    return selected_attention(q, k, v, mode.attention, cu_seqlens=span.cu_seqlens, impl=impl)


def unit_length(x: Float[Tensor, "B T H K"]) -> Tensor:
    """Return the vectors of x scaled to length 1, computed in float32."""
    return F.normalize(at_least_float32(x), dim=-1, eps=1e-6).to(x.dtype)
