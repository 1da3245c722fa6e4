"""Table 4's variants that the operations do not know: each token twice, or chunk after chunk."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv, chunk_places, inverse, packed_positions, sequence_ids
from tokenmix_core.nn import moved
from tokenmix_core.ops import kept_attention, l2_normalise

if TYPE_CHECKING:
    from tokenmix_nats_l.mixer import NatsL, Tokens

# channels that keys have beside their own where a chunk stands twice: as many bytes as kernels read at once
_CHANNELS = 16


def far_delta_rule(
    layer: NatsL, tokens: Tokens, writes: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """What each token reads of the state before its own chunk, which decays up to it: own chunks are softmax's alone.

    A chunk stands twice, in one of twice the length: at first its tokens read, and neither write nor decay the state;
    then they write. The decay up to a token is a factor of what it has read.
    """
    twice, C = _twice(tokens.q.shape[1], layer.chunk, cu_seqlens), layer.chunk
    reading = tokens._replace(g=torch.zeros_like(tokens.g), beta=torch.zeros_like(tokens.beta))
    both = {name: (getattr(reading, name), getattr(tokens, name)) for name in ("q", "k", "v", "g", "beta")}
    doubled = tokens._replace(**{name: twice.join(*pair) for name, pair in both.items()})
    o = twice.readers(layer.delta_rule(doubled, writes, None, twice.boundaries, write_chunk=2 * C)[0])
    decay = twice.summed(tokens.g).exp().repeat_interleave(layer.group, 2)
    return (o * decay.unsqueeze(-1)).to(o.dtype)


def _twice(T: int, C: int, cu_seqlens: Tensor | None) -> _InRows | _Packed:
    """Where chunks of C among T tokens stand twice."""
    return _InRows(T, C) if cu_seqlens is None else _Packed(T, C, cu_seqlens)


class _Chunks:
    """What rows and packed sequences share."""

    in_chunks: Callable[[Tensor], Tensor]
    in_order: Callable[[Tensor], Tensor]

    def summed(self, g: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """Sums since the beginnings of chunks."""
        return self.in_order(self.in_chunks(g).cumsum(1))


class _InRows(_Chunks):
    """Rows of T tokens in which chunks stand twice; a last partial one is filled up."""

    boundaries = None

    def __init__(self, T: int, C: int):
        self.T, self.C, self.chunks = T, C, cdiv(T, C)

    def join(self, readers: Float[Tensor, "B T ..."], writers: Float[Tensor, "B T ..."]) -> Tensor:
        """Each chunk of readers before that of writers."""
        both = [self.in_chunks(x).unflatten(0, (-1, self.chunks)) for x in (readers, writers)]
        return torch.cat(both, 2).flatten(1, 2)

    def readers(self, o: Tensor) -> Float[Tensor, "B T ..."]:
        """What readers got."""
        return o.unflatten(1, (self.chunks, -1))[:, :, : self.C].flatten(1, 2)[:, : self.T]

    def in_chunks(self, x: Float[Tensor, "B T ..."]) -> Float[Tensor, "slots C ..."]:
        """The tokens of each slot's chunk, zeros behind those of a partial one."""
        filled = F.pad(x, [0, 0] * (x.dim() - 2) + [0, self.chunks * self.C - self.T])
        return filled.unflatten(1, (self.chunks, self.C)).flatten(0, 1)

    def in_order(self, x: Float[Tensor, "slots C ..."]) -> Float[Tensor, "B T ..."]:
        """The tokens of chunks in their order."""
        return x.unflatten(0, (-1, self.chunks)).flatten(1, 2)[:, : self.T]

    def turns(self, slots: int, device: torch.device) -> list[Int[Tensor, "sequences"]]:
        """The slots of all rows' first chunks, of their second ones, and so on."""
        return list(torch.arange(slots, device=device).view(-1, self.chunks).unbind(1))


class _Packed(_Chunks):
    """The same for packed sequences, in which a partial chunk stands twice as it is."""

    def __init__(self, T: int, C: int, cu_seqlens: Int[Tensor, "N_plus_1"]):
        self.T, self.C, self.cu_seqlens, self.boundaries = T, C, cu_seqlens, 2 * cu_seqlens
        sequence, position = sequence_ids(cu_seqlens, T), packed_positions(cu_seqlens, T)
        place = position % C
        size = (cu_seqlens.diff()[sequence] - position + place).clamp(max=C)
        reads = 2 * (cu_seqlens[sequence] + position) - place
        # where readers and writers stand, and who stands at each place
        self.places = torch.cat((reads, reads + size))
        self.order = inverse(self.places, 2 * T)
        # the same for chunks of their own, with holes behind partial ones
        self.chunks, self.slots = chunk_places(cu_seqlens, T, C)

    def join(self, readers: Float[Tensor, "1 T ..."], writers: Float[Tensor, "1 T ..."]) -> Tensor:
        return moved(torch.cat((readers[0], writers[0])), self.order, self.places).unsqueeze(0)

    def readers(self, o: Tensor) -> Float[Tensor, "1 T ..."]:
        of_readers = torch.where(self.order < self.T, self.order, -1)
        return moved(o[0], self.places[: self.T], of_readers, holes=True).unsqueeze(0)

    def in_chunks(self, x: Float[Tensor, "1 T ..."]) -> Float[Tensor, "slots C ..."]:
        return moved(x[0], self.chunks, self.slots, holes=True)

    def in_order(self, x: Float[Tensor, "slots C ..."]) -> Float[Tensor, "1 T ..."]:
        return moved(x.flatten(0, 1), self.slots, self.chunks.flatten(), holes=True).unsqueeze(0)

    def turns(self, slots: int, device: torch.device) -> list[Int[Tensor, "sequences"]]:
        """As in rows, of the longest sequences first, so that those of a turn are the first ones of the turn before."""
        boundaries = self.cu_seqlens.tolist()
        first = [
            (start // self.C + n, cdiv(end - start, self.C)) for n, (start, end) in enumerate(pairwise(boundaries))
        ]
        first.sort(key=lambda one: -one[1])
        of_turns = ([slot + i for slot, chunks in first if chunks > i] for i in range(first[0][1] if first else 0))
        return [torch.tensor(slots, device=device) for slots in of_turns]


def chunk_by_chunk(
    layer: NatsL, tokens: Tokens, writes: Float[Tensor, "B slots H"], cu_seqlens: Int[Tensor, "N_plus_1"] | None
) -> Float[Tensor, "B T HA VA"]:
    """The delta rule's outputs where softmax chunks leave the state undecayed: all sequences' first chunks, and so on.

    Which packed sequences have another chunk is asked of the device.
    """
    _say_once()
    chunks, fit = _twice(tokens.q.shape[1], layer.chunk, cu_seqlens), layer.fit
    writes = writes.flatten(0, 1)
    slots = {name: chunks.in_chunks(getattr(tokens, name)) for name in ("q", "k", "v", "g", "beta")}
    turns = chunks.turns(len(slots["q"]), tokens.q.device)
    if not turns:
        return layer.as_softmax_heads(torch.zeros_like(tokens.v))
    wide, outputs = torch.promote_types(tokens.q.dtype, torch.float32), []
    state = tokens.q.new_zeros(len(turns[0]), *fit.state_shape(layer.num_heads), dtype=wide)
    for turn in turns:
        state, chunk = state[: len(turn)], tokens._replace(**{name: x[turn] for name, x in slots.items()})
        o, after = layer.delta_rule(chunk, None, state)
        if layer.own_chunk == "softmax":
            o = carried(layer, chunk, state, torch.zeros_like(state[..., 0, 0]))
        outputs.append(o)
        state = state + fit.gates(writes[turn])[..., None, None] * (after - state)
    # nobody reads the last state, and yet what wrote to it has a gradient, of zeros: replicas wait for it
    outputs[-1] = outputs[-1] + 0 * state.sum()
    of_turns = torch.cat(outputs)
    return chunks.in_order(
        of_turns.new_zeros(len(writes), *of_turns.shape[1:]).index_copy(0, torch.cat(turns), of_turns)
    )


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
    twice = _twice(tokens.q.shape[1], layer.chunk, cu_seqlens)
    return _far_softmax(layer, tokens.softmax_q, tokens.softmax_k, tokens.softmax_v, keep, twice, twice)


def far_attention_of_last(
    layer: NatsL,
    q: Float[Tensor, "B TQ HA K"],
    k: Float[Tensor, "B TK HA K"],
    v: Float[Tensor, "B TK HA V"],
    keep: Float[Tensor, "B slots H"],
) -> Float[Tensor, "B TQ HA V"]:
    """The same of queries that are the last ones of the keys' tokens."""
    (TQ, TK), C = (q.shape[1], k.shape[1]), layer.chunk
    # from the beginning of the first query's chunk
    head = (TK - TQ) % C
    q = F.pad(q, (0, 0, 0, 0, head, 0))
    return _far_softmax(layer, q, k, v, keep, _InRows(head + TQ, C), _InRows(TK, C))[:, head:]


def _far_softmax(
    layer: NatsL, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, queries: _InRows | _Packed, keys: _InRows | _Packed
) -> Float[Tensor, "B TQ HA V"]:
    """Attention of queries to kept chunks before their own.

    A chunk stands twice, in one of twice the length: first its queries, beside keys that weigh nothing, which are all
    that they see of it; then its keys, for later chunks. More channels, 1 in every query, give keys that weigh nothing
    a score that no normed heads come near. Where there is nothing else to see these are all, and their values are 0.
    """
    # not lower, so that the log-sum-exp of such scores alone is still exact to a thousandth
    weightless = -4096 * layer.softmax_dim**0.5 / _CHANNELS
    blank = F.pad(torch.zeros_like(k), (0, _CHANNELS), value=weightless)
    q, k = F.pad(q, (0, _CHANNELS), value=1.0), F.pad(k, (0, _CHANNELS))
    q, k = queries.join(q, torch.zeros_like(q)), keys.join(blank, k)
    v = keys.join(torch.zeros_like(v), v)
    scale, boundaries = layer.softmax_dim**-0.5, keys.boundaries
    o = kept_attention(q, k, v, keep, unit=2 * layer.chunk, scale=scale, cu_seqlens=boundaries, impl=layer.impl).o
    return queries.readers(o)


@functools.cache
def _say_once() -> None:
    warnings.warn("NAtS-L: decay=False goes chunk by chunk, which is slower than the layer itself", stacklevel=3)
