"""Variants of the paper's Table 4 that the fused operations lack: they run on duplicated tokens, or chunk by chunk."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_places, inverse, packed_lengths, packed_positions, sequence_ids
from tokenmix_core.nn import moved
from tokenmix_core.ops import kept_attention, l2_normalise
from tokenmix_nats_l.chunks import Tokens
from tokenmix_nats_l.layer import NatsLLayer

# additional key channels in duplicated chunks: 16, so that loads remain vectorised
_CHANNELS = 16


def past_chunk_delta_rule(
    layer: NatsLLayer, tokens: Tokens, writes: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """Return what each token reads from the state before its chunk, decayed from the chunk's start to the token.

    Here only softmax attention sees the token's own chunk. Each chunk becomes a chunk of twice the length with two
    copies: the first only reads the state, without writes or decay, and the second only writes. The outputs are then
    multiplied by the decay from the chunk's start to each token.
    """
    doubling, C = _doubled(tokens.q.shape[1], layer.chunk, cu_seqlens), layer.chunk
    reading = tokens._replace(g=torch.zeros_like(tokens.g), beta=torch.zeros_like(tokens.beta))
    both = {name: (getattr(reading, name), getattr(tokens, name)) for name in ("q", "k", "v", "g", "beta")}
    doubled = tokens._replace(**{name: doubling.join(*pair) for name, pair in both.items()})
    o = doubling.readers(layer.delta_rule(doubled, writes, None, doubling.doubled_cu_seqlens, write_chunk=2 * C)[0])
    decay = doubling.summed(tokens.g).exp().repeat_interleave(layer.group, 2)
    return (o * decay.unsqueeze(-1)).to(o.dtype)


def _doubled(T: int, C: int, cu_seqlens: Tensor | None) -> _InRows | _Packed:
    """Return the index maps that duplicate the chunks of C tokens among T tokens."""
    return _InRows(T, C) if cu_seqlens is None else _Packed(T, C, cu_seqlens)


class _Chunks:
    """Base class of the index maps that duplicate the chunks of rows or of packed sequences."""

    in_chunks: Callable[[Tensor], Tensor]
    in_order: Callable[[Tensor], Tensor]

    def summed(self, g: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """Return the cumulative sums of g inside each chunk."""
        return self.in_order(self.in_chunks(g).cumsum(1))


class _InRows(_Chunks):
    """Index maps for rows of T tokens, whose last chunk is padded if it is incomplete."""

    doubled_cu_seqlens = None

    def __init__(self, T: int, C: int):
        self.T, self.C, self.chunks = T, C, cdiv(T, C)

    def join(self, readers: Float[Tensor, "B T ..."], writers: Float[Tensor, "B T ..."]) -> Tensor:
        """Interleave chunks: each chunk of `readers` is followed by the same chunk of `writers`."""
        both = [self.in_chunks(x).unflatten(0, (-1, self.chunks)) for x in (readers, writers)]
        return torch.cat(both, 2).flatten(1, 2)

    def readers(self, o: Tensor) -> Float[Tensor, "B T ..."]:
        """Return the outputs of the reading copies among the outputs o of joined chunks."""
        return o.unflatten(1, (self.chunks, -1))[:, :, : self.C].flatten(1, 2)[:, : self.T]

    def in_chunks(self, x: Float[Tensor, "B T ..."]) -> Float[Tensor, "slots C ..."]:
        """Return the tokens of each chunk, padded with zeros; `slots` is the number of chunks, or a bound if packed."""
        filled = F.pad(x, [0, 0] * (x.dim() - 2) + [0, self.chunks * self.C - self.T])
        return filled.unflatten(1, (self.chunks, self.C)).flatten(0, 1)

    def in_order(self, x: Float[Tensor, "slots C ..."]) -> Float[Tensor, "B T ..."]:
        """Undo `in_chunks`: return the tokens of all chunks in their original order."""
        return x.unflatten(0, (-1, self.chunks)).flatten(1, 2)[:, : self.T]

    def rounds(self, slots: int, device: torch.device) -> list[Int[Tensor, "sequences"]]:
        """Return chunk indices in rounds: the first chunks of all rows, then all second chunks, and so on."""
        return list(torch.arange(slots, device=device).view(-1, self.chunks).unbind(1))


class _Packed(_Chunks):
    """Index maps for packed sequences, whose incomplete chunks are duplicated without padding."""

    def __init__(self, T: int, C: int, cu_seqlens: Int[Tensor, "N_plus_1"]):
        self.T, self.C, self.cu_seqlens, self.doubled_cu_seqlens = T, C, cu_seqlens, 2 * cu_seqlens
        sequence, position = sequence_ids(cu_seqlens, T), packed_positions(cu_seqlens, T)
        offset = position % C
        size = (packed_lengths(cu_seqlens, T) - position + offset).clamp(max=C)
        reads = 2 * (cu_seqlens[sequence] + position) - offset
        # index of each reader and then of each writer among the joined tokens, and the inverse map
        self.targets = torch.cat((reads, reads + size))
        self.order = inverse(self.targets, 2 * T)
        # index map that lays out chunks separately, with a gap after an incomplete chunk
        self.chunks, self.slots = chunk_places(cu_seqlens, T, C)

    def join(self, readers: Float[Tensor, "1 T ..."], writers: Float[Tensor, "1 T ..."]) -> Tensor:
        return moved(torch.cat((readers[0], writers[0])), self.order, self.targets).unsqueeze(0)

    def readers(self, o: Tensor) -> Float[Tensor, "1 T ..."]:
        of_readers = torch.where(self.order < self.T, self.order, -1)
        return moved(o[0], self.targets[: self.T], of_readers, holes=True).unsqueeze(0)

    def in_chunks(self, x: Float[Tensor, "1 T ..."]) -> Float[Tensor, "slots C ..."]:
        return moved(x[0], self.chunks, self.slots, holes=True)

    def in_order(self, x: Float[Tensor, "slots C ..."]) -> Float[Tensor, "1 T ..."]:
        return moved(x.flatten(0, 1), self.slots, self.chunks.flatten(), holes=True).unsqueeze(0)

    def rounds(self, slots: int, device: torch.device) -> list[Int[Tensor, "sequences"]]:
        """Return chunk indices as in `_InRows.rounds`, longest sequence first; ended sequences are left out."""
        boundaries = self.cu_seqlens.tolist()
        first = [
            (start // self.C + n, cdiv(end - start, self.C)) for n, (start, end) in enumerate(pairwise(boundaries))
        ]
        first.sort(key=lambda one: -one[1])
        of_rounds = ([slot + i for slot, chunks in first if chunks > i] for i in range(first[0][1] if first else 0))
        return [torch.tensor(slots, device=device) for slots in of_rounds]


def chunk_by_chunk(
    layer: NatsLLayer, tokens: Tokens, writes: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """Apply the delta rule chunk by chunk, to all sequences at a time, so that softmax chunks do not decay the state.

    For packed sequences this waits for the device, because the host must know how many chunks they have.
    """
    _warn_once()
    chunks, fit = _doubled(tokens.q.shape[1], layer.chunk, cu_seqlens), layer.fit
    writes = writes.flatten(0, 1)
    slots = {name: chunks.in_chunks(getattr(tokens, name)) for name in ("q", "k", "v", "g", "beta")}
    rounds = chunks.rounds(len(slots["q"]), tokens.q.device)
    if not rounds:
        return layer.as_softmax_heads(torch.zeros_like(tokens.v))
    wide, outputs = torch.promote_types(tokens.q.dtype, torch.float32), []
    state = tokens.q.new_zeros(len(rounds[0]), *fit.state_shape(tokens.q.shape[2]), dtype=wide)
    for members in rounds:
        state, chunk = state[: len(members)], tokens._replace(**{name: x[members] for name, x in slots.items()})
        o, after = layer.delta_rule(chunk, None, state)
        if layer.own_chunk == "softmax":
            o = read_state(layer, chunk, state, torch.zeros_like(state[..., 0, 0]))
        outputs.append(o)
        state = state + fit.gates(writes[members])[..., None, None] * (after - state)
    # add a zero that depends on the unused last state: all parameters then get gradients (zeros), as DDP requires
    outputs[-1] = outputs[-1] + 0 * state.sum()
    in_rounds = torch.cat(outputs)
    return chunks.in_order(
        in_rounds.new_zeros(len(writes), *in_rounds.shape[1:]).index_copy(0, torch.cat(rounds), in_rounds)
    )


def read_state(layer: NatsLLayer, tokens: Tokens, state: Tensor, decay: Tensor) -> Float[Tensor, "B T HA VA"]:
    """Return the queries' outputs from the state before their chunk, decayed by `decay` and then up to each token."""
    fit = layer.fit
    q = l2_normalise(fit.keys(tokens.q).to(state.dtype)).repeat_interleave(fit.parts, 2)
    total = decay.unsqueeze(1) + fit.gates(tokens.g).cumsum(1)
    o = layer.head_dim**-0.5 * total.exp().unsqueeze(-1) * torch.einsum("bthk,bhkv->bthv", q, state)
    return layer.as_softmax_heads(fit.outputs(o, tokens.q.shape[2])).to(tokens.v.dtype)


def past_chunk_attention(
    layer: NatsLLayer, tokens: Tokens, keep: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """Attend only to softmax chunks before the token's own chunk; the output is 0 if there are none."""
    doubling = _doubled(tokens.q.shape[1], layer.chunk, cu_seqlens)
    return _past_chunk_softmax(layer, tokens.softmax_q, tokens.softmax_k, tokens.softmax_v, keep, doubling, doubling)


def past_chunk_attention_of_last(
    layer: NatsLLayer,
    q: Float[Tensor, "B TQ HA K"],
    k: Float[Tensor, "B TK HA K"],
    v: Float[Tensor, "B TK HA V"],
    keep: Float[Tensor, "B slots H"],
) -> Float[Tensor, "B TQ HA V"]:
    """Compute `past_chunk_attention` for the last TQ of TK tokens, whose queries are q."""
    (TQ, TK), C = (q.shape[1], k.shape[1]), layer.chunk
    # pad the queries so that they begin where the first query's chunk begins
    head = (TK - TQ) % C
    q = F.pad(q, (0, 0, 0, 0, head, 0))
    return _past_chunk_softmax(layer, q, k, v, keep, _InRows(head + TQ, C), _InRows(TK, C))[:, head:]


def _past_chunk_softmax(
    layer: NatsLLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    queries: _InRows | _Packed,
    keys: _InRows | _Packed,
) -> Float[Tensor, "B TQ HA V"]:
    """Attend from each query to the retained chunks before the query's own chunk.

    Each chunk becomes a chunk of twice the length with two copies. The first has the chunk's queries, and masking keys,
    which are the only keys of the own chunk that these queries see. The second has the chunk's keys, which later chunks
    see. Additional channels, 1 in every query, give masking keys a score far below that of any normalised key. The
    values of masking keys are 0, so that the output of a query without other keys is 0.
    """
    # the lowest masking score at which the log-sum-exp of masking keys alone is still exact to 1e-3
    masking = -4096 * layer.softmax_dim**0.5 / _CHANNELS
    blank = F.pad(torch.zeros_like(k), (0, _CHANNELS), value=masking)
    q, k = F.pad(q, (0, _CHANNELS), value=1.0), F.pad(k, (0, _CHANNELS))
    q, k = queries.join(q, torch.zeros_like(q)), keys.join(blank, k)
    v = keys.join(torch.zeros_like(v), v)
    scale, boundaries = layer.softmax_dim**-0.5, keys.doubled_cu_seqlens
    o = kept_attention(q, k, v, keep, unit=2 * layer.chunk, scale=scale, cu_seqlens=boundaries, impl=layer.impl).o
    return queries.readers(o)


@functools.cache
def _warn_once() -> None:
    warnings.warn("NAtS-L: decay=False runs chunk by chunk, which is slower than decay=True", stacklevel=3)
