"""Keys and values of tokens selected per head: lists of unequal lengths, which grow and shrink."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokenmix_core.chunking import cdiv
from tokenmix_core.nn.state.parts import Bounds, StatePart, copy_all
from tokenmix_core.ops import attention_decode
from tokenmix_core.ops.types import AttentionOutput, Impl


def first_taken(take: Bool[Tensor, "N H C"], most: int) -> tuple[Int[Tensor, "N H most"], Int[Tensor, "N H"]]:
    """Return the indices of the first `most` of C ≥ 1 tokens that each head takes, and how many it takes in all.

    If a head takes fewer, its last index is repeated; if it takes none, the index is 0.
    """
    counts = take.contiguous().cumsum(-1)
    lengths = counts[..., -1]
    ranks = torch.arange(1, most + 1, device=take.device).minimum(lengths.unsqueeze(-1))
    return torch.searchsorted(counts, ranks), lengths


class RaggedKVState(StatePart):
    """Keys `[N, H, slots, K]` and values `[N, H, slots, V]`; head h of row n fills the first `lengths[n, h]` slots.

    Lengths are stored on the device. The host knows an upper bound of the longest, which each call raises without a
    synchronisation. If the bound exceeds the number of slots, the host reads the longest length from the device, and
    allocates or frees slots accordingly.

    Args:
        heads: H.
        key_size: K.
        value_size: V.
        capacity: most tokens that a head keeps, allocated at the first write; None for no limit.
        unit: slots are allocated in multiples of this.
    """

    keeps_tokens = True

    def __init__(self, heads: int, key_size: int, value_size: int, *, capacity: int | None = None, unit: int = 64):
        self.heads, self.key_size, self.value_size, self.capacity = heads, key_size, value_size, capacity
        self.unit = unit
        self._stored: tuple[Tensor, Tensor, Tensor] | None = None
        # upper bound of the longest list
        self._bound = 0

    @property
    def num_slots(self) -> int:
        """Number of slots allocated for each head."""
        return 0 if self._stored is None else self.keys.shape[2]

    @property
    def keys(self) -> Float[Tensor, "N H slots K"]:
        """The keys; a ValueError before the first write."""
        return self._held()[0]

    @property
    def values(self) -> Float[Tensor, "N H slots V"]:
        """The values; a ValueError before the first write."""
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
        """Append to each head's list the tokens that the head takes, in their order.

        Args:
            k, v: keys and values of the tokens.
            take: True if the head takes the token.
            longest: an upper bound of the longest list afterwards, if the host knows one: slots are allocated for it
                without a synchronisation. None allocates slots for all C tokens.

        Raises:
            ValueError: more tokens than `capacity` (checked on a CPU only, as a GPU would have to synchronise).
        """
        k, v, take = (x.detach().transpose(1, 2) for x in (k, v, take))
        if self._stored is None and take.shape[2]:
            self._begin(k, v, take, longest)
            return
        self._ensure_slots(k, v, longest)
        if not take.shape[2]:
            return
        lengths = self.lengths
        if take.shape[2] == 1:
            one, fits = take.squeeze(2), lengths < self.num_slots
            self._refuse(one & ~fits)
            self.replace(lengths.clamp(max=self.num_slots - 1), k.squeeze(2), v.squeeze(2), one & fits)
            lengths += one & fits
            return
        at = lengths.unsqueeze(-1) + take.cumsum(-1, dtype=torch.int32) - 1
        self._refuse((at >= self.num_slots) & take)
        # tokens that are not taken are written to one extra slot, which is cut off
        at = at.masked_fill(~take, self.num_slots).long().unsqueeze(-1)
        for held, new in ((self.keys, k), (self.values, v)):
            extended = torch.cat((held, held[:, :, :1]), 2)
            held.copy_(extended.scatter_(2, at.expand_as(new), new)[:, :, :-1])
        lengths += take.sum(-1, dtype=torch.int32)

    def hold(self, keys: Tensor, values: Tensor, lengths: Int[Tensor, "N H"]) -> None:
        """Replace the contents by `[N, H, slots, K]`, `[N, H, slots, V]` and int32 lengths, without a copy."""
        self._stored, self._bound = (keys, values, lengths), keys.shape[2]

    def replace(
        self,
        slot: Int[Tensor, "N H"],
        k: Float[Tensor, "N H K"],
        v: Float[Tensor, "N H V"],
        where: Bool[Tensor, "N H"],
    ) -> None:
        """Evict the token in `slot` of each head whose `where` is True, and store another token there."""
        slot = slot.long()[..., None, None]
        for held, new in ((self.keys, k), (self.values, v)):
            index = slot.expand(*slot.shape[:3], held.shape[-1])
            kept = held.gather(2, index)
            held.scatter_(2, index, torch.where(where[..., None, None], new.detach().unsqueeze(2), kept))

    def compact(self, keep: Bool[Tensor, "N H slots"]) -> None:
        """Evict the tokens whose `keep` is False, preserve the order of the others, and free memory."""
        filled = torch.arange(self.num_slots, device=keep.device) < self.lengths.unsqueeze(-1)
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
        """Return a new state that holds copies of the lists of some rows."""
        apart = RaggedKVState(self.heads, self.key_size, self.value_size, capacity=self.capacity, unit=self.unit)
        keys, values, lengths = (x[rows] for x in self._held())
        apart._stored, apart._bound = (keys, values, lengths), self._bound
        return apart

    def join(self, parts: Sequence[tuple[Tensor, RaggedKVState]]) -> None:
        """Replace the contents by other states' lists: each `(rows, state)` in `parts` fills these rows."""
        N, slots = sum(len(rows) for rows, _ in parts), max(part.num_slots for _, part in parts)
        keys, values = (x.new_zeros(N, self.heads, slots, x.shape[3]) for x in (self.keys, self.values))
        lengths = self.lengths.new_empty(N, self.heads)
        for rows, part in parts:
            keys[rows, :, : part.num_slots], values[rows, :, : part.num_slots] = part.keys, part.values
            lengths[rows] = part.lengths
        self._stored, self._bound = (keys, values, lengths), max(part._bound for _, part in parts)

    def attend(
        self, q: Float[Tensor, "N HQ K"], *, scale: float | None = None, impl: Impl | None = None
    ) -> AttentionOutput:
        """Attend with one token per row: each query head to the list of its key head.

        Returns:
            o `[N, 1, HQ, V]` and the log-sum-exp `[N, 1, HQ]`, −∞ for a head without keys.
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

    def gather_rows(self, sources: Sequence[tuple[StatePart, Sequence[int]]]) -> None:
        super().gather_rows(sources)
        self._bound = self.num_slots

    def clear(self) -> None:
        """Drop all tokens."""
        self._stored, self._bound = None, 0

    def loosen(self) -> None:
        """End `fix`: tensors may be reallocated again."""
        if self.fixed and self.capacity is None:
            self._bound = self.num_slots
        super().loosen()

    def bounds(self, seq_len: int, batch_size: int, dtype: torch.dtype) -> Bounds:
        """Return the bytes if heads retain no token and if they retain all; with `capacity`, both count all slots."""
        token = self.heads * (self.key_size + self.value_size) * dtype.itemsize
        lengths = self.heads * torch.int32.itemsize
        if self.capacity is not None:
            size = batch_size * (self.capacity * token + lengths)
            return Bounds(size, size)
        return Bounds(0, batch_size * (seq_len * token + lengths))

    def held(self, seq_len: int) -> int:
        """Return the bytes of the tokens stored; waits for the device if there is no `capacity`."""
        if self._stored is None:
            return 0
        if self.capacity is not None:
            return self.allocated
        token = (self.key_size + self.value_size) * self.keys.element_size()
        return int(self.lengths.sum()) * token + self.lengths.nbytes

    @property
    def allocated(self) -> int:
        """Bytes of memory allocated, spare slots included."""
        return 0 if self._stored is None else sum(x.nbytes for x in self._stored)

    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._stored is None:
            raise ValueError("RaggedKVState: nothing has been written yet")
        return self._stored

    def _refuse(self, beyond: Bool[Tensor, "N H ..."]) -> None:
        """Raise a ValueError if any of `beyond` is True, on a CPU only: on a GPU the check would synchronise."""
        if self.capacity is not None and not beyond.is_cuda and bool(beyond.any()):
            raise ValueError(f"RaggedKVState: heads keep at most {self.capacity} tokens, got more")

    def _begin(self, k: Tensor, v: Tensor, take: Tensor, longest: int | None) -> None:
        """Store the first tokens: each slot gathers its token."""
        bound = take.shape[2] if longest is None else longest
        slots = self.capacity or self._rounded(bound)
        # spare slots repeat the last token: kernels may load an unwritten slot under a mask, and it must not be NaN
        at, lengths = first_taken(take, slots)
        if self.capacity is not None:
            self._refuse(lengths > slots)
        at = at.unsqueeze(-1)
        keys, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        self._stored, self._bound = (keys, values, lengths.to(torch.int32)), bound

    def _ensure_slots(self, k: Tensor, v: Tensor, longest: int | None) -> None:
        if self._stored is None:
            slots = self.capacity or self._rounded(k.shape[2])
            keys, values = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (k, v))
            self._stored = keys, values, torch.zeros(k.shape[:2], dtype=torch.int32, device=k.device)
        if self.capacity is not None or self.fixed:
            return
        self._bound = self._bound + k.shape[2] if longest is None else longest
        if self._bound > self.num_slots:
            if longest is None:
                self._fit(k.shape[2])
            else:
                self._set_slots(self._rounded(longest))

    def _fit(self, more: int) -> None:
        """Allocate slots for the longest list and `more` tokens; free slots if more than half are spare."""
        keys, values, lengths = self._held()
        longest = int(lengths.max()) if lengths.numel() else 0
        self._bound = longest + more
        if self.capacity is not None or self._bound <= self.num_slots <= 2 * self._rounded(self._bound):
            return
        slots = self._rounded(self._bound + self._bound // 2 if self._bound > self.num_slots else self._bound)
        grown = []
        for x in (keys, values):
            # zeros: kernels may load an unwritten slot under a mask, and it must not be NaN
            y = x.new_zeros(*x.shape[:2], slots, x.shape[3])
            y[:, :, :longest] = x[:, :, :longest]
            grown.append(y)
        self._stored = grown[0], grown[1], lengths

    def _resize(self, max_length: int, more: int) -> None:
        if self._stored is None or self.capacity is not None:
            return
        # every head may take all `more` tokens
        needed = self._rounded(int(self.lengths.max()) + more)
        if needed != self.num_slots:
            self._set_slots(needed)

    def _set_slots(self, slots: int) -> None:
        """Reallocate to `slots` slots; slots that this removes must be empty."""
        keys, values, lengths = self._held()
        pad = (0, 0, 0, slots - self.num_slots)
        self._stored = torch.nn.functional.pad(keys, pad), torch.nn.functional.pad(values, pad), lengths

    def _move(self, storage: Sequence[Tensor], more: int) -> None:
        if self._stored is None or self.capacity is not None:
            super()._move(storage, more)
            return
        keys, values, lengths = self._stored
        longest = int(lengths.max())
        if longest + more > storage[0].shape[2]:
            raise ValueError(f"the storage has {storage[0].shape[2]} slots for {longest + more} tokens")
        copy_all(
            (keys[:, :, :longest], values[:, :, :longest], lengths),
            (storage[0][:, :, :longest], storage[1][:, :, :longest], storage[2]),
        )
        self._stored = storage[0], storage[1], storage[2]

    def _rounded(self, tokens: int) -> int:
        return max(1, cdiv(tokens, self.unit)) * self.unit
