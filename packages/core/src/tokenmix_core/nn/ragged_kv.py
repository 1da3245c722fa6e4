"""Keys and values of tokens that were chosen head by head: lists of unequal lengths, which grow and shrink."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn.state import Bounds, StatePart, copy_all
from tokenmix_core.ops import attention_decode
from tokenmix_core.ops.common import AttentionOutput, Impl


def first_taken(take: Bool[Tensor, "N H C"], room: int) -> tuple[Int[Tensor, "N H room"], Int[Tensor, "N H"]]:
    """Which of C ≥ 1 tokens are the first `room` that each head takes, in their order, and how many it takes in all.

    Where it takes fewer the last one is repeated, and the first token of all where it takes none.
    """
    counts = take.contiguous().cumsum(-1)
    lengths = counts[..., -1]
    ranks = torch.arange(1, room + 1, device=take.device).minimum(lengths.unsqueeze(-1))
    return torch.searchsorted(counts, ranks), lengths


class RaggedKVState(StatePart):
    """Keys `[N, H, places, K]` and values `[N, H, places, V]`, of which row n's head h fills the first `lengths[n, h]`.

    Lengths live on the device. The host knows a bound of the longest, which calls raise without looking; only where the
    bound outgrows the room is the device asked how long the longest really is, and room is made or given back for that.

    Args:
        heads: H.
        key_size: K.
        value_size: V.
        capacity: tokens that a head keeps at the most, with room for them from the first on; None for no such limit.
        unit: room is made in multiples of so many places.
    """

    keeps_tokens = True

    def __init__(self, heads: int, key_size: int, value_size: int, *, capacity: int | None = None, unit: int = 64):
        self.heads, self.key_size, self.value_size, self.capacity = heads, key_size, value_size, capacity
        self.unit = unit
        self._stored: tuple[Tensor, Tensor, Tensor] | None = None
        # the longest list is not longer
        self._bound = 0

    @property
    def places(self) -> int:
        """Tokens that each head has room for."""
        return 0 if self._stored is None else self.keys.shape[2]

    @property
    def keys(self) -> Float[Tensor, "N H places K"]:
        """The keys; there are none before the first write."""
        return self._held()[0]

    @property
    def values(self) -> Float[Tensor, "N H places V"]:
        """The values; there are none before the first write."""
        return self._held()[1]

    @property
    def lengths(self) -> Int[Tensor, "N H"]:
        """Tokens held by each head, int32."""
        return self._held()[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and lengths, if there are any."""
        return self._stored or ()

    def append(
        self,
        k: Float[Tensor, "N C H K"],
        v: Float[Tensor, "N C H V"],
        take: Bool[Tensor, "N C H"],
        *,
        longest: int | None = None,
    ) -> None:
        """Put those of the tokens that a head takes behind what it holds, in their order.

        Args:
            k, v: of the tokens.
            take: which of them each head takes.
            longest: what the longest list holds then, or more, if the host knows: room is made for that, without
                looking. None: room for all tokens is made.

        Raises:
            ValueError: more tokens than `capacity` (seen where the host knows: for tensors on a CPU).
        """
        k, v, take = (x.detach().transpose(1, 2) for x in (k, v, take))
        if self._stored is None and take.shape[2]:
            self._begin(k, v, take, longest)
            return
        self._make_room(k, v, longest)
        if not take.shape[2]:
            return
        lengths = self.lengths
        if take.shape[2] == 1:
            one, fits = take.squeeze(2), lengths < self.places
            self._refuse(one & ~fits)
            self.replace(lengths.clamp(max=self.places - 1), k.squeeze(2), v.squeeze(2), one & fits)
            lengths += one & fits
            return
        at = lengths.unsqueeze(-1) + take.cumsum(-1, dtype=torch.int32) - 1
        self._refuse((at >= self.places) & take)
        # what is not taken goes to a place of its own behind all others
        at = at.masked_fill(~take, self.places).long().unsqueeze(-1)
        for held, new in ((self.keys, k), (self.values, v)):
            room = torch.cat((held, held[:, :, :1]), 2)
            held.copy_(room.scatter_(2, at.expand_as(new), new)[:, :, :-1])
        lengths += take.sum(-1, dtype=torch.int32)

    def hold(self, keys: Tensor, values: Tensor, lengths: Int[Tensor, "N H"]) -> None:
        """Hold these lists alone: `[N, H, places, K]`, `[N, H, places, V]` and int32 lengths; nothing is copied."""
        self._stored, self._bound = (keys, values, lengths), keys.shape[2]

    def replace(
        self,
        place: Int[Tensor, "N H"],
        k: Float[Tensor, "N H K"],
        v: Float[Tensor, "N H V"],
        where: Bool[Tensor, "N H"],
    ) -> None:
        """Put a token in another's place in those heads that `where` names: the other is evicted."""
        place = place.long()[..., None, None]
        for held, new in ((self.keys, k), (self.values, v)):
            index = place.expand(*place.shape[:3], held.shape[-1])
            kept = held.gather(2, index)
            held.scatter_(2, index, torch.where(where[..., None, None], new.detach().unsqueeze(2), kept))

    def compact(self, keep: Bool[Tensor, "N H places"]) -> None:
        """Drop the tokens that `keep` does not name, keep the order of the others, and give room back."""
        filled = torch.arange(self.places, device=keep.device) < self.lengths.unsqueeze(-1)
        keep = keep & filled
        order = (~keep).to(torch.int8).argsort(dim=-1, stable=True).unsqueeze(-1)
        keys, values = (x.gather(2, order.expand_as(x)) for x in (self.keys, self.values))
        kept = keys, values, keep.sum(-1, dtype=torch.int32)
        if self.fixed:
            copy_all(kept, self._held())
        else:
            self._stored = kept
            self._fit(0)

    def rows(self, rows: Int[Tensor, "n"]) -> RaggedKVState:
        """The lists of some rows, as a state of their own."""
        apart = RaggedKVState(self.heads, self.key_size, self.value_size, capacity=self.capacity, unit=self.unit)
        keys, values, lengths = (x[rows] for x in self._held())
        apart._stored, apart._bound = (keys, values, lengths), self._bound
        return apart

    def join(self, parts: Sequence[tuple[Tensor, RaggedKVState]]) -> None:
        """Hold in these rows, each of which is named once, what these states hold."""
        N, room = sum(len(rows) for rows, _ in parts), max(part.places for _, part in parts)
        keys, values = (x.new_zeros(N, self.heads, room, x.shape[3]) for x in (self.keys, self.values))
        lengths = self.lengths.new_empty(N, self.heads)
        for rows, part in parts:
            keys[rows, :, : part.places], values[rows, :, : part.places] = part.keys, part.values
            lengths[rows] = part.lengths
        self._stored, self._bound = (keys, values, lengths), max(part._bound for _, part in parts)

    def attend(
        self, q: Float[Tensor, "N HQ K"], *, scale: float | None = None, impl: Impl | None = None
    ) -> AttentionOutput:
        """Attend from one query a row to its keys: o `[N, 1, HQ, V]` and the log-sum-exp `[N, 1, HQ]`, −∞ for none.

        Each head reads its own tokens alone.
        """
        N, HQ, K = q.shape
        keys, values, lengths = self._held()
        folded = q.view(N * self.heads, 1, HQ // self.heads, K)
        keys, values = (x.flatten(0, 1).unsqueeze(2) for x in (keys, values))
        o, lse = attention_decode(folded, keys, values, lengths.flatten(), scale=scale, impl=impl)
        return AttentionOutput(o.view(N, 1, HQ, -1), lse.view(N, 1, HQ))

    def map_(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it."""
        if self._stored is not None:
            keys, values, lengths = map(fn, self._stored)
            self._stored = keys, values, lengths

    def clear(self) -> None:
        """Forget everything."""
        self._stored, self._bound = None, 0

    def loosen(self) -> None:
        """Be free to move again."""
        if self.fixed and self.capacity is None:
            self._bound = self.places
        super().loosen()

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """From nothing kept, or all room of a `capacity`, to every token kept."""
        token = self.heads * (self.key_size + self.value_size) * dtype.itemsize
        lengths = self.heads * torch.int32.itemsize
        if self.capacity is not None:
            size = batch_size * (self.capacity * token + lengths)
            return Bounds(size, size)
        return Bounds(0, batch_size * (seq_len * token + lengths))

    def held(self, seq_len: int) -> int:
        """Bytes of the tokens now held; waits for the device where there is no `capacity`."""
        if self._stored is None:
            return 0
        if self.capacity is not None:
            return self.allocated
        token = (self.key_size + self.value_size) * self.keys.element_size()
        return int(self.lengths.sum()) * token + self.lengths.nbytes

    @property
    def allocated(self) -> int:
        """Bytes of memory taken, spare room included."""
        return 0 if self._stored is None else sum(x.nbytes for x in self._stored)

    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._stored is None:
            raise ValueError("RaggedKVState: nothing has been written yet")
        return self._stored

    def _refuse(self, beyond: Bool[Tensor, "N H ..."]) -> None:
        """Refuse tokens beyond the capacity, where looking does not wait."""
        if self.capacity is not None and not beyond.is_cuda and bool(beyond.any()):
            raise ValueError(f"RaggedKVState: heads keep at most {self.capacity} tokens, got more")

    def _begin(self, k: Tensor, v: Tensor, take: Tensor, longest: int | None) -> None:
        """The first tokens: every place looks for its own."""
        bound = take.shape[2] if longest is None else longest
        room = self.capacity or self._room(bound)
        # behind the last token it is repeated: a place that was never written may be read under a mask
        at, lengths = first_taken(take, room)
        if self.capacity is not None:
            self._refuse(lengths > room)
        at = at.unsqueeze(-1)
        keys, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        self._stored, self._bound = (keys, values, lengths.to(torch.int32)), bound

    def _make_room(self, k: Tensor, v: Tensor, longest: int | None) -> None:
        if self._stored is None:
            room = self.capacity or self._room(k.shape[2])
            keys, values = (x.new_zeros(*x.shape[:2], room, x.shape[3]) for x in (k, v))
            self._stored = keys, values, torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device)
        if self.capacity is not None or self.fixed:
            return
        self._bound = self._bound + k.shape[2] if longest is None else longest
        if self._bound > self.places:
            if longest is None:
                self._fit(k.shape[2])
            else:
                self._lengthen(self._room(longest))

    def _fit(self, more: int) -> None:
        """Room for the longest list and `more` tokens; much spare room is given back."""
        keys, values, lengths = self._held()
        longest = int(lengths.max()) if lengths.numel() else 0
        self._bound = longest + more
        if self.capacity is not None or self._bound <= self.places <= 2 * self._room(self._bound):
            return
        room = self._room(self._bound + self._bound // 2 if self._bound > self.places else self._bound)
        grown = []
        for x in (keys, values):
            # zeros: a place that was never written may be read under a mask, and must not be NaN
            y = x.new_zeros(*x.shape[:2], room, x.shape[3])
            y[:, :, :longest] = x[:, :, :longest]
            grown.append(y)
        self._stored = grown[0], grown[1], lengths

    def _widen(self, room: int, more: int) -> None:
        if self._stored is None or self.capacity is not None:
            return
        # what steps fill by and by is as long as the longest list and all tokens to come
        needed = self._room(int(self.lengths.max()) + more)
        if needed != self.places:
            self._lengthen(needed)

    def _lengthen(self, room: int) -> None:
        """Have so many places, fewer than now where the last ones are free."""
        keys, values, lengths = self._held()
        pad = (0, 0, 0, room - self.places)
        self._stored = torch.nn.functional.pad(keys, pad), torch.nn.functional.pad(values, pad), lengths

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        if self._stored is None or self.capacity is not None:
            super()._move(storage, more)
            return
        keys, values, lengths = self._stored
        longest = int(lengths.max())
        if longest + more > storage[0].shape[2]:
            raise ValueError(f"the storage has {storage[0].shape[2]} places for {longest + more} tokens")
        copy_all(
            (keys[:, :, :longest], values[:, :, :longest], lengths),
            (storage[0][:, :, :longest], storage[1][:, :, :longest], storage[2]),
        )
        self._stored = storage[0], storage[1], storage[2]

    def _room(self, tokens: int) -> int:
        return max(1, cdiv(tokens, self.unit)) * self.unit
