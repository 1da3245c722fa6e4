"""Modes, which select the mixer of each token: the forms in which callers give them, and their conversion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tokenmix_core import stream
from tokenmix_core.chunking import cdiv, packed_lengths, packed_positions
from tokenmix_core.nn import Span
from tokenmix_core.parallel import SequenceShard
from tokenmix_oryx.projection import TokenOrder, token_order

LINEAR, ATTENTION = "linear", "attention"
MODES = (LINEAR, ATTENTION)
Assignment = Literal["chunk", "sequence"]
# one mode for all tokens, or (start, mode) pairs, or a tensor [B, T] that is True for attention
ModeInput = str | Sequence[tuple[int | float, str]] | Tensor
# mode of the tokens of a served request
RequestMode = str | Sequence[tuple[int | float, str]]


class Modes(NamedTuple):
    """The modes of a call in the form that layers take.

    Attributes:
        uniform: the mode of all tokens, if the host knows that they have the same; else None.
        attention: `[B, T]`, True for attention, in the layout of the layers' inputs; None if `uniform` is not None.
        order: the tokens sorted by mode, for a grouped GEMM; None if a grouped GEMM would save no time.
        rows: `attention` of the whole rows if they are split over ranks; else None.
    """

    uniform: str | None
    attention: Bool[Tensor, "B T"] | None = None
    order: TokenOrder | None = None
    rows: Bool[Tensor, "B T_whole"] | None = None

    @property
    def may_attend(self) -> bool:
        """False if the host knows that all tokens are in linear mode, else True."""
        return self.uniform != LINEAR

    def ordered(self) -> Modes:
        """Return the modes with `order`, which is computed here once for all layers."""
        return self if self.attention is None else self._replace(order=token_order(self.attention))

    def split(self, shard: SequenceShard | None) -> Modes:
        """Return the modes of this rank's tokens, from those of the whole rows."""
        rows = self.attention
        return self if shard is None or rows is None else self._replace(attention=shard.split(rows), rows=rows)


def check_mode(mode: Any) -> None:
    """Raise a ValueError for an invalid mode."""
    if isinstance(mode, Tensor):
        if mode.dtype != torch.bool or mode.dim() != 2:
            raise ValueError(
                f"a mode tensor must be [B, T] of bool, True for attention, got {list(mode.shape)} of {mode.dtype}"
            )
    elif isinstance(mode, str):
        if mode not in MODES:
            raise ValueError(f"a mode must be 'linear' or 'attention', got {mode!r}")
    elif isinstance(mode, list | tuple):
        _check_schedule(mode)
    else:
        raise ValueError(
            "a mode must be 'linear', 'attention', a list of (start, mode) or a bool tensor [B, T], "
            f"got {type(mode).__name__}"
        )


def _check_schedule(schedule: Sequence[Any]) -> None:
    pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in schedule)
    if not schedule or not pairs:
        raise ValueError(f"a schedule must be a list of (start, mode) pairs, got {list(schedule)!r}")
    starts, modes = zip(*schedule, strict=True)
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"a mode must be 'linear' or 'attention', got {mode!r} in {list(schedule)!r}")
    kinds = {float if isinstance(s, float) else int for s in starts if s != 0}
    whole = all(isinstance(s, int | float) and not isinstance(s, bool) for s in starts)
    if not whole or len(kinds) > 1 or (float in kinds and not all(0 <= s <= 1 for s in starts)):
        raise ValueError(
            "the starts of a schedule must all be positions (integers) or all shares of the sequence (floats from 0 to "
            f"1), got {list(starts)!r}"
        )
    if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"the starts of a schedule must increase from 0, got {list(starts)!r}")


def describe(mode: Any) -> str:
    """Return a mode as text; a schedule in the format that the command line reads."""
    if isinstance(mode, str):
        return mode
    if isinstance(mode, list | tuple):
        return ",".join(f"{start}:{name}" for start, name in mode)
    return "chosen for each token"


def resolve(mode: ModeInput, span: Span, cu_seqlens: Int[Tensor, "N_plus_1"] | None = None) -> Modes:
    """Return the modes of a call's tokens.

    Args:
        mode: one mode; or a schedule, whose starts are positions in each sequence without padding, or fractions of the
            sequence's length if the call has its first tokens; or `[B, T]`, one value for each token of the call.
        span: token layout of the call.
        cu_seqlens: boundaries of packed sequences.

    Raises:
        ValueError: an invalid mode, a tensor of another shape, or fractions in a call that continues sequences.
    """
    check_mode(mode)
    if isinstance(mode, str):
        return Modes(mode)
    if isinstance(mode, Tensor):
        if mode.shape != (span.batch, span.tokens):
            raise ValueError(f"mode must have shape [B, T] = {[span.batch, span.tokens]}, got {list(mode.shape)}")
        return Modes(None, span.pack(mode.to(span.device)))
    starts, modes = zip(*mode, strict=True)
    first, last = span.past, span.past + span.tokens
    if any(isinstance(s, float) for s in starts):
        return _by_share(starts, modes, span, cu_seqlens)
    if cu_seqlens is None and span.uniform:
        ends = [*starts[1:], last]
        present = {m for s, e, m in zip(starts, ends, modes, strict=True) if max(s, first) < min(e, last)}
        if len(present) == 1:
            return Modes(present.pop())
    positions = _positions(span, cu_seqlens)
    boundaries = torch.tensor(starts[1:], device=span.device)
    index = torch.searchsorted(boundaries, positions, right=True)
    return Modes(None, _is_attention(modes, span.device)[index])


def step_mode(mode: ModeInput, lengths: Callable[[], list[int]]) -> str | Tensor:
    """Return the mode of the next token: one for all sequences, or `[B, 1]`; `lengths` returns the tokens' positions.

    Raises:
        ValueError: an invalid mode, or a schedule by fractions, which requires the final length of a sequence.
    """
    check_mode(mode)
    if isinstance(mode, str | Tensor):
        return mode
    positions = lengths()
    if any(isinstance(start, float) for start, _ in mode):
        raise ValueError(
            f"starts as shares of the sequence need its length, but this call continues {max(positions)} tokens; "
            "give the starts as positions"
        )
    found = [name_at(mode, position) for position in positions]
    if len(set(found)) == 1:
        return found[0]
    return torch.tensor([[name == ATTENTION] for name in found])


def request_mode(mode: Any, generated: Any, prompt: int) -> RequestMode:
    """Return the mode of the tokens of a served request: one mode for all, or (position, mode) pairs.

    Args:
        mode: mode of the prompt's tokens.
        generated: mode of generated tokens; None if `mode` also applies to them.
        prompt: number of tokens in the prompt.

    Raises:
        ValueError: an invalid mode, or one with a value for each token.
    """
    if not isinstance(mode, str | list | tuple):
        raise ValueError(f"a request's mode must be 'linear', 'attention' or a list of (start, mode), got {mode!r}")
    check_mode(mode)
    pairs = [(0, mode)] if isinstance(mode, str) else [(start, name) for start, name in mode]
    if any(isinstance(start, float) for start, _ in pairs):
        # each mode starts at the first token at or after its fraction of the prompt
        pairs = list({math.ceil(start * prompt): name for start, name in pairs}.items())
    if generated is not None:
        later = [(0, generated)] if isinstance(generated, str) else generated
        pairs = [(start, name) for start, name in pairs if start < prompt]
        pairs += [(prompt, name_at(later, prompt)), *((start, name) for start, name in later if start > prompt)]
    return pairs[0][1] if len({name for _, name in pairs}) == 1 else pairs


def name_at(pairs: Sequence[tuple[int | float, str]], position: int) -> str:
    """Return the mode at `position` by (start, mode) pairs."""
    return next(name for start, name in reversed(pairs) if start <= position)


def batch_mode(modes: Sequence[RequestMode], ranges: Sequence[tuple[int, int]]) -> str | Bool[Tensor, "B T"]:
    """Return the mode of a call whose row i has the tokens at positions `ranges[i]` of a request with `modes[i]`.

    The result is one mode if all tokens have the same mode; else a tensor whose shorter rows are padded with False on
    the left.
    """
    if isinstance(modes[0], str) and all(mode == modes[0] for mode in modes):
        return modes[0]
    rows = [
        [mode == ATTENTION] * (stop - start)
        if isinstance(mode, str)
        else [name_at(mode, t) == ATTENTION for t in range(start, stop)]
        for mode, (start, stop) in zip(modes, ranges, strict=True)
    ]
    if len(found := {x for row in rows for x in row}) == 1:
        return ATTENTION if found.pop() else LINEAR
    longest = max(map(len, rows))
    return torch.tensor([[False] * (longest - len(row)) + row for row in rows])


def _by_share(starts: Sequence[float], modes: Sequence[str], span: Span, cu_seqlens: Tensor | None) -> Modes:
    if span.past:
        raise ValueError(
            f"starts as shares of the sequence need its length, but this call continues {span.past} tokens; "
            "give the starts as positions"
        )
    positions = _positions(span, cu_seqlens)
    cu_seqlens = span.cu_seqlens if cu_seqlens is None else cu_seqlens
    if cu_seqlens is None:
        lengths = span.after.unsqueeze(1).expand_as(positions)
    else:
        lengths = packed_lengths(cu_seqlens, positions.shape[1]).unsqueeze(0)
    share = torch.tensor(starts[1:], device=span.device, dtype=torch.float64)
    # each mode starts at the first token at or after its fraction of the sequence's length
    index = (positions.unsqueeze(-1) >= (share * lengths.unsqueeze(-1)).ceil()).sum(-1)
    return Modes(None, _is_attention(modes, span.device)[index])


def _positions(span: Span, cu_seqlens: Tensor | None) -> Int[Tensor, "B T"]:
    """Return the position of each token in its sequence, in the layout of the layers' inputs."""
    if cu_seqlens is not None:
        return packed_positions(cu_seqlens, span.tokens).unsqueeze(0)
    return span.positions.view(span.layout)


def _is_attention(modes: Sequence[str], device: torch.device) -> Bool[Tensor, "parts"]:
    return torch.tensor([mode == ATTENTION for mode in modes], device=device)


def draw_modes(
    seq_len: int,
    *,
    seed: int,
    index: int,
    chunk_size: int = 128,
    attention_probability: float = 0.25,
    assignment: Assignment = "chunk",
) -> Bool[Tensor, "T"]:
    """Draw the modes of training sequence `index`, `[T]`, True for attention; they depend only on seed and index.

    With the assignment "chunk", each chunk of `chunk_size` tokens is independently in attention mode with probability
    `attention_probability`; with "sequence", all tokens have the same mode, drawn with this probability.

    Raises:
        ValueError: an unknown assignment, sizes below 1, or a probability outside 0 … 1.
    """
    if assignment not in ("chunk", "sequence"):
        raise ValueError(f"assignment must be 'chunk' or 'sequence', got {assignment!r}")
    if seq_len < 1 or chunk_size < 1 or not 0 <= attention_probability <= 1:
        raise ValueError(
            "seq_len and chunk_size must be at least 1 and attention_probability from 0 to 1, "
            f"got {seq_len}, {chunk_size} and {attention_probability}"
        )
    size = chunk_size if assignment == "chunk" else seq_len
    draws = stream("oryx modes", seed, index).random(cdiv(seq_len, size))
    return torch.from_numpy(np.repeat(draws < attention_probability, size)[:seq_len])
