"""The operation in plain PyTorch, on any device and in any floating-point dtype.

In `chunk_reference` the *keys* are the `before` tokens of the initial state's window followed by the new tokens. Only
the TQ new tokens have queries: `TK = TQ + before`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# number C of tokens in a chunk; a chunk's weights are a tensor [C, C, M], so that time and memory grow with C
CHUNK = 16


def chunk_reference(
    q: Float[Tensor, "N TQ HQ K"],
    k: Float[Tensor, "N TK H K"],
    v: Float[Tensor, "N TK H V"],
    f: Float[Tensor, "N TK H M"],
    q_slots: Float[Tensor, "N TQ HQ K"],
    k_slots: Float[Tensor, "N TK H K"],
    slots_k: Float[Tensor, "N H M K"],
    slots_v: Float[Tensor, "N H M V"],
    start: Int[Tensor, "N"],
    *,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute equations 1 to 4 of the paper, vectorised over chunks of entering tokens; differentiable by autograd.

    `start` is the index of each sequence's first valid key; keys before it are padding. Returns o, the final slots of
    keys and the final slots of values.

    Computes in float32 or wider, and rounds only the output. Chunk c consists of the tokens `c·C + r` that enter the
    slots and the queries at `c·C + r + window`; queries before the first entering token form chunks with negative c.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, f, q_slots, k_slots = (x.to(wide) for x in (q, k, v, f, q_slots, k_slots))
    queries, heads_q = q.shape[1:3]
    keys, heads, slots = f.shape[1:]
    group = heads_q // heads
    window = min(window, keys)
    # number of query chunks before the first token leaves the window
    lead = max(math.ceil((window - (keys - queries)) / CHUNK), 0)
    entering = keys - window
    chunks = max(lead + math.ceil(entering / CHUNK), 1)
    first = -lead * CHUNK

    def rows(x: Tensor, begin: int, count: int) -> Tensor:
        """Return rows `begin … begin + count − 1` of dimension 1 as `[N, chunks, C, ...]`, with zeros outside x."""
        inside = x[:, max(begin, 0) : max(begin + count, 0)]
        before = min(max(-begin, 0), count)
        padding = [0, 0] * (x.dim() - 2) + [before, count - before - inside.shape[1]]
        return torch.nn.functional.pad(inside, padding).unflatten(1, (-1, CHUNK))

    f = f.masked_fill((torch.arange(keys, device=f.device) < start[:, None])[..., None, None], 0)
    # tokens still in the window at the end have not entered the slots: their gates have no effect yet
    g = rows(f[:, :entering], first, chunks * CHUNK)
    ks, vs = (rows(x[:, :entering], first, chunks * CHUNK) for x in (k_slots, v))
    begin_q = first + window - (keys - queries)
    qs, qw = (rows(x, begin_q, chunks * CHUNK).unflatten(3, (heads, group)) for x in (q_slots, q))

    # the sum of the log-gates of tokens j + 1 … t, [N, chunks, t, j, H, M]; a difference of cumulative sums would lose
    # precision
    order = torch.arange(CHUNK, device=f.device)
    later = (order[:, None] > order)[..., None, None]
    between = torch.where(later, g[:, :, :, None], 0).cumsum(2)
    between = between.masked_fill((order[:, None] < order)[..., None, None], -math.inf)
    weight = between.exp() * -g.expm1()[:, :, None]
    decay = g.cumsum(2).exp()

    def before_chunks(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots before every chunk, `[N, chunks, H, M, D]`, and the slots after the last chunk."""
        added = torch.einsum("ncjhm,ncjhd->nchmd", weight[:, :, -1], x)
        states = []
        for c in range(chunks):
            states.append(state)
            state = decay[:, c, -1, :, :, None] * state + added[:, c]
        return torch.stack(states, 1), state

    before_k, slots_k = before_chunks(ks, slots_k)
    before_v, slots_v = before_chunks(vs, slots_v)
    long = torch.einsum("ncthgd,nchmd->ncthgm", qs, before_k) * decay[:, :, :, :, None]
    long = long + torch.einsum("ncthgj,nctjhm->ncthgm", torch.einsum("ncthgd,ncjhd->ncthgj", qs, ks), weight)

    # the window keys t − window + 1 … t of a chunk's queries lie in the C + window rows from its first entering token
    # on
    begin = first + CHUNK * torch.arange(chunks, device=f.device)[:, None]
    if CHUNK + window < keys:
        index = begin + torch.arange(CHUNK + window, device=f.device)
    else:
        index = torch.arange(keys, device=f.device)[None]
    kw, vw = (x[:, index.clamp(0, keys - 1)] for x in (k, v))
    relative = (index - begin)[:, None]
    seen = (relative > order[:, None]) & (relative <= order[:, None] + window)
    exists = (index >= start[:, None, None]) & (index < keys)
    seen = (seen & exists[:, :, None])[:, :, :, None, None]
    short = torch.einsum("ncthgd,ncjhd->ncthgj", qw, kw).masked_fill(~seen, -math.inf)

    p_long, p_short = (scale * torch.cat([long, short], -1)).softmax(-1).split([slots, short.shape[-1]], -1)
    o = torch.einsum("ncthgm,nchmd->ncthgd", p_long * decay[:, :, :, :, None], before_v)
    o = o + torch.einsum("ncthgj,ncjhd->ncthgd", torch.einsum("ncthgm,nctjhm->ncthgj", p_long, weight), vs)
    o = o + torch.einsum("ncthgj,ncjhd->ncthgd", p_short, vw)
    o = o.flatten(3, 4).flatten(1, 2)
    return o[:, -begin_q : queries - begin_q].to(dtype), slots_k, slots_v


def step_reference(q, k, v, f, q_slots, k_slots, state, *, scale: float) -> Tensor:
    """Run one decoding step, in which the oldest token in the ring buffer enters the slots; overwrites `state`."""
    own_keys = k_slots is not None
    q_slots = q_slots if own_keys else q
    index = torch.arange(len(q), device=q.device)
    group = q.shape[1] // k.shape[1]
    if state.window:
        length = state.length[:, 0]
        i_ring = length % state.window
        leaving = (length >= state.window)[:, None, None]
        gate = torch.where(leaving, state.f[index, i_ring], 0).to(state.slots_k.dtype)
        keys, values = (state.k_slots if own_keys else state.k)[index, i_ring], state.v[index, i_ring]
    else:
        gate, keys, values = f.to(state.slots_k.dtype), k_slots if own_keys else k, v
    alpha, enter = gate.exp().unsqueeze(-1), -gate.expm1().unsqueeze(-1)
    state.slots_k.mul_(alpha).addcmul_(enter, keys.unsqueeze(2).to(enter.dtype))
    state.slots_v.mul_(alpha).addcmul_(enter, values.unsqueeze(2).to(enter.dtype))
    if state.window:
        for ring, x in zip((state.k, state.v, state.f, state.k_slots), (k, v, f, k_slots), strict=True):
            if ring is not None:
                ring[index, i_ring] = x
    state.length.add_(1)
    wide = state.slots_k.dtype
    ring_k, ring_v = (x.to(wide).repeat_interleave(group, 2) for x in (state.k, state.v))
    slots_k, slots_v = (x.repeat_interleave(group, 1) for x in (state.slots_k, state.slots_v))
    short = torch.einsum("nhd,njhd->nhj", q.to(wide), ring_k)
    hidden = torch.arange(state.window, device=q.device) >= state.length[:, :1]
    short = short.masked_fill(hidden[:, None], -math.inf)
    long = torch.einsum("nhd,nhmd->nhm", q_slots.to(wide), slots_k)
    p_long, p_short = (scale * torch.cat([long, short], -1)).softmax(-1).split([long.shape[-1], state.window], -1)
    o = torch.einsum("nhm,nhmd->nhd", p_long, slots_v) + torch.einsum("nhj,njhd->nhd", p_short, ring_v)
    return o.to(q.dtype)
