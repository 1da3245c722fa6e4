"""Remove the last tokens of a cache, as speculative decoding requires.

Recurrent states cannot be inverted. A cache with a `History` therefore keeps snapshots of the states, and the inputs of
the calls since the oldest snapshot (token ids take fewer bytes than a state per token). `HybridCache.crop` restores the
newest snapshot that lies before the new end. The tokens from the snapshot to the new end are then pending: the next
call computes them before its own tokens, in the same forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

# number of snapshots among the removable tokens: with more snapshots, fewer tokens are computed twice
_SNAPSHOTS = 4


@dataclass(frozen=True)
class Tokens:
    """Inputs of consecutive tokens of each sequence.

    Attributes:
        x: token ids `[B, T]`, or embeddings `[B, T, D]`.
        mask: True for real tokens; None if all are real.
        positions: rotary positions; None if the call gave none.
        inputs: extra inputs of the mixers.
    """

    x: Tensor
    mask: Bool[Tensor, "B T"] | None
    positions: Int[Tensor, "B T"] | None
    inputs: dict[str, Any]

    def __len__(self) -> int:
        return self.x.shape[1]

    def map(self, fn: Callable[[Tensor], Tensor]) -> Tokens:
        """Return a copy with `fn` applied to every tensor that has a value for each token."""
        inputs = {name: fn(x) if self.per_token(x) else x for name, x in self.inputs.items()}
        mask, positions = (None if x is None else fn(x) for x in (self.mask, self.positions))
        return Tokens(fn(self.x), mask, positions, inputs)

    def per_token(self, x: Any) -> bool:
        """True if x, an extra input, has a value for each token."""
        return isinstance(x, Tensor) and x.shape[:2] == self.x.shape[:2]

    def joined(self, other: Tokens) -> Tokens | None:
        """Return the tokens of both objects in order, or None if one call cannot compute both."""
        if self.x.dim() != other.x.dim() or (self.positions is None) != (other.positions is None):
            return None
        inputs = {}
        for name in {**self.inputs, **other.inputs}:
            a, b = self.inputs.get(name), other.inputs.get(name)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and self.per_token(a) and other.per_token(b):
                inputs[name] = torch.cat((a, b), 1)
            elif type(a) is type(b) and (a is b or (not isinstance(a, Tensor) and a == b)):
                inputs[name] = a
            else:
                return None
        mask = positions = None
        if self.mask is not None or other.mask is not None:
            mask = torch.cat((self._real(), other._real()), 1)
        if self.positions is not None and other.positions is not None:
            positions = torch.cat((self.positions, other.positions), 1)
        return Tokens(torch.cat((self.x, other.x), 1), mask, positions, inputs)

    def _real(self) -> Bool[Tensor, "B T"]:
        return self.x.new_ones(self.x.shape[:2], dtype=torch.bool) if self.mask is None else self.mask


class Snapshot(NamedTuple):
    """A copy of a cache's states after `length` tokens; its other fields are named like attributes of `HybridCache`."""

    length: int
    past: int
    lengths: Tensor | None
    padding_at_end: bool | Tensor
    batch: int | None
    parts: list[Any]


@runtime_checkable
class Restorable(Protocol):
    """The attributes of `HybridCache` that a history uses."""

    length: int
    padding_at_end: bool | Tensor

    def get_seq_length(self) -> int: ...
    def snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...


class History:
    """Snapshots of a cache's states, and the inputs since the oldest one: with them `crop` removes the last tokens.

    Args:
        tokens: number of last tokens that can be removed at any time; the whole last call can be removed if it had at
            most twice as many.
    """

    def __init__(self, tokens: int):
        if not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"the history must hold a positive number of tokens, got {tokens!r}")
        self.tokens = tokens
        self.snapshots: list[Snapshot] = []
        # inputs since the oldest snapshot, pending tokens included
        self.inputs: list[Tokens] = []
        # number of these inputs, from the end of the list, that are pending: part of the sequences, but not of the
        # states
        self.pending = 0

    @property
    def pending_tokens(self) -> int:
        """Number of tokens that the next call computes before its own."""
        return sum(map(len, self.inputs[len(self.inputs) - self.pending :]))

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshots and inputs."""
        states = sum(part.allocated for x in self.snapshots for part in x.parts if part is not None)
        return states + sum(x.x.nbytes for x in self.inputs)

    def clear(self) -> None:
        """Drop all snapshots and inputs."""
        self.snapshots, self.inputs, self.pending = [], [], 0

    def change_batch(self, cache: Restorable, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn`, which changes the batch, to pending tokens; drop other inputs; replace snapshots by a new one."""
        self.inputs = [x.map(fn) for x in self.inputs[len(self.inputs) - self.pending :]]
        self.snapshots = [cache.snapshot()]

    def crop(self, cache: Restorable, remove: int) -> None:
        """Restore the newest snapshot before the new end; the tokens between both become pending.

        Raises:
            ValueError: `remove` exceeds the number of removable tokens.
        """
        end = cache.get_seq_length() - remove
        if not self.snapshots or end < self.snapshots[0].length:
            held = cache.get_seq_length() - self.snapshots[0].length if self.snapshots else 0
            raise ValueError(
                f"the cache can drop its last {held} tokens, got {remove}: keep more, by "
                f"activate_past_recording(tokens) before the calls (now {self.tokens})"
            )
        self.snapshots = [x for x in self.snapshots if x.length <= end]
        start, kept, pending = self.snapshots[0].length, [], 0
        for x in self.inputs:
            stop = max(0, end - start)
            x = x.map(lambda t, stop=stop: t[:, :stop])
            # each input lies wholly before or after the restored snapshot, because snapshots are taken only after whole
            # inputs
            pending += start >= self.snapshots[-1].length and len(x) > 0
            start += len(x)
            kept += [x] if len(x) else []
        cache.restore(self.snapshots[-1])
        self.inputs, self.pending = kept, pending
        if pending:
            cache.padding_at_end = False if kept[-1].mask is None else ~kept[-1].mask[:, -1].all()

    def call(self, forward: Callable[..., Any], cache: Restorable, new: Tokens, given: dict[str, Any]) -> Any:
        """Run `forward` on pending and new tokens, and return its output for the new tokens.

        Pending tokens are those that `crop` has kept but that the restored states do not contain.

        Args:
            forward: a backbone's `forward`.
            cache: the call's cache.
            new: the call's tokens, with their masks, positions and extra inputs.
            given: all other arguments of `forward`.
        """
        pending = self.inputs[len(self.inputs) - self.pending :]
        outputs = []
        for tokens in self._calls([*pending, new]):
            if not self.snapshots or cache.length - self.snapshots[-1].length >= self.tokens / _SNAPSHOTS:
                self.snapshots.append(cache.snapshot())
            name = "input_ids" if tokens.x.dim() == 2 else "inputs_embeds"
            inputs = {name: tokens.x, "attention_mask": tokens.mask, "position_ids": tokens.positions}
            outputs.append(forward(**inputs, **tokens.inputs, **given))
            self._add(cache, tokens)
        return _last_tokens(outputs, len(new))

    def _calls(self, parts: Sequence[Tokens]) -> Iterator[Tokens]:
        """Yield the tokens of `parts`, joined into as few calls as possible.

        A long last call is split before its last `self.tokens` tokens, because `crop` may remove these.
        """
        now, *later = parts
        for x in later:
            both = now.joined(x)
            if both is None:
                yield now
            now = x if both is None else both
        if (cut := len(now) - self.tokens) > self.tokens:
            yield now.map(lambda t: t[:, :cut])
            now = now.map(lambda t: t[:, cut:])
        yield now

    def _add(self, cache: Restorable, tokens: Tokens) -> None:
        """Move the inputs `tokens`, which a call has computed, from the pending to the computed inputs.

        Drop snapshots and inputs that are too old for `crop`.
        """
        computed = len(tokens)
        while self.pending and computed >= len(self.inputs[-self.pending]):
            computed -= len(self.inputs.pop(-self.pending))
            self.pending -= 1
        if self.pending and computed:
            self.inputs[-self.pending] = self.inputs[-self.pending].map(lambda t: t[:, computed:])
        self.inputs.insert(len(self.inputs) - self.pending, tokens)
        # no input crosses a snapshot, so whole inputs can be dropped with it
        while len(self.snapshots) > 1 and self.snapshots[1].length <= cache.length - self.tokens:
            dropped = self.snapshots[1].length - self.snapshots.pop(0).length
            while dropped:
                dropped -= len(self.inputs.pop(0))


def _last_tokens(outputs: list[Any], tokens: int) -> Any:
    """Return the last of `outputs`, with the tensors for the last `tokens` tokens of all outputs together."""

    def last(field: Callable[[Any], Tensor]) -> Tensor:
        return torch.cat([field(x) for x in outputs], 1)[:, -tokens:]

    out = outputs[-1]
    if len(outputs) == 1 and out.last_hidden_state.shape[1] == tokens:
        return out
    batch = len(out.last_hidden_state)
    for name in ("hidden_states", "router_logits"):
        if (layers := getattr(out, name, None)) is not None:
            # router logits have one dimension for rows and tokens together: [B · T, experts]
            values = [
                last(lambda x, i=i, name=name: getattr(x, name)[i].view(batch, -1, getattr(x, name)[i].shape[-1]))
                for i in range(len(layers))
            ]
            setattr(out, name, tuple(x if name == "hidden_states" else x.flatten(0, 1) for x in values))
    out.last_hidden_state = last(lambda x: x.last_hidden_state)
    return out
