"""Table 4's variants that the operations do not know: chunk after chunk, or with all scores at once. Slower."""

from __future__ import annotations

import functools
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.ops.gated_delta_rule.reference import l2_normalise

if TYPE_CHECKING:
    from tokenmix_nats_l.mixer import NatsL, Tokens


def chunk_by_chunk(
    layer: NatsL, tokens: Tokens, writes: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """The delta rule's outputs where softmax chunks leave the state undecayed, or own chunks are softmax's alone."""
    _say_once("own_chunk='softmax' and decay=False go chunk by chunk")
    C, outputs = layer.chunk, []
    for row, first in _sequences(tokens, cu_seqlens, C):
        B, T = row.q.shape[:2]
        state = row.q.new_zeros(
            B, *layer.fit.state_shape(layer.num_heads), dtype=torch.promote_types(row.q.dtype, torch.float32)
        )
        for i, start in enumerate(range(0, T, C)):
            chunk = type(row)(*(x[:, start : start + C] for x in row))
            o, after = layer.delta_rule(chunk, None, state)
            if layer.own_chunk == "softmax":
                o = carried(layer, chunk, state, torch.zeros_like(state[..., 0, 0]))
            outputs.append(o)
            decay = layer.fit.gates(chunk.g).sum(1).exp()[..., None, None] if layer.decay else 1.0
            write = layer.fit.gates(writes[:, first + i])[..., None, None]
            state = decay * state + write * (after - decay * state)
        # nobody reads the last state, and yet what wrote to it has a gradient, of zeros: replicas wait for it
        outputs[-1] = outputs[-1] + 0 * state.sum()
    return torch.cat(outputs, 1)


def carried(layer: NatsL, tokens: Tokens, state: Tensor, decay: Tensor) -> Float[Tensor, "B T HA VA"]:
    """Read the state before the queries' chunk, `e^decay · state`, which decays further with every token."""
    fit = layer.fit
    q = l2_normalise(fit.keys(tokens.q).to(state.dtype)).repeat_interleave(fit.parts, 2)
    total = decay.unsqueeze(1) + fit.gates(tokens.g).cumsum(1)
    o = layer.head_dim**-0.5 * total.exp().unsqueeze(-1) * torch.einsum("bthk,bhkv->bthv", q, state)
    return layer.as_softmax_heads(fit.outputs(o, layer.num_heads)).to(tokens.v.dtype)


def far_attention(
    layer: NatsL, tokens: Tokens, keep: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """Softmax attention to softmax chunks before the own one alone; 0 where there are none."""
    outputs = []
    for row, first in _sequences(tokens, cu_seqlens, layer.chunk):
        slots = -(-row.q.shape[1] // layer.chunk)
        marks = keep[:, first : first + slots]
        outputs.append(far_softmax(row.softmax_q, row.softmax_k, row.softmax_v, marks, layer.chunk))
    return torch.cat(outputs, 1)


def far_softmax(
    q: Float[Tensor, "B TQ HA K"],
    k: Float[Tensor, "B TK HA K"],
    v: Float[Tensor, "B TK HA V"],
    keep: Float[Tensor, "B slots H"],
    C: int,
) -> Float[Tensor, "B TQ HA V"]:
    """Attention of queries, the last ones of the keys' tokens, to kept chunks before their own; all scores at once."""
    _say_once("own_chunk='linear' holds all scores at once")
    wide = torch.promote_types(q.dtype, torch.float32)
    i = torch.arange(k.shape[1], device=q.device) // C
    far = i[-q.shape[1] :].unsqueeze(1) > i
    factor = keep.repeat_interleave(q.shape[2] // keep.shape[2], 2)[:, i].transpose(1, 2).unsqueeze(2)
    scores = torch.einsum("bihk,bjhk->bhij", q.to(wide), k.to(wide)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~(far & (factor > 0.5)), -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top.isneginf(), 0.0)).exp() * factor
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("bhij,bjhv->bihv", weights, v.to(wide)).to(v.dtype)


def _sequences(tokens: Tokens, cu_seqlens: Tensor | None, C: int):
    """Rows of one length, or packed sequences one by one, each with the slot of its first chunk."""
    if cu_seqlens is None:
        yield tokens, 0
        return
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if start < end:
            yield type(tokens)(*(x[:, start:end] for x in tokens)), start // C + n


@functools.cache
def _say_once(what: str) -> None:
    warnings.warn(f"NAtS-L: {what}, which is slower than the layer itself", stacklevel=3)
