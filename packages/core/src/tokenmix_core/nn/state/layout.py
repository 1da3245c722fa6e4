"""Token layout of one call: the sequence and the position of every token. Padding is removed or moved to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from tokenmix_core.chunking import cu_seqlens_from_lengths


class _once:
    """A property computed at first use; Python 3.11's `cached_property` has a lock, which breaks torch.compile."""

    def __init__(self, fn: Callable[[Any], Any]):
        self.fn, self.__doc__ = fn, fn.__doc__

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        value = obj.__dict__[self.fn.__name__] = self.fn(obj)
        return value


class Span:
    """Token layout of one call: N rows of `tokens` tokens each, appended to the sequences in the cache.

    Without a mask the call's tensors are dense, `[N, tokens, ...]`. With a mask they are packed, `[1, total, ...]`, and
    contain no padding. Under torch.compile shapes must not depend on the mask, so padding stays in the tensors
    (`fixed`). If the call keeps no states, padding is moved behind the real tokens of its row, `[N, tokens, ...]`,
    where causal mixers do not see it. Otherwise padding forms one more sequence at the end of the packed call, whose
    outputs are discarded.

    Args:
        batch: N.
        tokens: tokens in a row of this call, padding included.
        device: device of the index tensors.
        past: tokens that each sequence holds before the call; an upper bound if `lengths` is given.
        lengths: `[N]` int64, tokens of each sequence before the call; None if all have `past`.
        mask: `[N, tokens]`, True for real tokens; None if all are real.
        count: tokens stored by earlier calls, if `past` includes spare capacity; None if `past` is this number. The
            host knows `count` without a synchronisation, so `Mixer.step_form` may use it.
        known: function that returns `lengths` as Python integers; None if every call of it would need a
            synchronisation.
        fixed: with a mask, give all tensors shapes that do not depend on its values.
        stateless: whether the call keeps no states.
    """

    def __init__(
        self,
        batch: int,
        tokens: int,
        device: torch.device,
        *,
        past: int = 0,
        lengths: Int[Tensor, "N"] | None = None,
        mask: Bool[Tensor, "N tokens"] | None = None,
        count: int | None = None,
        known: Callable[[], Sequence[int]] | None = None,
        fixed: bool = False,
        stateless: bool = False,
    ):
        self.batch, self.tokens, self.device, self.past = batch, tokens, device, past
        self.lengths, self.mask, self.known = lengths, mask, known
        self.count = past if count is None else count
        # padding stays in the call's tensors: if `aligned`, behind the real tokens of its row; if `fixed`, as one more
        # sequence
        self.aligned = fixed and stateless and mask is not None
        self.fixed = fixed and not stateless and mask is not None
        # True if the only token in the mask is a dummy, for a batch without real tokens (`with_dummy`)
        self.empty = False
        # number of sequences with a state during the call: those of the batch and, if `fixed`, the sequence of padding
        self.sequences = batch + 1 if self.fixed else batch
        self._written: dict[tuple[int | None, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._fills: dict[int, tuple[Tensor, Tensor]] = {}
        self._clamped: dict[int | None, Tensor] = {}

    def with_dummy(self) -> Span:
        """Return a layout with one dummy token, for a batch without real tokens; `unpack` replaces its output by zeros.

        The dummy gives every parameter a zero gradient, and lets every rank gather sharded layers, as DDP and FSDP
        require.
        """
        assert self.mask is not None
        mask = torch.zeros_like(self.mask)
        mask[0, 0] = True
        span = Span(self.batch, self.tokens, self.device, mask=mask, stateless=True)
        span.empty = True
        return span

    @property
    def uniform(self) -> bool:
        """True if all sequences have equal lengths before and after the call, as far as the host knows them."""
        return self.lengths is None and self.mask is None

    @property
    def keeps_padding(self) -> bool:
        """True if the call's tensors contain padding."""
        return self.aligned or self.fixed

    def ends(self, every: int) -> bool:
        """True if after this decoding step the length of some sequence is a multiple of `every`.

        Waits for the device if the host does not know the lengths. The call must have one token per sequence.
        """
        if self.known is None and self.lengths is None:
            return (self.past + 1) % every == 0
        if self.known is None:
            return bool((self.after % every == 0).any())
        return any((n + 1) % every == 0 for n in self.known())

    def fill(self, every: int) -> tuple[Int[Tensor, "N"], Int[Tensor, "N"]]:
        """Return each new token's index in its sequence's chunk of `every` tokens, and the chunk's new length (int32).

        The call must have one token per sequence.
        """
        if every not in self._fills:
            index = self.before % every
            self._fills[every] = index, (index + 1).to(torch.int32)
        return self._fills[every]

    @_once
    def before(self) -> Int[Tensor, "N"]:
        """Length of each sequence before the call; if `fixed`, one more entry for the padding."""
        if self.lengths is None:
            return torch.full((self.sequences,), self.past, dtype=torch.int64, device=self.device)
        return torch.cat((self.lengths, self.lengths.new_zeros(1))) if self.fixed else self.lengths

    @_once
    def after(self) -> Int[Tensor, "N"]:
        """Length of each sequence after the call; if `fixed`, one more entry for the padding."""
        return self.before + (self.tokens if self.mask is None else self._counts)

    def after_up_to(self, most: int | None) -> Int[Tensor, "N"]:
        """Return each sequence's length after the call, int32, clamped to `most` unless `most` is None."""
        if most not in self._clamped:
            after = self.after if most is None else self.after.clamp(max=most)
            self._clamped[most] = after.to(torch.int32)
        return self._clamped[most]

    @_once
    def _counts(self) -> Int[Tensor, "N"]:
        """Number of tokens of each sequence in this call."""
        assert self.mask is not None
        counts = self.mask.sum(1)
        return torch.cat((counts, (~self.mask).sum().unsqueeze(0))) if self.fixed else counts

    @_once
    def index(self) -> Int[Tensor, "total"]:
        """Index in the flattened `[N · tokens]` of each token of the call's tensors.

        If padding stays in these tensors, the indices include padding, after the real tokens (of its row if `aligned`);
        if not, computing the indices waits for the device.
        """
        assert self.mask is not None
        if self.aligned:
            order = (~self.mask).to(torch.uint8).argsort(dim=1, stable=True)
            return (order + self.tokens * torch.arange(self.batch, device=self.device).unsqueeze(1)).flatten()
        if self.fixed:
            return (~self.mask).flatten().to(torch.uint8).argsort(stable=True)
        return self.mask.flatten().nonzero().squeeze(1)

    @_once
    def cu_seqlens(self) -> Int[Tensor, "N_plus_1"] | None:
        """Boundaries of the packed sequences; None for a dense call."""
        return None if self.mask is None or self.aligned else cu_seqlens_from_lengths(self._counts)

    @_once
    def on_host(self) -> tuple[list[int], list[int]]:
        """Boundaries of the sequences in the call, and the sequences' lengths before it, as Python integers.

        Costs one synchronisation: all layers share the layout, so that only the first layer that asks waits for the
        device.
        """
        ends = self.after - self.before
        ends = torch.cat((ends.cumsum(0), self.before)).tolist()
        return [0, *ends[: self.sequences]], ends[self.sequences :]

    @_once
    def rows(self) -> Int[Tensor, "total"]:
        """The sequence of each token, in the order of the call's tensors."""
        rows = torch.arange(self.batch, device=self.device)
        if self.tokens > 1:
            rows = rows.repeat_interleave(self.tokens, output_size=self.batch * self.tokens)
        if self.mask is None:
            return rows
        return (torch.where(self.mask.flatten(), rows, self.batch) if self.fixed else rows)[self.index]

    @_once
    def positions(self) -> Int[Tensor, "total"]:
        """The position of each token in its sequence, in the order of the call's tensors."""
        if self.mask is None:
            offsets = torch.arange(self.tokens, device=self.device).expand(self.batch, -1)
        else:
            offsets = self.mask.cumsum(1) - 1
        positions = (self.before[: self.batch].unsqueeze(1) + offsets).flatten()
        if self.fixed:
            assert self.mask is not None
            padding = ~self.mask.flatten()
            positions = torch.where(padding, padding.cumsum(0) - 1, positions)
        return positions if self.mask is None else positions[self.index]

    @property
    def layout(self) -> tuple[int, int]:
        """The first two dimensions of the call's tensors; −1 for the tokens of a packed call."""
        return (self.batch, self.tokens) if self.mask is None or self.aligned else (1, -1)

    def pack(self, x: Shaped[Tensor, "N tokens *rest"]) -> Shaped[Tensor, "B T *rest"]:
        """Convert rows to the layout of the call: unchanged without a mask, else padding is removed or moved."""
        return x if self.mask is None else x.flatten(0, 1)[self.index].unflatten(0, self.layout)

    def unpack(self, x: Shaped[Tensor, "B T *rest"]) -> Shaped[Tensor, "N tokens *rest"]:
        """Undo `pack`; padding gets zeros."""
        if self.mask is None:
            return x
        out = x.new_zeros(self.batch * self.tokens, *x.shape[2:])
        out = out.index_copy(0, self.index, x.flatten(0, 1)).unflatten(0, (self.batch, self.tokens))
        if self.keeps_padding or self.empty:
            padding = torch.ones_like(self.mask) if self.empty else ~self.mask
            out = out.masked_fill(padding.view(*padding.shape, *[1] * (out.dim() - 2)), 0)
        return out

    def written(self, window: int | None, sinks: int) -> tuple[Tensor, Tensor, Tensor]:
        """For the tokens that a KV cache with this window stores, return indices in the call, rows and positions.

        If `fixed`, return all tokens; those that are not stored are in the row of the sequence of padding.
        """
        key = (window, sinks)
        if key not in self._written:
            kept, rows, positions = torch.arange(len(self.rows), device=self.device), self.rows, self.positions
            last = None
            if window is not None and self.tokens > 1:
                last = (positions >= self.after[rows] - window) | (positions < sinks)
            if self.fixed:
                # shapes must be fixed: tokens not to be stored are written to the sequence of padding, which no call
                # reads
                wanted = rows < self.batch if last is None else last & (rows < self.batch)
                rows, positions = torch.where(wanted, rows, self.batch), torch.where(wanted, positions, 0)
            elif last is not None:
                kept = last.nonzero().squeeze(1)
                rows, positions = rows[kept], positions[kept]
            self._written[key] = kept, rows, positions
        return self._written[key]
